"""Scores trained Imagen models over guidance scales.

    python -m imagen_jax.evaluate --workdir=runs/quickstart

draws the coloured digits and lets a judge read digit, ink and paper back from each picture: a
prompt counts if all three are right, and prompts that training never showed count apart. Models of
other pictures are scored by FID and CLIP score, as a curve over the scales:

    python -m imagen_jax.evaluate --workdir=runs/base64 --workdir=runs/sr256 \\
        --prompts=captions_val2014.json --num_prompts=30000 --reference=coco_256.npz \\
        --inception=pt_inception-2015-12-05-6726825d.pth --clip=openai/clip-vit-large-patch14

--checkpoint and --ema take lists, of the first model, and become further points. The same seeds
draw at every point. Features are kept batch by batch: started again, a sweep goes on where it was.

WORKDIR/evaluation/NAME gets sweep.csv, fid_scores.csv and clip_scores.csv, curve.png and .pdf, a
sheet of pictures for each scale, and scores/, a card with each score; the scores also go to the
metrics, and all of it into one page, WORKDIR/report.html.
"""

import pathlib
from collections.abc import Sequence

import numpy as np
from absl import flags

from diffusion_jax.draw import program
from diffusion_jax.draw.model import Choice, Model, with_weights
from diffusion_jax.evaluate import command as evaluation
from imagen_jax import cascade

SCALES = (1, 1.5, 2, 3, 4, 5, 6)


def open_system(workdirs: Sequence[str], choice: Choice) -> evaluation.System:
    """A cascade of runs; ValueError or FileNotFoundError if it is none."""
    later = [cascade.Choice(steps=choice.steps) for _ in workdirs[1:]]
    stages = cascade.load(workdirs, [cascade.Choice(**vars(choice)), *later])
    cascade.check_low_res(stages[0], None)

    def at(ema, step):
        return _point((with_weights(stages[0], ema, step), *stages[1:]))

    last, first_size = stages[-1].settings, stages[0].settings.output_size
    batch_size = program.default_batch_size(first_size, first_size)
    return evaluation.System(
        pathlib.Path(workdirs[0]), last.data.source, last.output_size, batch_size, at
    )


def _point(stages: Sequence[Model]) -> evaluation.Point:
    def draw(prompts, seeds, scale):
        texts = [stage.encoder.tokenize(list(prompts)) for stage in stages]
        sizes = [len(seeds), *cascade.batch_sizes(stages[1:], len(seeds))]
        batches = cascade.draw_batches(stages, texts, seeds, sizes, None, scale)
        return np.concatenate([by_stage[-1] for by_stage in batches])

    each = [stage.settings for stage in stages]
    joined = lambda values: ", ".join(map(str, values))
    card = {
        "sampler": joined(s.sampler.name for s in each),
        "steps": joined(s.sampler.steps for s in each),
        "precision": joined(s.unet.dtype for s in each),
        "models": [_described(stage) for stage in stages],
    }
    first, params = stages[0], [stage.params for stage in stages]
    return evaluation.Point(first.step, first.ema, params, draw, card)


def _described(stage: Model) -> dict:
    """What else the pictures depend on; a bound that is infinite is left out: JSON has none."""
    s = stage.settings
    sampler = {k: v for k, v in s.sampler._asdict().items() if v != float("inf")}
    del sampler["guidance"]  # The sweep's own.
    described = {"workdir": stage.workdir, "checkpoint": stage.step, "ema": stage.ema}
    described |= {"size": s.output_size, "training_seed": s.run.seed, "sampler": sampler}
    if s.super_resolution.factor > 1:
        described["aug_sigma"] = s.super_resolution.aug_sigma
    return described


if __name__ == "__main__":
    workdir = flags.DEFINE_multi_string(
        "workdir", None, "The folder of a training run; repeated for a cascade.", required=True
    )
    evaluation.command(lambda choice: open_system(workdir.value, choice), SCALES)
