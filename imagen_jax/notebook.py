"""Open trained models in a notebook.

import imagen_jax

model = imagen_jax.load("runs/quickstart")
model.draw(["a red seven on gray paper"], guidance=3, steps=20, sampler="ddim")
"""

import os
from collections.abc import Sequence
from typing import Any

from diffusion_jax.draw import options
from diffusion_jax.draw.loaded import Loaded, System
from diffusion_jax.draw.model import Model
from imagen_jax import cascade


def load(*workdirs: str | os.PathLike[str], **values: Any) -> Loaded:
    """Open a run, or the runs of a cascade in the order in which they draw.

    Args:
        *workdirs: The workdirs of the runs.
        **values: Values of cascade.OPTIONS, named like the flags of the command `sample`. A list
            holds one value per stage.

    Raises:
        FileNotFoundError: If a workdir holds no run.
        ValueError: If a value or a stage does not fit.
    """
    if not workdirs:
        raise ValueError('name the workdir of a run: load("runs/quickstart")')
    by_stage = options.by_stage(values, len(workdirs))
    stages = cascade.load(workdirs, [cascade.choose(**of_stage) for of_stage in by_stage])
    return Loaded(stages, by_stage, System(cascade.OPTIONS, _draw, _tokenize, cascade.card))


def _draw(stages: Sequence[Model], prompts: Sequence[str], seeds: Sequence[int]) -> Any:
    cascade.check_low_res(stages[0], None)
    texts = [stage.encoder.tokenize(list(prompts)) for stage in stages]
    return cascade.draw_batches(stages, texts, seeds, cascade.batch_sizes(stages, len(seeds)))


def _tokenize(stage: Model, prompts: Sequence[str]) -> Any:
    return stage.encoder.tokenize(list(prompts))
