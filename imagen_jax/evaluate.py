"""Scores trained Imagen models over guidance scales.

    python -m imagen_jax.evaluate --workdir=runs/quickstart

draws the coloured digits and lets a judge read digit, ink and paper back from each picture: a
prompt counts if all three are right, and prompts that training never showed count apart. Models of
other pictures are scored by FID and CLIP score, as a curve over the scales:

    python -m imagen_jax.evaluate --workdir=runs/base64 --workdir=runs/sr256 \\
        --prompts=captions_val2014.json --num_prompts=30000 --reference=coco_256.npz \\
        --inception=pt_inception-2015-12-05.pth --clip=openai/clip-vit-large-patch14

--checkpoint and --ema take lists, of the first model, and become further points. The same seeds
draw at every point. Features are kept batch by batch: started again, a sweep goes on where it was.

WORKDIR/evaluation/NAME gets sweep.csv, fid_scores.csv and clip_scores.csv, curve.png and .pdf, a
sheet of pictures for each scale and card.json; the scores also go to the metrics, and all of it
into one page, WORKDIR/report.html.
"""

import itertools
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from diffusion_jax import cli, figures, files, log, report, sheets, sweep
from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.metrics import scorers
from imagen_jax import cascade
from imagen_jax.trained import Choice, Model, with_weights

_WORKDIR = flags.DEFINE_multi_string(
    "workdir", None, "The folder of a training run; repeated for a cascade.", required=True
)
_GUIDANCE = flags.DEFINE_list("guidance", [], "Scales to score; default 1,1.5,2,3,4[,5,6].")
_CHECKPOINT = flags.DEFINE_list("checkpoint", [], "Steps that were saved; default: the last.")
_EMA = flags.DEFINE_list("ema", ["ema"], 'Decays such as 0.9999, "ema" (the largest) or "raw".')
_STEPS = flags.DEFINE_integer(
    "steps", None, "Sampling steps; default: the config's.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "The seed of the first image.", lower_bound=0)
_BATCH = flags.DEFINE_integer("batch_size", None, "Images drawn at once.", lower_bound=1)
_NAME = flags.DEFINE_string("name", None, "The folder under evaluation; default: step_N.")
_SAVE = flags.DEFINE_bool("save_images", False, "Also keep every image as a PNG.")
_PROMPTS = flags.DEFINE_string("prompts", None, "Prompts: .txt (one a line), .tsv, COCO's .json.")
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", None, "How many of them, drawn at random.")
_REFERENCE = flags.DEFINE_string("reference", "", "Statistics of real images, .npz.")
_INCEPTION = flags.DEFINE_string("inception", "", "Weights of Inception, for FID.")
_CLIP = flags.DEFINE_string("clip", "", "Weights of CLIP, for the CLIP score.")
_SEEN = flags.DEFINE_integer("num_seen", 1, "Digits: images of each prompt seen.", lower_bound=1)
_HELDOUT = flags.DEFINE_integer("num_heldout", 8, "Of each never shown.", lower_bound=1)

_DIGIT_SCALES, _SCALES = (1, 1.5, 2, 3, 4), (1, 1.5, 2, 3, 4, 5, 6)


def main(argv: list[str]) -> None:
    """Draws every prompt at every point, scores, writes."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    cli.start()
    with cli.bad_input():
        steps = [_number(text, "checkpoint", int) for text in _CHECKPOINT.value] or [None]
        first = Choice(ema=_EMA.value[0], checkpoint=steps[0], steps=_STEPS.value)
        later = [Choice(steps=_STEPS.value) for _ in _WORKDIR.value[1:]]
        stages = cascade.load(_WORKDIR.value, [first, *later])
        cascade.check_low_res(stages[0], None)
        scorer = _scorer(stages)
        scales = sorted(_number(text, "guidance", float) for text in _GUIDANCE.value)
        scales = scales or (_DIGIT_SCALES if isinstance(scorer, scorers.Digits) else _SCALES)
        name = _NAME.value or f"step_{stages[0].step:08}"
        out = pathlib.Path(_WORKDIR.value[0]) / sweep.EVALUATION / name
        out.mkdir(parents=True, exist_ok=True)
    rows, sheet = [], {}
    for ema, step in itertools.product(_EMA.value, steps):
        with cli.bad_input():
            point = (with_weights(stages[0], ema, step), *stages[1:])
        for scale in scales:
            row, sheet[scale] = _score(point, scorer, scale, out)
            rows.append(row)
            logging.info("%s", sweep.describe(row).replace("\n", " | "))
    if jax.process_index() == 0:
        _write(out, rows, sheet, _card(stages, scorer))
    files.write_whole(
        pathlib.Path(_WORKDIR.value[0]) / "report.html",
        report.page([report.read_run(_WORKDIR.value[0])]),
    )
    logging.info("wrote %s, and all of it as a page to %s/report.html", out, _WORKDIR.value[0])


def _scorer(stages: Sequence[Model]) -> scorers.Scorer:
    source = stages[-1].settings.data.source
    size = stages[-1].settings.output_size
    if source == "digits" and not _PROMPTS.value:
        return scorers.Digits(size, _SEEN.value, _HELDOUT.value)
    prompts = prompt_files.read(_PROMPTS.value, _NUM_PROMPTS.value) if _PROMPTS.value else []
    return scorers.make(source, size, prompts, _REFERENCE.value, _INCEPTION.value, _CLIP.value)


def _score(
    stages: Sequence[Model], scorer: scorers.Scorer, scale: float, out: pathlib.Path
) -> tuple[dict[str, Any], np.ndarray]:
    """One row of the table, and a sheet of pictures."""
    prompts = scorer.prompts
    texts = [stage.encoder.tokenize(prompts) for stage in stages]
    size = _batch_size(stages, len(prompts))
    shown = np.isin(np.arange(len(prompts)), scorer.shown)

    def compute(rows):
        start = time.time()
        part = [{name: array[rows] for name, array in t.items()} for t in texts]
        seeds = (rows + _SEED.value).tolist()
        batches = cascade.draw_batches(stages, part, seeds, [size] * len(stages), None, scale)
        drawn = np.concatenate([by_stage[-1] for by_stage in batches])
        _check_finite(drawn, rows, scale)
        images = sheets.to_uint8(drawn)
        half = time.time()
        if _SAVE.value and jax.process_index() == 0:
            _save(out / f"images_guidance_{scale:g}", rows, images)
        features = scorer.features(images, [prompts[i] for i in rows])
        seconds = np.array([[half - start, time.time() - half]])
        return {**features, "images": images[shown[rows]], "seconds": seconds}

    base = stages[0]
    name = f"step_{base.step:08}_{base.ema}_guidance_{scale:g}"
    card = _card(stages, scorer) | {"guidance": scale}
    features = sweep.collect(out / "features" / name, card, len(prompts), size, compute)
    captions = [scorer.caption(i) for i in scorer.shown]
    sheet = sheets.contact_sheet(features.pop("images"), captions)
    drawing_seconds, scoring_seconds = features.pop("seconds").sum(0)
    row = {"guidance": scale, "checkpoint": base.step, "ema": base.ema, **scorer.score(features)}
    share = scoring_seconds / (drawing_seconds + scoring_seconds)
    return row | {"features_share_of_time": round(float(share), 4)}, sheet


def _batch_size(stages: Sequence[Model], total: int) -> int:
    """Batches of the same size, so that none is filled up in vain."""
    most = _BATCH.value or min(2 * n for n in cascade.batch_sizes(stages, total))
    return -(-total // -(-total // most))


def _check_finite(images: np.ndarray, rows: np.ndarray, scale: float) -> None:
    bad = np.flatnonzero(~np.isfinite(images).all(axis=(1, 2, 3)))
    if bad.size:
        raise ValueError(
            f"{bad.size} of {len(images)} images at guidance {scale:g} are not finite, first of "
            f"prompt {rows[bad[0]]}: the model or its sampler diverges, and no score is written"
        )


def _save(folder: pathlib.Path, rows: np.ndarray, images: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in zip(rows, images, strict=True):
        sheets.write_png(folder / f"image{i:06}.png", image)


def _card(stages: Sequence[Model], scorer: scorers.Scorer) -> dict[str, Any]:
    """What a score is worth only together with."""
    models = [
        {"workdir": s.workdir, "checkpoint": s.step, "ema": s.ema, "size": s.settings.output_size,
         "sampler": s.settings.sampler.name, "steps": s.settings.sampler.steps,
         "threshold": s.settings.sampler.threshold, "dtype": str(s.settings.unet.dtype),
         "training_seed": s.settings.run.seed}
        for s in stages
    ]  # fmt: skip
    prompts = {"prompts": prompt_files.fingerprint(scorer.prompts), "images": len(scorer.prompts)}
    return {**scorer.card, **prompts, "seed": _SEED.value, "models": models, "jax": jax.__version__}


def _write(out: pathlib.Path, rows: list[dict], sheet: dict[float, np.ndarray], card: dict) -> None:
    sweep.write_table(out / sweep.TABLE, rows)
    sweep.write_scores(out, rows)
    sweep.write_card(out, card)
    for scale, picture in sheet.items():
        sheets.write_png(out / sweep.sheet_name(scale), picture)
    curve = report.main_figure(report.read_run(_WORKDIR.value[0]), out.name)
    for format in ("png", "pdf"):
        files.write_whole(out / f"curve.{format}", figures.save(curve, format))
    writer = log.MetricWriter(out)
    for row in rows:
        numbers = {f"evaluation/{k}": v for k, v in row.items() if isinstance(v, float)}
        writer.write_scalars(row["checkpoint"], {"guidance": row["guidance"], **numbers})
    pictures = {f"guidance_{scale:g}": picture[None] for scale, picture in sheet.items()}
    writer.write_images(rows[-1]["checkpoint"], pictures)
    writer.close()


def _number(text: str, flag: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"--{flag}={text} is no number") from error


if __name__ == "__main__":
    cli.run(main)
