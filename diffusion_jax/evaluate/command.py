"""The evaluation command, whole, for every system: flags -> points -> scores, pictures, a page.

A point is a guidance scale, a model, a checkpoint and an average of its weights. The same prompts
are drawn from the same noise at each; the features of the pictures are kept batch by batch (see
loop).
"""

import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags, logging

from diffusion_jax import cli, runs
from diffusion_jax.config import ranges
from diffusion_jax.config.settings import Evaluation
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.draw import program
from diffusion_jax.draw.model import Choice, Model, fingerprint, with_choice, with_weights
from diffusion_jax.draw.program import Images
from diffusion_jax.evaluate import curve, figures, loop, scorers, sweep, sweep_flags
from diffusion_jax.evaluate.scorers import Scorer
from diffusion_jax.machine import files, programs, progress, sheets
from diffusion_jax.metrics.cards import Card, Scored
from diffusion_jax.task import Params


class Point(NamedTuple):
    """A model, or several in a row, with certain weights."""

    checkpoint: int
    ema: str
    params: Sequence[Params]
    draw: loop.Draw
    card: Card
    """Sampler, steps, precision, and what else the pictures depend on."""
    later: str = ""
    """Of models in a row the checkpoints and averages of those after the first, if they vary."""
    settings: Mapping[str, str] = {}
    """The sampler's settings that vary over the sweep, by the config's names, "sampler.steps"."""


Weights = tuple[str, int | None]
"""The name of an average, and a checkpoint, None for the last."""


class Subject(NamedTuple):
    """The models under evaluation, as a sweep sees them, whatever their system."""

    workdir: pathlib.Path
    """Where a sweep's files go, under evaluation/."""
    source: str
    """The training data's; "digits" have prompts and a judge of their own."""
    size: int
    """The side of the pictures as they are drawn."""
    batch_size: int
    """How many images are drawn at once, at most, unless said otherwise."""
    points: Sequence[Callable[[], Point]]
    """Opens one after the other: each loads its weights."""
    name: str = ""
    """The model's name beside others on a curve."""


class Sweep(NamedTuple):
    """The scales of a sweep, and how its pictures are drawn."""

    guidance: Sequence[float]
    seed: int = 0
    """The seed of the first image."""
    batch_size: int | None = None
    save_images: bool = False
    name: str | None = None
    """The folder under evaluation; default: step_N, or the names of several models."""
    size: int | None = None
    """The side that pictures are brought to before they are scored."""


def of_models(
    models: Sequence[Model],
    draw: Callable[[Sequence[Model], Sequence[str], Sequence[int], float], Images],
    describe: Callable[[Model], dict[str, Any]],
    source: str,
    sizes: tuple[int, int],
    weights: Sequence[Sequence[Weights]] = (),
    name: str = "",
    choices: Sequence[Sequence[Choice]] = ((),),
) -> Subject:
    """The models of runs in a row; what each draws with makes the points, in all combinations.

    `weights` are those of each model, one or several, of which it holds the first already; without
    them there is one point. `choices` are how each draws, at each point likewise (see
    choice_flags.axes). `draw` takes models, prompts, seeds and the guidance scale; `describe`
    says what else a model's pictures depend on; `sizes` are the sides of what the first draws and
    of the pictures.
    """
    joined = lambda values: ", ".join(map(str, values))
    varied = _varied(choices)
    for row in choices[1:]:  # What cannot be is an error before the first is drawn.
        for model, choice in zip(models, row, strict=True):
            with_choice(model, choice)

    def at(chosen: Sequence[tuple[int, Weights]], number: int) -> Point:
        row = [
            with_weights(model, *which) if n else model
            for model, (n, which) in zip(models, chosen, strict=True)
        ]
        if number:
            pairs = zip(row, choices[number], strict=True)
            row = [with_choice(model, choice) for model, choice in pairs]
        each = [model.settings for model in row]
        card = {
            "sampler": joined(s.sampler.name for s in each),
            "steps": joined(s.sampler.steps for s in each),
            "precision": joined(s.unet.dtype for s in each),
            "models": [describe(model) for model in row],
        }
        params = [model.params for model in row]
        vary = any(len(choices) > 1 for choices in weights[1:])
        later = ", ".join(f"{model.step} {model.ema}" for model in row[1:] if vary)
        drawn = functools.partial(draw, row)
        return Point(row[0].step, row[0].ema, params, drawn, card, later, varied[number])

    first = [[(models[i].ema, None)] for i in range(len(weights), len(models))]
    every = list(itertools.product(*(enumerate(own) for own in [*weights, *first])))
    numbers = range(len(choices))
    points = [functools.partial(at, chosen, n) for chosen in every for n in numbers]
    batch_size = program.default_batch_size(sizes[0], sizes[0])
    return Subject(files.path(models[0].workdir), source, sizes[1], batch_size, points, name)


def _varied(choices: Sequence[Sequence[Choice]]) -> list[dict[str, str]]:
    """Of each point what is not the same at all of them, by the config's names."""
    named: dict[str, list[list[Any]]] = {}
    for field in dataclasses.fields(choices[0][0]) if choices[0] else ():
        values = [[getattr(one, field.name) for one in row] for row in choices]
        if "field" in field.metadata and any(row != values[0] for row in values):
            named[field.metadata["field"]] = values
    text = lambda row: ",".join(map(str, row if len(set(row)) > 1 else row[:1]))
    return [{name: text(v[n]) for name, v in named.items()} for n in range(len(choices))]


def command(
    open_subjects: Callable[[Sequence[Sequence[Weights]]], Sequence[Subject]],
    guidance: Sequence[float],
    write_page: Callable[[pathlib.Path], pathlib.Path],
    digits_guidance: Sequence[float] = (1, 1.5, 2, 3, 4),
) -> None:
    """Runs `python -m SYSTEM.evaluate --workdir=FOLDER`; the caller's is its --help.

    `open_subjects` gets what each model in a row shall draw with, the first model's first. The
    scales are those taken by default; `write_page` writes a workdir's page and says where. What
    `open_subjects` raises of ValueError and OSError is one message and exit code 2.
    """
    f = sweep_flags.define(guidance)

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
        cli.start()
        with cli.bad_input():
            scales = sorted(
                sweep_flags.number(text, "guidance", float) for text in f["guidance"].value
            )
            ranges.check(Evaluation, {"guidance": tuple(scales or guidance)}, "")
            subjects = open_subjects(sweep_flags.weights(f["ema"].value, f["checkpoint"].value))
            check_names(subjects)
            check_folder(f["name"].value)
            if f["out"].value:
                files.check_writable(f["out"].value, "--out")
                subjects = [s._replace(workdir=files.path(f["out"].value)) for s in subjects]
            scorer = _scorer(subjects, f)
        default = digits_guidance if "digits" in scorer.cards else guidance
        plan = Sweep(
            scales or default, f["seed"].value, f["batch_size"].value, f["save_images"].value,
            f["name"].value, f["size"].value,
        )  # fmt: skip
        with cli.bad_input():
            told = [rehearse(subject, scorer, plan) for subject in subjects]
        if f["rehearse"].value:
            print("\n\n".join(told))
            return
        out = evaluate(subjects, scorer, plan)
        if jax.process_index() == 0:
            page = write_page(subjects[0].workdir)
            logging.info("wrote %s, and all of it as a page to %s", out, page)

    cli.run(main)


def rehearse(subject: Subject, scorer: Scorer, plan: Sweep) -> str:
    """Draws and scores a batch in the abstract; ValueError or a note for what would fail."""
    start, point, total = time.time(), subject.points[0](), len(scorer.prompts)
    most = program.even_batch_size(plan.batch_size or subject.batch_size, total)
    kinds = {g == 1: g for g in plan.guidance}.values()  # With guidance, and without.
    compute = lambda scale: loop.drawing(scorer, point.draw, scale, most, size=plan.size)
    with programs.rehearsal():
        *_, features = [compute(scale)(np.arange(most)) for scale in kinds]
    judged = [f"{k} of {v.shape[1]}" for k, v in features.items() if v.ndim == 2 and k != "seconds"]
    images = len(subject.points) * len(plan.guidance) * total
    rows = [
        ("model", f"{subject.workdir}, by {point.card['sampler']}"),
        ("draws", f"{images:,} images of {subject.size}x{subject.size}, {most} at once"),
        ("prompts", f"{total:,}, at guidance {', '.join(f'{g:g}' for g in plan.guidance)}"),
        ("features", ", ".join(judged)),
        ("rehearsed", f"in {time.time() - start:.1f} s; nothing was compiled"),
    ]
    return progress.block(rows)


def evaluate(subjects: Sequence[Subject], scorer: Scorer, plan: Sweep) -> pathlib.Path:
    """Draws every prompt at every point, scores, writes; returns the folder of what it wrote.

    The first subject's workdir gets it, as one curve for each subject, checkpoint and average.

    The table is there after each point, of those so far. Exits with code 2 and a message where a
    checkpoint or average is missing, features there are of another sweep, or images not finite.
    """
    out, rows, pictures = pathlib.Path(), [], []
    several = any(len(subject.points) > 1 for subject in subjects)
    for subject, open_point in ((s, open_point) for s in subjects for open_point in s.points):
        with cli.bad_input():
            point = open_point()
        if not rows:
            out = subjects[0].workdir / runs.EVALUATION / (plan.name or _name(subjects, point))
        of_point: dict[str, Any] = {"model": subject.name} if len(subjects) > 1 else {}
        of_point |= {"checkpoint": point.checkpoint, "ema": point.ema}
        of_point |= {"later": point.later} if point.later else {}
        of_point |= point.settings
        model = fingerprint(point.params)
        for scale in plan.guidance:
            name = f"{sweep.point_name(of_point)}_guidance_{scale:g}"
            card = point.card | of_point | {"guidance": scale, "seed": plan.seed, "model": model}
            if plan.size not in (None, subject.size):
                card["resized"] = f"{loop.KERNEL} from {subject.size}x{subject.size}"
            row = {"guidance": scale, **of_point}
            kept = out / f"images_{pathlib.Path(sweep.sheet_name(row, several)).stem}"
            cards, features = _features(subject, point, scorer, plan, out, name, card, kept)
            if jax.process_index():
                continue
            pictures.append(_sheet(scorer, features.pop("images")))
            seconds = features.pop("seconds").sum(0)
            scores = scorer.score(features)
            rows.append(row | scorers.columns(scores) | _share(*seconds))
            sweep.write_scored(
                out / sweep.SCORED, name, {k: Scored(v, cards[k]) for k, v in scores.items()}
            )
            sweep.write_table(out / sweep.TABLE, rows)
            sheets.write_png(out / sweep.sheet_name(row, several), pictures[-1])
            logging.info("%s", sweep.describe(rows[-1]).replace("\n", " | "))
    if jax.process_index() == 0:
        sweep.write_scores(out, rows)
        _write_curve(out)
        if (real := scorer.real_sheet()) is not None:
            sheets.write_png(out / sweep.REAL, real)
        sweep.write_metrics(out, rows, pictures)
    return out


def _features(
    subject: Subject, point: Point, scorer: Scorer, plan: Sweep, out: pathlib.Path, name: str,
    card: Card, images: pathlib.Path,
) -> tuple[dict[str, Card], loop.Features]:  # fmt: skip
    """The cards and features of all prompts at one point, of which those there are not redone.

    `images` is the folder of its pictures, where they are kept.
    """
    folder, total, scale = out / "features" / name, len(scorer.prompts), card["guidance"]
    batch_size = program.even_batch_size(plan.batch_size or subject.batch_size, total)
    with cli.bad_input():
        cards = loop.claim(folder, {judge: own | card for judge, own in scorer.cards.items()})
    keep = plan.save_images and jax.process_index() == 0
    save = functools.partial(_save, images) if keep else None
    compute = loop.drawing(
        scorer, point.draw, scale, batch_size, first_seed=plan.seed, size=plan.size, save=save
    )
    return cards, loop.collect(total, batch_size, compute, name, folder, finite=True)


def _name(subjects: Sequence[Subject], first: Point) -> str:
    """The folder of a sweep that was given no name."""
    if len(subjects) > 1:
        return "_".join(subject.name for subject in subjects)
    return f"step_{first.checkpoint:08}"


def _save(folder: pathlib.Path, rows: np.ndarray, images: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in zip(rows, images, strict=True):
        sheets.write_png(folder / f"image{i:06}.png", image)


def _sheet(scorer: Scorer, images: np.ndarray) -> np.ndarray:
    return sheets.contact_sheet(images, [scorer.caption(i) for i in scorer.shown])


def _share(drawing: float, scoring: float) -> dict[str, float]:
    return {"features_share_of_time": round(float(scoring / (drawing + scoring)), 4)}


def _write_curve(out: pathlib.Path) -> None:
    figure = curve.figure(sweep.read(out))
    for format in ("png", "pdf"):
        files.write_whole(out / f"curve.{format}", figures.save(figure, format))


def _scorer(subjects: Sequence[Subject], f: dict[str, flags.FlagHolder]) -> Scorer:
    value = lambda name: f[name].value
    size, sources = value("size") or common_size(subjects), {s.source for s in subjects}
    source = sources.pop() if len(sources) == 1 else ""
    if source == "digits" and not value("prompts"):
        scorers.check_unused("--", {name: holder.value for name, holder in f.items()})
        return scorers.of_digits(size, value("num_seen"), value("num_heldout"), value("metrics"))
    for name in ("num_seen", "num_heldout"):
        if f[name].present:
            logging.warning("--%s is for the digits' own prompts: nothing reads it here", name)
    prompts = prompt_files.read(value("prompts"), value("num_prompts")) if value("prompts") else []
    names = ("prompts", "reference", "inception", "clip", "clip_reference", "dinov2",
             "dinov2_reference", "judge", "metrics")  # fmt: skip
    group = Evaluation(0, (), num_prompts=len(prompts), **{name: value(name) for name in names})
    return scorers.open_scorer(source, size, prompts, group)


def check_names(subjects: Sequence[Subject]) -> None:
    """ValueError for two models of one name, whose files would be the same."""
    names = [subject.name for subject in subjects]
    if same := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"two of the models are called {same[0]}: their folders' names must differ"
        )


def check_folder(name: str | None) -> None:
    """ValueError for a --name that is no folder of its own under evaluation/."""
    if name is not None and (name in ("", ".", "..") or pathlib.PurePath(name).name != name):
        raise ValueError(f"--name={name}: give the name of a folder under evaluation/, not a path")


def common_size(subjects: Sequence[Subject]) -> int:
    """The side of all subjects' pictures; ValueError if they differ."""
    sides = sorted({subject.size for subject in subjects})
    if len(sides) > 1:
        raise ValueError(
            f"the models draw pictures of {', '.join(map(str, sides))} pixels: say to which size "
            f"they are brought before they are scored, such as --size={sides[0]}"
        )
    return sides[0]
