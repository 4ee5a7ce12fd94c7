"""Scores trained Imagen models over guidance scales.

    python -m imagen_jax.evaluate --workdir=runs/quickstart

draws the coloured digits and lets a judge read digit, ink and paper back from each picture: a
prompt counts if all three are right, and prompts that training never showed count apart. Models of
other pictures are scored by FID and CLIP score, as a curve over the scales:

    python -m imagen_jax.evaluate --workdir=runs/base64 --workdir=runs/sr256 \\
        --prompts=captions_val2014.json --num_prompts=30000 --reference=coco_256.npz \\
        --inception=pt_inception-2015-12-05-6726825d.pth --clip=openai/clip-vit-large-patch14 \\
        --text_weights=weights/t5-11b-encoder

--text_weights is where the text encoder is if the config does not say, as after training on stored
embeddings.

--checkpoint and --ema take lists, which become further points: of the first model, and repeated,
--ema=0.999,0.9999 --ema=0.9999,raw, of the ones after it in all combinations. So do --sampler,
--steps, --eta and all other settings of the sampler: --steps=10,20,30. Of a cascade the commas are
between its stages, one value for all or one for each, and a repeated flag gives further points:
--steps=30,20 --steps=10,10. The same seeds draw at every point. Features are kept batch by batch:
started again, a sweep goes on where it was.

WORKDIR/evaluation/NAME gets sweep.csv, fid_scores.csv and clip_scores.csv, curve.png and .pdf, a
sheet of pictures for each scale, and scores/, a card with each score; the scores also go to the
metrics, and all of it into one page, WORKDIR/report.html.
"""

import dataclasses
from collections.abc import Sequence
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
from imagen_jax import cascade
from imagen_jax.cascade import Choice

SCALES = (1, 1.5, 2, 3, 4, 5, 6)


def open_subject(
    workdirs: Sequence[str],
    choices: Sequence[Sequence[Choice]] = (),
    weights: Sequence[Sequence[Weights]] = (),
) -> Subject:
    """A cascade of runs; ValueError or FileNotFoundError if it is none.

    `choices` are those of each stage at each point, `weights` the averages and checkpoints of each.
    """
    choices = choices or [[Choice()] * len(workdirs)]
    if len(weights) > len(workdirs):
        raise ValueError(
            f"--ema or --checkpoint is given {len(weights)} times for {len(workdirs)} stages: give "
            "it once a stage, with commas between several"
        )
    weights = [*weights, *([("ema", None)] for _ in workdirs[len(weights) :])]
    each = zip(choices[0], weights, strict=True)
    chosen = [
        dataclasses.replace(choice, ema=some[0][0], checkpoint=some[0][1]) for choice, some in each
    ]
    stages = cascade.load(workdirs, chosen)
    cascade.check_low_res(stages[0], None)
    last = stages[-1].settings
    sizes = stages[0].settings.output_size, last.output_size
    name = files.path(stages[-1].workdir).name
    source = last.data.source
    return evaluation.of_models(stages, _draw, _describe, source, sizes, weights, name, choices)


def _draw(
    stages: Sequence[Model], prompts: Sequence[str], seeds: Sequence[int], guidance: float
) -> Images:
    texts = [stage.encoder.tokenize(list(prompts)) for stage in stages]
    sizes = [len(seeds), *cascade.batch_sizes(stages[1:], len(seeds))]
    batches = cascade.draw_batches(stages, texts, seeds, sizes, None, guidance)
    return np.concatenate([by_stage[-1] for by_stage in batches])


def _describe(stage: Model) -> dict[str, Any]:
    described = cascade.describe(stage)
    del described["sampler"]["guidance"]  # The sweep's own.
    return described


if __name__ == "__main__":
    workdir = flags.DEFINE_multi_string(
        "workdir", None, "The folder of a training run; repeated for a cascade.", required=True
    )
    holders = choice_flags.define_axes(Choice, without=("ema", "checkpoint", "guidance"))

    def open_subjects(weights: Sequence[Sequence[Weights]]) -> list[Subject]:
        """The one that the flags name."""
        choices = choice_flags.axes(Choice, holders, len(workdir.value))
        return [open_subject(workdir.value, choices, weights)]

    evaluation.command(open_subjects, SCALES, frozen.write)
