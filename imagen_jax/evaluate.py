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

--checkpoint and --ema take lists, of the first model, and become further points. The same seeds
draw at every point. Features are kept batch by batch: started again, a sweep goes on where it was.

WORKDIR/evaluation/NAME gets sweep.csv, fid_scores.csv and clip_scores.csv, curve.png and .pdf, a
sheet of pictures for each scale, and scores/, a card with each score; the scores also go to the
metrics, and all of it into one page, WORKDIR/report.html.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from diffusion_jax.draw import choice_flags
from diffusion_jax.draw.model import Choice, Model
from diffusion_jax.draw.program import Images
from diffusion_jax.evaluate import command as evaluation
from imagen_jax import cascade

SCALES = (1, 1.5, 2, 3, 4, 5, 6)


def open_subject(
    workdirs: Sequence[str], choice: Choice | None = None, text_weights: Sequence[str] = ()
) -> evaluation.Subject:
    """A cascade of runs; ValueError or FileNotFoundError if it is none."""
    choice = choice or Choice()
    texts = choice_flags.each("text_weights", text_weights, str, len(workdirs))
    later = [cascade.Choice(steps=choice.steps, text_weights=text) for text in texts[1:]]
    first = cascade.Choice(**vars(choice) | {"text_weights": texts[0]})
    stages = cascade.load(workdirs, [first, *later])
    cascade.check_low_res(stages[0], None)
    last = stages[-1].settings
    sizes = stages[0].settings.output_size, last.output_size
    return evaluation.of_models(stages, _draw, _describe, last.data.source, sizes)


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
    text_weights = flags.DEFINE_list(
        "text_weights", [], "The text encoder's weights, of all stages or of each; else the runs'."
    )
    evaluation.command(
        lambda choice: open_subject(workdir.value, choice, text_weights.value), SCALES
    )
