"""Scores a trained Imagen model over guidance scales.

    python -m imagen_jax.evaluate --workdir=runs/quickstart

For the coloured digits a judge reads digit, ink and paper back from each picture: a prompt counts
if all three are right. Prompts that training showed and prompts that it never showed are scored
apart. WORKDIR/evaluation/step_N gets sweep.csv, curve.png and a sheet of pictures; the scores also
go to the metrics. The judge's own accuracy on real pictures stands beside every score.
"""

import pathlib
import time

import jax
import numpy as np
from absl import app, flags, logging

from diffusion_jax import cli, drawing, sheets, sweep
from diffusion_jax.data import digits
from diffusion_jax.log import MetricWriter, clock
from diffusion_jax.metrics import digits as judges
from imagen_jax.trained import Choice, Model, load_model

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a training run.", required=True)
_GUIDANCE = flags.DEFINE_list("guidance", ["1", "1.5", "2", "3", "4"], "Scales to score.")
_SEEN = flags.DEFINE_integer(
    "num_seen", 1, "Images of each prompt that training showed.", lower_bound=1
)
_HELDOUT = flags.DEFINE_integer(
    "num_heldout", 8, "Images of each prompt that it did not.", lower_bound=1
)
_STEPS = flags.DEFINE_integer(
    "steps", None, "Sampling steps; default: the config's.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "The seed of the first image.", lower_bound=0)
_EMA = flags.DEFINE_string("ema", "ema", 'A decay such as 0.9999, "ema" for the largest, or "raw".')
_STEP = flags.DEFINE_integer("checkpoint", None, "A step that was saved; default: the last.")
_BATCH = flags.DEFINE_integer("batch_size", 128, "Images drawn at once.", lower_bound=1)


def main(argv: list[str]) -> None:
    """Draws every prompt at every scale, and lets the judge read."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    cli.start()
    with cli.bad_input():
        scales = _scales(_GUIDANCE.value)
        choice = Choice(ema=_EMA.value, checkpoint=_STEP.value, steps=_STEPS.value)
        model = load_model(_WORKDIR.value, choice)
        source = model.settings.data.source
        if source != "digits":
            raise ValueError(
                f"the run's data.source is {source!r}: only 'digits' has a judge of its pictures"
            )
        if model.settings.super_resolution.factor > 1:
            raise ValueError(f"{_WORKDIR.value} is a super-resolution model: evaluate a base model")
        out = pathlib.Path(_WORKDIR.value) / "evaluation" / f"step_{model.step:08}"
        out.mkdir(parents=True, exist_ok=True)
    judge = judges.fit_judge()
    real = judges.accuracy_on_real(judge, model.settings.unet.image_size)
    logging.info("the judge is right on %.2f %% of real pictures", 100 * real["prompt_accuracy"])

    seen = digits.seen_prompts() * _SEEN.value
    prompts = seen + digits.heldout_prompts() * _HELDOUT.value
    images = _draw_all(model, prompts, scales)
    rows = []
    for scale, pictures in zip(scales, images, strict=True):
        read = judge(pictures)
        row = {"guidance": scale}
        row |= _named("seen", judges.score(read[: len(seen)], seen))
        row |= _named("heldout", judges.score(read[len(seen) :], prompts[len(seen) :]))
        rows.append(row | _card(model, len(seen), len(prompts), real["prompt_accuracy"]))
        logging.info(
            "guidance %g: %.1f %% of seen and %.1f %% of held-out prompts all right",
            scale, 100 * row["seen_prompt_accuracy"], 100 * row["heldout_prompt_accuracy"],
        )  # fmt: skip
    _write(out, rows, images, prompts, len(seen), model)


def _scales(texts: list[str]) -> list[float]:
    try:
        return sorted(float(text) for text in texts)
    except ValueError as error:
        raise ValueError(f"--guidance={','.join(texts)} is no list of numbers") from error


def _draw_all(model: Model, prompts: list[str], scales: list[float]) -> list[np.ndarray]:
    """All prompts at each scale, each prompt's image from the same seed at every scale."""
    seeds = np.tile(np.arange(len(prompts)) + _SEED.value, len(scales))
    tokens = model.encoder.tokenize(prompts)
    batch = {name: np.concatenate([array] * len(scales)) for name, array in tokens.items()}
    guidance = np.repeat(np.array(scales, np.float32), len(prompts))
    start, images = time.time(), []
    for part in drawing.in_batches(
        model.draw, model.params, batch, seeds.tolist(), guidance, _BATCH.value
    ):
        images.extend(sheets.to_uint8(part))
        if len(images) % (4 * _BATCH.value) == 0 or len(images) == len(seeds):
            rate = len(images) / (time.time() - start)
            left = clock((len(seeds) - len(images)) / rate)
            logging.info(
                "%d/%d images | %.0f images/s | %s left", len(images), len(seeds), rate, left
            )
    return np.split(np.stack(images), len(scales))


def _named(group: str, scores: dict[str, float]) -> dict[str, float]:
    return {f"{group}_{name}": round(score, 4) for name, score in scores.items()}


def _card(
    model: Model, num_seen: int, num_images: int, judge: float
) -> dict[str, float | int | str]:
    """What a score is worth only together with."""
    s = model.settings
    return {
        "judge_accuracy_on_real": round(judge, 4),
        "images_seen": num_seen,
        "images_heldout": num_images - num_seen,
        "checkpoint": model.step,
        "ema": _EMA.value,
        "sampler": s.sampler.name,
        "sampling_steps": s.sampler.steps,
        "seed": _SEED.value,
        "training_seed": s.run.seed,
        "jax": jax.__version__,
    }


def _write(
    out: pathlib.Path,
    rows: list[dict],
    images: list[np.ndarray],
    prompts: list[str],
    num_seen: int,
    model: Model,
) -> None:
    sweep.write_table(out / "sweep.csv", rows)
    lines = ("seen_prompt_accuracy", "heldout_prompt_accuracy")
    sweep.write_curve(out / "curve.png", rows, "guidance", lines)
    best = max(range(len(rows)), key=lambda i: rows[i]["heldout_prompt_accuracy"])
    shown = [*range(0, num_seen, max(1, num_seen // 24)), *range(num_seen, num_seen + 18)]
    captions = [prompts[i] + (" (held out)" if i >= num_seen else "") for i in shown]
    sheets.write_png(out / "sheet.png", sheets.contact_sheet(images[best][shown], captions))
    writer = MetricWriter(out)
    for row in rows:
        scores = {f"evaluation/{k}": v for k, v in row.items() if "accuracy" in k}
        writer.write_scalars(model.step, {"guidance": row["guidance"], **scores})
    writer.close()
    logging.info("wrote sweep.csv, curve.png and sheet.png to %s", out)


if __name__ == "__main__":
    cli.run(main)
