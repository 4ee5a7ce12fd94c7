"""Implement the evaluation command of all systems: score a sweep, write tables and a page.

A sweep consists of points. A point is a model with one checkpoint, one average (EMA) of its
weights, and fixed sampler settings. The command draws pictures for every point at every guidance
scale, with the same prompts and the same noise. drawn_features.py saves the pictures' features
after each batch.
"""

import contextlib
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags, logging
from jaxtyping import UInt8

from diffusion_jax import cli, files, runs
from diffusion_jax.config import picture_fields
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.ranges import Scale
from diffusion_jax.config.settings import Evaluation
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.devices import programs
from diffusion_jax.draw import option_flags, options, program
from diffusion_jax.draw.kind import Kind
from diffusion_jax.draw.model import Model
from diffusion_jax.draw.options import Values
from diffusion_jax.draw.stage import fingerprint
from diffusion_jax.evaluate import copies, curve, drawn_features, figures, scorers, sweep, sweep_flags
from diffusion_jax.evaluate.scorers import Scorer
from diffusion_jax.files import sheets
from diffusion_jax.logs import progress
from diffusion_jax.metrics.cards import Card, Scored
from diffusion_jax.task import Params

flags.disclaim_key_flags()  # --help lists these flags with those of the module that runs `command`.


class Point(NamedTuple):
    """A point of a sweep: a model or a cascade with fixed weights and sampler settings."""

    checkpoint: int
    """The step of the first stage's checkpoint."""
    ema: str
    """The name of the first stage's average (EMA)."""
    params: Sequence[Params]
    """The weights of each stage."""
    draw: drawn_features.DrawPrompts
    """Draws pictures with these weights and sampler settings."""
    card: Card
    """The sampler, its steps, the precision, and other settings that affect the pictures."""
    later: str = ""
    """The checkpoints and averages (EMA) of a cascade's later stages, or "" if they do not vary."""
    settings: Mapping[str, str] = {}
    """The config fields that vary over the sweep: maps names such as "sampler.steps" to values."""


class Subject(NamedTuple):
    """A model or a cascade to evaluate, with the points of its sweep."""

    workdir: pathlib.Path
    """The run's folder. The sweep is written to its subfolder evaluation/."""
    source: str
    """The config field data.source. A source's module may provide prompts and a judge."""
    size: int
    """The side of the final pictures in pixels."""
    batch_size: int
    """The largest number of pictures to draw at once, if Sweep.batch_size is None."""
    points: Sequence[Callable[[], Point]]
    """One function per point. Each loads the weights of its point and returns the Point."""
    name: str = ""
    """The label of this subject's curve if several subjects share a figure."""
    fields: Sequence[Field] = ()
    """The fields of data.fields, whose numbers are inputs of the network."""
    warn_of_unused: Callable[[Sequence[str]], None] = lambda prompts: None
    """Logs the words of embedding files that no prompt contains."""


class Sweep(NamedTuple):
    """The guidance values of a sweep, and the settings for drawing and saving its pictures."""

    guidance: Sequence[float]
    seed: int = 0
    """The seed of image 0. Image i has seed `seed` + i."""
    batch_size: int | None = None
    save_images: bool = False
    name: str | None = None
    """The name of the results' folder under evaluation/. By default, it is step_N, where N is the
    step of the first point's checkpoint. With several subjects, it joins their names."""
    size: int | None = None
    """The side in pixels to which pictures are resized before scoring. None does not resize."""


_AXES = ("ema", "checkpoint", "guidance")
"""Drawing options whose flags sweep_flags defines. Each of these flags takes several values."""


def open_subject(
    kind: Kind, paths: Sequence[str], points: Sequence[Sequence[Values]] = (), weights: Sequence[Sequence[Values]] = ()
) -> Subject:
    """Open a single model or a cascade for evaluation.

    Args:
        kind: The system.
        paths: The path of each stage; one path for a single model.
        points: For each combination of sampler settings to score, a list with the option values of
            every stage, keyed as in kind.options. By default, there is one combination, with the
            models' own settings.
        weights: For each stage, a list of the weights to evaluate, each as the values of the
            options "ema" and "checkpoint". Stages beyond the end of this sequence use the newest
            checkpoint, and its average with the largest decay.

    Raises:
        FileNotFoundError: A path does not exist, or holds no model.
        ValueError: A value is invalid, `weights` has more entries than there are stages, a model
            cannot draw from texts alone, or the images are not square.
    """
    points = with_weights(points or [[{}] * len(paths)], weights)
    model = kind.open(paths, points[0])
    model.check([], [1])
    last = model.stages[-1]
    return of_model(model, points, runs.load(last.workdir)["data"]["source"] if last.step else "")


def of_model(model: Model, points: Sequence[Sequence[Values]], source: str) -> Subject:
    """Return the Subject of a model or a cascade.

    Args:
        model: The model, loaded with the values of the first point.
        points: For each point of the sweep, the option values of each stage.
        source: The config field data.source of the training run.

    Raises:
        ValueError: A point has invalid values, or the images are not square.
    """
    joined = lambda values: ", ".join(map(str, values))
    (height, width), (side, _) = model.shapes[0], model.shapes[-1]
    if height != width:
        raise ValueError(
            f"{model.stages[0].workdir} draws images of {height}x{width} pixels, but only square "
            "images can be scored: set sampler.height and sampler.width to 0, or to equal values"
        )
    typed = [[options.read(model.options, of_stage) for of_stage in point] for point in points]
    for point in typed[1:]:  # Raise errors of invalid settings before anything is drawn.
        model.check_values(point)
    changeable = options.changeable(model.options)
    varied = options.varied([[options.fields(changeable, one) for one in p] for p in typed])
    later_weights = [[(v.get("ema"), v.get("checkpoint")) for v in point[1:]] for point in typed]
    vary = any(weights != later_weights[0] for weights in later_weights)
    model.sets_of_weights = 2  # A sweep may have many points.

    def open_point(number: int) -> Point:
        opened = model.changed(typed[number])
        first, *others = stages = opened.stages
        each = [stage.settings for stage in stages]
        card = {
            "sampler": joined(s.sampler.name for s in each),
            "steps": joined(s.sampler.steps for s in each),
            "precision": joined(s.unet.dtype for s in each),
            "models": [opened.describe(stage) for stage in stages],
        }
        later = ", ".join(f"{stage.step} {stage.ema}" for stage in others if vary)
        params, draw = [stage.params for stage in stages], functools.partial(_draw, opened)
        return Point(first.step, first.ema, params, draw, card, later, varied[number])

    name = files.path(model.stages[-1].workdir).name
    batch_size = program.default_batch_size(height, height)
    opened = [functools.partial(open_point, number) for number in range(len(points))]
    fields = picture_fields.read(model.stages[0].settings.fields)
    workdir = files.path(model.stages[0].workdir)
    warn = model.warn_of_unused
    return Subject(workdir, source, side, batch_size, opened, name, fields, warn)


def with_weights(points: Sequence[Sequence[Values]], weights: Sequence[Sequence[Values]]) -> list[list[Values]]:
    """Return each of `points` with each combination of the weights that `weights` lists per stage.

    Both hold option values. Stages beyond the end of `weights` have the weights of the points.
    Raises ValueError if there are weights for more stages than a point has.
    """
    num_stages = len(points[0])
    if len(weights) > num_stages:
        raise ValueError(
            f"--ema or --checkpoint is given {len(weights)} times for {num_stages} stages: give "
            "each flag at most once per stage, with commas between the values to compare"
        )
    chosen = itertools.product(*weights, *[[{}]] * (num_stages - len(weights)))
    return [
        [{**of_stage, **of_weights} for of_stage, of_weights in zip(point, stages, strict=True)]
        for stages in chosen
        for point in points
    ]


def _draw(model: Model, prompts: Sequence[str], seeds: Sequence[int], guidance: float) -> np.ndarray:
    batches = model.batches(prompts, range(len(prompts)), seeds, guidance=guidance, batch_sizes=[len(seeds)])
    return np.concatenate([by_stage[-1] for by_stage in batches])


def command(kind: Kind, write_page: Callable[[pathlib.Path], pathlib.Path]) -> None:
    """Run the command `python -m PACKAGE.evaluate --workdir=FOLDER`.

    --help prints the docstring of the main module, which calls this function. `write_page` writes a
    web page about a run's folder, and returns the path of the page.
    """
    f = sweep_flags.define(kind.guidance)
    read_paths = kind.define_paths(several=True)
    without = _AXES if kind.file_options is None else (*_AXES, "height", "width")
    holders = option_flags.define_axes(kind.options, without)

    def main() -> None:
        cli.start()
        with cli.bad_input():
            chosen = sorted(sweep_flags.numbers(f["guidance"].value, "guidance", Scale))
            weights = sweep_flags.weights(f["ema"].value, f["checkpoint"].value)
            subjects = _open_subjects(kind, *read_paths(), holders, weights)
            check_names(subjects)
            check_folder(f["name"].value)
            if f["out"].value:
                files.check_writable(f["out"].value, "--out")
                subjects = [s._replace(workdir=files.path(f["out"].value)) for s in subjects]
            scorer = _scorer(subjects, f)
            size = f["size"].value or common_size(subjects)
            training = copies.open_training(f["copies"].value, f["unseen"].value, scorer, size)
        plan = Sweep(
            chosen or scorer.guidance or kind.guidance,
            f["seed"].value,
            f["batch_size"].value,
            f["save_images"].value,
            f["name"].value,
            f["size"].value,
        )
        with cli.bad_input():
            plans = [rehearse(subject, scorer, plan) for subject in subjects]
        if f["rehearse"].value:
            print("\n\n".join(plans))
            return
        out = evaluate(subjects, scorer, plan, training)
        if jax.process_index() == 0:
            logging.info("wrote %s", out)
            try:
                logging.info("wrote a page with all results to %s", write_page(subjects[0].workdir))
            except ValueError as error:  # A damaged file of another sweep, or of the training.
                logging.warning("there is no page with all results: %s", error)

    cli.run(main)


def _open_subjects(
    kind: Kind,
    workdirs: Sequence[str],
    models: Sequence[str],
    holders: option_flags.Holders,
    weights: Sequence[Sequence[Values]],
) -> list[Subject]:
    """Open the models of --workdir and --model, or the cascade of --workdir, with all points."""
    if kind.file_options is None:
        points = option_flags.points(kind.options, holders, len(workdirs))
        return [open_subject(kind, workdirs, points, weights)]
    if not (workdirs or models):
        raise ValueError("there is no model to score: give --workdir=FOLDER (a training run) or --model=PATH")
    if not (workdirs or flags.FLAGS.out):
        raise ValueError("a --model has no workdir for the results: name a folder with --out=FOLDER")
    points = of_runs = option_flags.points(kind.options, holders, 1)
    if models:  # They use these options.
        kept = kind.options.keys() - kind.file_options.keys()
        of_runs = [[{k: v for k, v in one.items() if k in kept}] for (one,) in points]
    ema = "raw" if all(one["ema"] == "raw" for one in weights[0]) else "ema"
    return [
        *(open_subject(kind, [workdir], of_runs, weights) for workdir in workdirs),
        *(open_subject(kind, [path], points, [[{"ema": ema}]]) for path in models),
    ]


def rehearse(subject: Subject, scorer: Scorer, plan: Sweep) -> str:
    """Trace the drawing and scoring of one batch, and return a printable summary of the sweep.

    Nothing is compiled. An error that would stop the sweep is raised during tracing.
    """
    start, point, total = time.time(), subject.points[0](), len(scorer.prompts)
    subject.warn_of_unused(scorer.prompts)
    most = program.even_batch_size(plan.batch_size or subject.batch_size, total)
    kinds = {g == 1: g for g in plan.guidance}.values()  # With and without guidance.
    compute = lambda guidance: drawn_features.drawing(scorer, point.draw, guidance, most, size=plan.size)
    with programs.rehearsal():
        *_, features = [compute(guidance)(np.arange(most)) for guidance in kinds]
    judged = [f"{k} ({v.shape[1]})" for k, v in features.items() if v.ndim == 2 and k != "seconds"]
    images = len(subject.points) * len(plan.guidance) * total
    rows = [
        ("model", f"{subject.workdir}, with sampler {point.card['sampler']}"),
        ("draws", f"{images:,} images of {subject.size}x{subject.size}, {most} at once"),
        ("prompts", f"{total:,}, at guidance {', '.join(f'{g:g}' for g in plan.guidance)}"),
        ("features", f"{', '.join(judged)} (number per image)"),
        ("rehearsed", f"in {time.time() - start:.1f} s; nothing was compiled"),
    ]
    return progress.block(rows)


def evaluate(
    subjects: Sequence[Subject], scorer: Scorer, plan: Sweep, training: copies.Training | None = None
) -> pathlib.Path:
    """Draw and score all prompts at every point and guidance. Return the folder of the results.

    The folder is in the first subject's workdir. Its table has a row for each point at each
    guidance scale. If `training` is not None, also find the nearest training picture of each drawn
    picture. The process prints a message and exits with code 2 if a checkpoint or average is
    missing, if the folder holds features of another sweep, or if an image is not finite. It exits
    with code 75 if another process evaluates into the folder.
    """
    with contextlib.ExitStack() as stack:
        with cli.bad_input():
            name = plan.name or _name(subjects, subjects[0].points[0]())
            out = subjects[0].workdir / runs.EVALUATION / name
            stack.enter_context(runs.writing(out))
        _score_points(subjects, scorer, plan, training, out)
    return out


def _score_points(
    subjects: Sequence[Subject], scorer: Scorer, plan: Sweep, training: copies.Training | None, out: pathlib.Path
) -> None:
    rows, pictures, copied = [], [], []
    several = any(len(subject.points) > 1 for subject in subjects)
    for subject, open_point in ((s, open_point) for s in subjects for open_point in s.points):
        with cli.bad_input():
            point = open_point()
        of_point: dict[str, Any] = {"model": subject.name} if len(subjects) > 1 else {}
        of_point |= {"checkpoint": point.checkpoint, "ema": point.ema}
        of_point |= {"later": point.later} if point.later else {}
        of_point |= point.settings
        model = fingerprint(point.params)
        for guidance in plan.guidance:
            name = f"{sweep.point_name(of_point)}_guidance_{guidance:g}"
            card = point.card | of_point | {"guidance": guidance, "seed": plan.seed, "model": model}
            if plan.size not in (None, subject.size):
                card["resized"] = f"{drawn_features.KERNEL} from {subject.size}x{subject.size}"
            row = {"guidance": guidance, **of_point}
            saved = out / f"images_{pathlib.Path(sweep.sheet_name(row, several)).stem}"
            cards, features = _features(subject, point, scorer, plan, out, name, card, saved)
            if jax.process_index():
                continue
            captions = [scorer.caption(i) for i in scorer.shown]
            pictures.append(sheets.contact_sheet(features.pop("images"), captions))
            drawing, scoring = features.pop("seconds").sum(0)
            scores = scorer.score(features)
            share = round(float(scoring / (drawing + scoring)), 4)
            rows.append(row | scorers.columns(scores) | {sweep.SHARE: share})
            sweep.write_scored(out / sweep.SCORED, name, {k: Scored(v, cards[k]) for k, v in scores.items()})
            sweep.write_table(out / sweep.TABLE, rows)
            sheets.write_png(out / sweep.sheet_name(row, several), pictures[-1])
            logging.info("%s", sweep.describe(rows[-1]).replace("\n", " | "))
            if training is not None:
                redraw = functools.partial(_redraw, scorer, point, plan, guidance)
                sheet = sweep.sheet_name(row, several)
                found = copies.write(out, sheet, training, features, redraw)
                copied += [row | of_features for of_features in found]
                sweep.write_table(out / copies.TABLE, copied)
    if jax.process_index() == 0:
        sweep.write_scores(out, rows)
        figure = curve.figure(sweep.read(out))
        for format in ("png", "pdf"):
            files.write_whole(out / f"curve.{format}", figures.save(figure, format))
        if (real := scorer.real_sheet()) is not None:
            sheets.write_png(out / sweep.REAL, real)
        sweep.write_metrics(out, rows, pictures)


def _features(
    subject: Subject,
    point: Point,
    scorer: Scorer,
    plan: Sweep,
    out: pathlib.Path,
    name: str,
    card: Card,
    images: pathlib.Path,
) -> tuple[dict[str, Card], drawn_features.FeaturesByKind]:
    """Draw the pictures of one point and guidance. Return the references' cards, and the features.

    The cards are keyed by reference, and the features by kind (Metric.features). The features are
    saved in out/features/`name`. Pictures whose features are already saved are not drawn again. If
    plan.save_images is set, the drawn pictures are written to the folder `images`.
    """
    folder, total, guidance = out / "features" / name, len(scorer.prompts), card["guidance"]
    batch_size = program.even_batch_size(plan.batch_size or subject.batch_size, total)
    with cli.bad_input():
        cards = drawn_features.claim(folder, {name: own | card for name, own in scorer.cards.items()})
    keep = plan.save_images and jax.process_index() == 0
    save = functools.partial(_save, images) if keep else None
    compute = drawn_features.drawing(
        scorer, point.draw, guidance, batch_size, first_seed=plan.seed, size=plan.size, save=save
    )
    return cards, drawn_features.collect(total, batch_size, compute, name, folder, finite=True)


def _redraw(
    scorer: Scorer, point: Point, plan: Sweep, guidance: float, indices: Sequence[int]
) -> UInt8[np.ndarray, "B H W 3"]:
    prompts, seeds = [scorer.prompts[i] for i in indices], [plan.seed + i for i in indices]
    images = sheets.to_uint8(point.draw(prompts, seeds, guidance))
    return drawn_features.resized(images, plan.size)


def _name(subjects: Sequence[Subject], first: Point) -> str:
    """Return a sweep's default folder name: step_N, or the names of several subjects joined."""
    if len(subjects) > 1:
        return "_".join(subject.name for subject in subjects)
    return f"step_{first.checkpoint:08}"


def _save(folder: pathlib.Path, rows: np.ndarray, images: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in zip(rows, images, strict=True):
        sheets.write_png(folder / f"image{i:06}.png", image)


def _scorer(subjects: Sequence[Subject], f: dict[str, flags.FlagHolder]) -> Scorer:
    value = lambda name: f[name].value
    size, sources = value("size") or common_size(subjects), {s.source for s in subjects}
    source = sources.pop() if len(sources) == 1 else ""
    own = None if value("prompts") else scorers.own_scorer(source)
    if own is not None:
        scorers.check_unused("--", {name: holder.value for name, holder in f.items()})
        return own(size, value("num_seen"), value("num_heldout"), value("metrics"))
    for name in ("num_seen", "num_heldout"):
        if f[name].present:
            logging.warning(
                "--%s has no effect, because the run's data source has no prompts of its own, or "
                "--prompts replaces them",
                name,
            )
    prompts = prompt_files.read(value("prompts"), value("num_prompts")) if value("prompts") else []
    for subject in subjects if prompts else ():
        prompt_files.refuse_numbers(value("prompts"), subject.fields)
    names = ("prompts", *scorers.OF_PROMPTS, "metrics")
    group = Evaluation(0, (), num_prompts=len(prompts), **{name: value(name) for name in names})
    return scorers.open_scorer(source, size, prompts, group)


def check_names(subjects: Sequence[Subject]) -> None:
    """Raise ValueError if two models have the same name, because their files would collide."""
    names = [subject.name for subject in subjects]
    if same := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two models are named {same[0]}, after their folders: rename one of these folders")


def check_folder(name: str | None) -> None:
    """Raise ValueError if `name`, the value of --name, is empty or a path with several parts."""
    if name is not None and (name in ("", ".", "..") or pathlib.PurePath(name).name != name):
        raise ValueError(f"--name={name}: give the name of a folder under evaluation/, not a path")


def common_size(subjects: Sequence[Subject]) -> int:
    """Return the picture side shared by all subjects. Raises ValueError if the sides differ."""
    sides = sorted({subject.size for subject in subjects})
    if len(sides) > 1:
        raise ValueError(
            f"the models draw pictures of different sizes ({', '.join(map(str, sides))} pixels): "
            f"set --size, for example --size={sides[0]}, to resize all before they are scored"
        )
    return sides[0]
