"""Scores Stable Diffusion models over guidance scales.

    python -m sd_jax.evaluate --workdir=runs/sd2_512 \\
        --prompts=captions_val2014.json --num_prompts=30000 --reference=val2014_512.npz \\
        --inception=pt_inception-2015-12-05-6726825d.pth \\
        --clip=weights/CLIP-ViT-H-14-laion2B-s32B-b79K

draws the prompts at each scale and scores them by FID and CLIP score, as a curve over the scales;
a model of the coloured digits is scored by their judge, without any of these files. --checkpoint
and --ema take lists, and become further points, and so do all settings of the sampler:
--sampler=ddim,dpmpp_2m --steps=10,20,50 --eta=0,1. The same seeds draw at every point. Features are
kept batch by batch: started again, a sweep goes on where it was.

Models that were trained elsewhere, and several of either, share one figure, a curve each:

    python -m sd_jax.evaluate --workdir=runs/sd1_256 --model=weights/sd-v1-5 \\
        --model=weights/sd-v2-0-base --size=256 --out=runs/beside ...

Each draws at its own size, by its config's sampler or its directory's scheduler unless --sampler,
--steps and --grid say otherwise; --size brings the pictures to one side before they are scored.

WORKDIR/evaluation/NAME, of the first run or of --out, gets sweep.csv, fid_scores.csv and
clip_scores.csv, curve.png and .pdf, a sheet of pictures for each scale, and scores/, a card with
each score; the scores also go to the metrics, and all of it into one page, WORKDIR/report.html
(beside MLPerf's reference runs:
python -m diffusion_jax.report WORKDIR --rcp).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from diffusion_jax.draw import choice_flags
from diffusion_jax.draw.model import Model
from diffusion_jax.draw.program import Images
from diffusion_jax.evaluate import command as evaluation
from diffusion_jax.evaluate.command import Subject, Weights
from diffusion_jax.machine import files
from diffusion_jax.web import frozen
from sd_jax import drawing, file_flags
from sd_jax.drawing import Choice, File
from sd_jax.weights.trained import read_run

SCALES = (1.5, 2, 3, 4, 5, 6, 7, 8)
LAST: tuple[Weights, ...] = (("ema", None),)


def open_run(
    workdir: str,
    choice: Choice,
    weights: Sequence[Weights] = LAST,
    choices: Sequence[Choice] = (),
) -> Subject:
    """The model of a run; ValueError or FileNotFoundError if there is none, or it cannot draw.

    `choices` are how it draws at each point, `choice` at the first.
    """
    ema, step = weights[0]
    choice = dataclasses.replace(choice, ema=ema, checkpoint=step)
    s, model = read_run(workdir, choice), drawing.load(workdir, choice)
    described = {"training_seed": s.run.seed, "vae": s.vae_weights}
    return _subject(model, described, s.data.source, [weights], choices or [choice])


def open_model(
    path: str, choice: Choice, file: File, ema: str = "ema", choices: Sequence[Choice] = ()
) -> Subject:
    """A model that was trained elsewhere, likewise; errors as of drawing.load."""
    choice = dataclasses.replace(choice, ema=ema)
    described = {"lora": list(file.lora)} if file.lora else {}
    return _subject(drawing.load(path, choice, file), described, "", [], choices or [choice])


def _subject(
    model: Model,
    described: Mapping[str, Any],
    source: str,
    weights: Sequence[Sequence[Weights]],
    choices: Sequence[Choice],
) -> Subject:
    height, width = model.settings.output_shape
    if height != width:
        raise ValueError(f"{model.workdir} draws {width}x{height}: only squares are scored")

    def describe(model: Model) -> dict[str, Any]:
        s = model.settings.sampler
        of = {"workdir": model.workdir, "eta": s.eta, "negative_prompt": s.negative_prompt}
        return {**described, **of, **drawing.describe_grid(s), **drawing.describe_guidance(model)}

    name, sizes = files.path(model.workdir).name, (height, height)
    rows = [[choice] for choice in choices]
    return evaluation.of_models([model], _draw, describe, source, sizes, weights, name, rows)


def _draw(
    models: Sequence[Model], prompts: Sequence[str], seeds: Sequence[int], guidance: float
) -> Images:
    (only,), at_once = models, len(seeds)
    batches = drawing.draw_batches(only, prompts, seeds, guidance=guidance, batch_size=at_once)
    return np.concatenate(list(batches))


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_multi_string("workdir", [], "The folder of a training run; several.")
    _MODEL = flags.DEFINE_multi_string(
        "model", [], "A diffusers directory or a checkpoint's file; several."
    )
    _CHOICE = choice_flags.define_axes(
        Choice, without=("ema", "checkpoint", "guidance", "height", "width")
    )
    _FILE = file_flags.define()

    def open_subjects(weights: Sequence[Sequence[Weights]]) -> list[Subject]:
        """Those that the flags name."""
        if not (_WORKDIR.value or _MODEL.value):
            raise ValueError("give --workdir=FOLDER of a training run, or --model=PATH, or several")
        file_flags.check_unused(bool(_MODEL.value), _FILE())
        if not _WORKDIR.value and not flags.FLAGS.out:
            raise ValueError("--model alone has no workdir: say where the files go with --out=PATH")
        if len(weights) > 1:
            raise ValueError("--ema and --checkpoint are given once, with commas between several")
        choices = [choice for (choice,) in choice_flags.axes(Choice, _CHOICE, 1)]
        ema = "raw" if all(ema == "raw" for ema, _ in weights[0]) else "ema"
        return [
            *(open_run(run, choices[0], weights[0], choices) for run in _WORKDIR.value),
            *(open_model(path, choices[0], _FILE(), ema, choices) for path in _MODEL.value),
        ]

    evaluation.command(open_subjects, SCALES, frozen.write)
