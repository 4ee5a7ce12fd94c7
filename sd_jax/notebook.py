"""Models in a notebook, trained here or elsewhere.

import sd_jax

model = sd_jax.load("runs/sd_quickstart")
model.draw(["a red seven on gray paper"], guidance=3, steps=20, sampler="dpmpp_2m")
"""

import os
from collections.abc import Sequence
from typing import Any

from diffusion_jax.draw.loaded import Loaded, System
from diffusion_jax.draw.model import Model
from sd_jax import drawing, sampling
from sd_jax.drawing import NO_FACTS, File


def load(path: str | os.PathLike[str], *, file: File = NO_FACTS, **values: Any) -> Loaded:
    """Open a run, a diffusers directory or a single file.

    Args:
        path: The workdir, directory or file.
        file: Facts that a directory or a file may not contain.
        **values: Values of drawing.OPTIONS, the flags of the command `sample`.

    Raises:
        FileNotFoundError: If there is no such model.
        ValueError: If a value does not fit the model.
    """
    model = drawing.load(path, *drawing.choose(**values), file=file)
    card = lambda models: drawing.card(models[0])
    return Loaded([model], [values], System(drawing.OPTIONS, _draw, _tokenize, card))


def _draw(models: Sequence[Model], prompts: Sequence[str], seeds: Sequence[int]) -> Any:
    return ([images] for images in drawing.draw_batches(models[0], prompts, seeds))


def _tokenize(model: Model, prompts: Sequence[str]) -> Any:
    return sampling.prompts(model.encoder, prompts, model.settings.sampler.negative_prompt)
