"""Score trained Imagen models over a range of guidance scales.

    python -m imagen_jax.evaluate --workdir=runs/quickstart

For a model of the synthetic digits, this command draws coloured digits, and a judge reads the digit
and the colours of ink and paper back from each picture. A picture is right if all three are right.
Prompts that were not in the training data are counted separately. Other models are scored by FID
and CLIP score, as a curve over the guidance scales:

    python -m imagen_jax.evaluate --workdir=runs/base64 --workdir=runs/sr256 \\
        --prompts=captions_val2014.json --num_prompts=30000 --reference=coco_256.npz \\
        --inception=pt_inception-2015-12-05-6726825d.pth --clip=openai/clip-vit-large-patch14 \\
        --text_weights=weights/t5-11b-encoder

--text_weights gives the text encoder's weights if the config does not, for example because the
model was trained on stored embeddings.

--checkpoint and --ema take a list of values for the first model; each value adds a point to the
sweep. For a cascade, repeat these flags once per stage, as in --ema=0.999,0.9999 --ema=0.9999,raw;
all combinations are scored. --sampler, --steps, --eta and all other sampler settings take lists
too: --steps=10,20,30. For a cascade, their commas separate the stages instead (one value for all
stages, or one per stage), and repeating the flag adds points: --steps=30,20 --steps=10,10. Every
point draws with the same seeds. Features are saved after each batch, so an interrupted sweep can
continue.

WORKDIR/evaluation/NAME receives sweep.csv, fid_scores.csv and clip_scores.csv, curve.png and .pdf,
a sheet of pictures for each guidance scale, and scores/ with each score and its settings. The
scores are also written to the metrics, and WORKDIR/report.html shows everything on one page.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from diffusion_jax.draw import option_flags, options
from diffusion_jax.draw.model import Model
from diffusion_jax.draw.options import Values, Weights
from diffusion_jax.draw.program import Images
from diffusion_jax.evaluate import command as evaluation
from diffusion_jax.evaluate.command import Subject
from diffusion_jax.machine import files
from diffusion_jax.web import frozen
from imagen_jax import cascade

GUIDANCE = (1, 1.5, 2, 3, 4, 5, 6)


def open_subject(
    workdirs: Sequence[str],
    points: Sequence[Sequence[Values]] = (),
    weights: Sequence[Sequence[Weights]] = (),
) -> Subject:
    """Open a cascade of runs to evaluate. One workdir is a single model.

    Args:
        workdirs: The workdir of each stage.
        points: For each combination of sampler settings, the values of cascade.OPTIONS of every
            stage. () is one combination, with the values in the configs.
        weights: Lists of the saved weights to evaluate, for the first stage, the second stage and
            so on. Stages without a list use their newest checkpoint's average of largest decay.

    Raises:
        FileNotFoundError: If a workdir holds no run.
        ValueError: If the runs or the values do not fit together.
    """
    points = points or [[{}] * len(workdirs)]
    if len(weights) > len(workdirs):
        raise ValueError(
            f"--ema or --checkpoint is given {len(weights)} times for {len(workdirs)} stages: give "
            "it once per stage, with commas between several values"
        )
    weights = [*weights, *([Weights()] for _ in workdirs[len(weights) :])]
    choices = [
        cascade.choose(**values)._replace(weights=first)
        for values, (first, *_) in zip(points[0], weights, strict=True)
    ]
    stages = cascade.load(workdirs, choices)
    cascade.check_low_res(stages[0], None)
    last = stages[-1].settings
    height, width = cascade.output_shapes(stages)[0]
    if height != width:
        raise ValueError(
            f"sampler.height and sampler.width give {height}x{width} pixels, but only squares are "
            "scored: leave both at 0"
        )
    sizes = stages[0].settings.output_size, last.output_size
    name = files.path(stages[-1].workdir).name
    overrides = [[options.changes(cascade.OPTIONS, v) for v in point] for point in points]
    return evaluation.of_models(
        stages, _draw, _describe, last.data.source, sizes, weights, name, overrides
    )


def _draw(
    stages: Sequence[Model], prompts: Sequence[str], seeds: Sequence[int], guidance: float
) -> Images:
    texts = [stage.encoder.tokenize(list(prompts)) for stage in stages]
    sizes = [len(seeds), *cascade.batch_sizes(stages, len(seeds))[1:]]
    batches = cascade.draw_batches(stages, texts, seeds, sizes, None, guidance)
    return np.concatenate([by_stage[-1] for by_stage in batches])


def _describe(stage: Model) -> dict[str, Any]:
    described = cascade.describe(stage)
    del described["sampler"]["guidance"]  # A sweep's card holds the guidance of its point.
    return described


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_multi_string(
        "workdir", None, "The workdir of a training run; repeat it for a cascade.", required=True
    )
    _OPTIONS = option_flags.define_axes(cascade.OPTIONS, without=evaluation.AXES)

    def open_subjects(weights: Sequence[Sequence[Weights]]) -> list[Subject]:
        """Open the cascade that the flags name."""
        points = option_flags.points(cascade.OPTIONS, _OPTIONS, len(_WORKDIR.value))
        return [open_subject(_WORKDIR.value, points, weights)]

    evaluation.command(open_subjects, GUIDANCE, frozen.write)
