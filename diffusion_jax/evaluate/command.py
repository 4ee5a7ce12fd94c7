"""The evaluation command, whole, for every system: flags -> points -> scores, pictures, a page.

A point is a guidance scale, a checkpoint and an average of its weights. The same prompts are drawn
from the same noise at each; the features of the pictures are kept batch by batch (see loop).
"""

import functools
import hashlib
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from diffusion_jax import cli, runs
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.draw import program
from diffusion_jax.draw.model import Choice, Model, with_weights
from diffusion_jax.draw.program import Images
from diffusion_jax.evaluate import figures, loop, report, scorers, sweep
from diffusion_jax.evaluate.scorers import Scorer
from diffusion_jax.machine import files, sharding, sheets
from diffusion_jax.metrics.cards import Card, Scored
from diffusion_jax.settings import Evaluation
from diffusion_jax.task import Params

flags.disclaim_key_flags()  # They belong to the command that calls `command`: --help shows them.


class Point(NamedTuple):
    """A model, or several in a row, with certain weights."""

    checkpoint: int
    ema: str
    params: Sequence[Params]
    draw: loop.Draw
    card: Card
    """Sampler, steps, precision, and what else the pictures depend on."""


class Subject(NamedTuple):
    """The models under evaluation, as a sweep sees them, whatever their system."""

    workdir: pathlib.Path
    source: str
    """The training data's; "digits" have prompts and a judge of their own."""
    size: int
    """The pictures' side."""
    batch_size: int
    """How many images are drawn at once, at most, unless said otherwise."""
    at: Callable[[str, int | None], Point]
    """The point of an average's name and a checkpoint, None for the last."""


class Sweep(NamedTuple):
    """The points of a sweep, and how their pictures are drawn."""

    guidance: Sequence[float]
    ema: Sequence[str] = ("ema",)
    checkpoints: Sequence[int | None] = (None,)
    seed: int = 0
    """The seed of the first image."""
    batch_size: int | None = None
    save_images: bool = False
    name: str | None = None
    """The folder under evaluation; default: step_N."""


def of_models(
    models: Sequence[Model],
    draw: Callable[[Sequence[Model], Sequence[str], Sequence[int], float], Images],
    describe: Callable[[Model], dict[str, Any]],
    source: str,
    sizes: tuple[int, int],
) -> Subject:
    """The models of runs in a row, of which the first one's weights make the points.

    `draw` takes models, prompts, seeds and the guidance scale; `describe` says what else a model's
    pictures depend on; `sizes` are the sides of what the first draws and of the pictures.
    """
    joined = lambda values: ", ".join(map(str, values))

    def at(ema, step):
        row = (with_weights(models[0], ema, step), *models[1:])
        each = [model.settings for model in row]
        card = {
            "sampler": joined(s.sampler.name for s in each),
            "steps": joined(s.sampler.steps for s in each),
            "precision": joined(s.unet.dtype for s in each),
            "models": [describe(model) for model in row],
        }
        params = [model.params for model in row]
        return Point(row[0].step, row[0].ema, params, functools.partial(draw, row), card)

    batch_size = program.default_batch_size(sizes[0], sizes[0])
    return Subject(pathlib.Path(models[0].workdir), source, sizes[1], batch_size, at)


def command(
    open_subject: Callable[[Choice], Subject],
    guidance: Sequence[float],
    digits_guidance: Sequence[float] = (1, 1.5, 2, 3, 4),
) -> None:
    """Runs `python -m SYSTEM.evaluate --workdir=FOLDER`; the caller's is its --help.

    The scales are those taken by default. What `open_subject` raises of ValueError and OSError is
    one message and exit code 2.
    """
    f = _define_flags(guidance)

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
        cli.start()
        with cli.bad_input():
            steps = [_number(text, "checkpoint", int) for text in f["checkpoint"].value] or [None]
            scales = sorted(_number(text, "guidance", float) for text in f["guidance"].value)
            subject = open_subject(Choice(f["ema"].value[0], steps[0], steps=f["steps"].value))
            scorer = _scorer(subject, f)
        default = digits_guidance if "digits" in scorer.cards else guidance
        plan = Sweep(
            scales or default, f["ema"].value, steps, f["seed"].value, f["batch_size"].value,
            f["save_images"].value, f["name"].value,
        )  # fmt: skip
        out = evaluate(subject, scorer, plan)
        page = subject.workdir / "report.html"
        if jax.process_index() == 0:
            files.write_whole(page, report.page([report.read_run(subject.workdir)]))
        logging.info("wrote %s, and all of it as a page to %s", out, page)

    cli.run(main)


def evaluate(subject: Subject, scorer: Scorer, plan: Sweep) -> pathlib.Path:
    """Draws every prompt at every point, scores, writes; returns the folder of what it wrote.

    The table is there after each point, of those so far. Exits with code 2 and a message where a
    checkpoint or average is missing, features there are of another sweep, or images not finite.
    """
    out, rows, pictures = pathlib.Path(), [], []
    for ema, step in itertools.product(plan.ema, plan.checkpoints):
        with cli.bad_input():
            point = subject.at(ema, step)
        if not rows:
            out = subject.workdir / runs.EVALUATION / (plan.name or f"step_{point.checkpoint:08}")
        model = _fingerprint(point.params)
        for scale in plan.guidance:
            name = f"step_{point.checkpoint:08}_{point.ema}_guidance_{scale:g}"
            card = point.card | {"guidance": scale, "seed": plan.seed, "model": model}
            card |= {"checkpoint": point.checkpoint, "ema": point.ema}
            cards, features = _features(subject, point, scorer, plan, out, name, card)
            if jax.process_index():
                continue
            pictures.append(_sheet(scorer, features.pop("images")))
            row = {"guidance": scale, "checkpoint": point.checkpoint, "ema": point.ema}
            seconds = features.pop("seconds").sum(0)
            scores = scorer.score(features)
            rows.append(row | scorers.columns(scores) | _share(*seconds))
            sweep.write_scored(
                out / sweep.SCORED, name, {k: Scored(v, cards[k]) for k, v in scores.items()}
            )
            sweep.write_table(out / sweep.TABLE, rows)
            sheets.write_png(out / sweep.sheet_name(scale), pictures[-1])
            logging.info("%s", sweep.describe(rows[-1]).replace("\n", " | "))
    if jax.process_index() == 0:
        sweep.write_scores(out, rows)
        _write_curve(subject.workdir, out)
        sweep.write_metrics(out, rows, pictures)
    return out


def _features(
    subject: Subject, point: Point, scorer: Scorer, plan: Sweep, out: pathlib.Path, name: str,
    card: Card,
) -> tuple[dict[str, Card], loop.Features]:  # fmt: skip
    """The cards and features of all prompts at one point, of which those there are not redone."""
    folder, total, scale = out / "features" / name, len(scorer.prompts), card["guidance"]
    batch_size = program.even_batch_size(plan.batch_size or subject.batch_size, total)
    with cli.bad_input():
        cards = loop.claim(folder, {judge: own | card for judge, own in scorer.cards.items()})
    keep = plan.save_images and jax.process_index() == 0
    save = functools.partial(_save, out / f"images_guidance_{scale:g}") if keep else None
    compute = loop.drawing(scorer, point.draw, scale, batch_size, first_seed=plan.seed, save=save)
    return cards, loop.collect(total, batch_size, compute, name, folder, finite=True)


def _save(folder: pathlib.Path, rows: np.ndarray, images: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in zip(rows, images, strict=True):
        sheets.write_png(folder / f"image{i:06}.png", image)


def _sheet(scorer: Scorer, images: np.ndarray) -> np.ndarray:
    return sheets.contact_sheet(images, [scorer.caption(i) for i in scorer.shown])


def _share(drawing: float, scoring: float) -> dict[str, float]:
    return {"features_share_of_time": round(float(scoring / (drawing + scoring)), 4)}


@functools.partial(jax.jit, static_argnums=1)
def _sums(params: Params, everywhere: Any) -> list[jax.Array]:
    """Sums of each array's bits, modulo 2^32: the same however they are sharded."""
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    bits = [
        jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]) for x in jax.tree.leaves(params)
    ]
    return [jax.lax.with_sharding_constraint(b.sum(dtype=jnp.uint32), everywhere) for b in bits]


def _fingerprint(models: Sequence[Params]) -> str:
    """A hash of the weights, whatever their folder is called."""
    everywhere = sharding.replicated(sharding.make_mesh())
    sums = [np.asarray(x).item() for params in models for x in _sums(params, everywhere)]
    return hashlib.sha256(str(sums).encode()).hexdigest()[:16]


def _write_curve(workdir: pathlib.Path, out: pathlib.Path) -> None:
    curve = report.main_figure(report.read_run(workdir), out.name)
    for format in ("png", "pdf"):
        files.write_whole(out / f"curve.{format}", figures.save(curve, format))


def _scorer(subject: Subject, f: dict[str, flags.FlagHolder]) -> Scorer:
    value = lambda name: f[name].value
    if subject.source == "digits" and not value("prompts"):
        return scorers.of_digits(
            subject.size, value("num_seen"), value("num_heldout"), value("metrics")
        )
    prompts = prompt_files.read(value("prompts"), value("num_prompts")) if value("prompts") else []
    names = ("prompts", "reference", "inception", "clip", "clip_reference", "metrics")
    group = Evaluation(0, (), num_prompts=len(prompts), **{name: value(name) for name in names})
    return scorers.open_scorer(subject.source, subject.size, prompts, group)


def _number(text: str, flag: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"--{flag}={text} is no number") from error


def _define_flags(guidance: Sequence[float]) -> dict[str, flags.FlagHolder]:
    scales = ",".join(f"{scale:g}" for scale in guidance)
    whole = functools.partial(flags.DEFINE_integer, lower_bound=1)
    holders = [
        flags.DEFINE_list("guidance", [], f"Scales to score; default {scales}."),
        flags.DEFINE_list("checkpoint", [], "Steps that were saved; default: the last."),
        flags.DEFINE_list("ema", ["ema"], 'Decays such as 0.9999, "ema" (the largest) or "raw".'),
        whole("steps", None, "Sampling steps; default: the config's."),
        flags.DEFINE_integer("seed", 0, "The seed of the first image.", lower_bound=0),
        whole("batch_size", None, "Images drawn at once."),
        flags.DEFINE_string("name", None, "The folder under evaluation; default: step_N."),
        flags.DEFINE_bool("save_images", False, "Also keep every image as a PNG."),
        flags.DEFINE_string(
            "prompts", None, "Prompts: .txt, .tsv, COCO's .json, SOURCE:PATH::TEXT."
        ),
        whole("num_prompts", None, "How many of them, drawn at random."),
        flags.DEFINE_string("reference", "", "Statistics of real images, .npz."),
        flags.DEFINE_string("inception", "", "Weights of Inception, for FID."),
        flags.DEFINE_string("clip", "", "Weights of CLIP, for the CLIP score."),
        flags.DEFINE_string(
            "clip_reference", "", "Features of real images that `metrics stats --clip` made: CMMD."
        ),
        flags.DEFINE_list(
            "metrics", [], "Scores to take, such as fid,kid; default: all that these allow."
        ),
        whole("num_seen", 1, "Digits: images of each prompt seen."),
        whole("num_heldout", 8, "Digits: images of each prompt never shown."),
    ]
    return {holder.name: holder for holder in holders}
