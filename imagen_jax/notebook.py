"""Open trained models in a notebook, to draw with them.

    import imagen_jax

    model = imagen_jax.load("runs/quickstart")
    model.draw(["a red seven on gray paper"], guidance=3, steps=20, sampler="ddim")

A notebook shows the result of `draw` as a contact sheet.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusion_jax.draw import options
from diffusion_jax.draw.loaded import Enlarger, Inputs, Loaded, System
from diffusion_jax.draw.model import Model
from imagen_jax import cascade


def load(*workdirs: str | os.PathLike[str], **values: Any) -> Loaded:
    """Open the model of a run, or a cascade of several models, to draw with it.

    Args:
        *workdirs: The workdirs of the runs. The models of a cascade draw in this order.
        **values: Options for drawing, such as steps=20: the keys of cascade.OPTIONS, which are also
            the flags of imagen_jax.sample. For a cascade, a list gives one value per stage.

    Raises:
        FileNotFoundError: If a workdir holds no run.
        ValueError: If no workdir is given, a value is invalid, or a stage does not draw images of
            the size that the next stage enlarges.
    """
    if not workdirs:
        raise ValueError('load() needs the workdir of a run: load("runs/quickstart")')
    by_stage = options.by_stage(values, len(workdirs))
    stages = cascade.load(workdirs, [cascade.choose(**of_stage) for of_stage in by_stage])
    system = System(cascade.OPTIONS, _draw, _tokenize, cascade.card, _enlarger)
    return Loaded(stages, by_stage, system)


def _draw(
    stages: Sequence[Model], prompts: Sequence[str], seeds: Sequence[int], inputs: Inputs
) -> Any:
    small = inputs.low_res
    cascade.check_low_res(stages[0], None if small is None else small.shape[:2])
    texts = [stage.encoder.tokenize(list(prompts)) for stage in stages]
    texts = cascade.with_pictures(stages, texts, inputs.over, len(prompts))
    sizes = cascade.batch_sizes(stages, len(seeds))
    if small is not None:
        small = np.stack([small] * len(seeds)).astype(np.float32) / 127.5 - 1
    return cascade.draw_batches(stages, texts, seeds, sizes, small)


def _enlarger(stages: Sequence[Model]) -> Enlarger | None:
    sides = [
        (n, stage.settings.input_size)
        for n, stage in enumerate(stages)
        if stage.settings.super_resolution.factor > 1
    ]
    return Enlarger(*sides[0]) if sides else None


def _tokenize(stage: Model, prompts: Sequence[str]) -> Any:
    return stage.encoder.tokenize(list(prompts))
