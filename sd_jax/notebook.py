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
from sd_jax.drawing import Choice, File


def load(path: str | os.PathLike[str], *, file: File | None = None, **choices: Any) -> Loaded:
    """A run, a diffusers directory or a single file; `choices` as the flags of `sample`.

    `file` is for the last two. ValueError or FileNotFoundError for what is none, or does not fit.
    """
    choice = Choice(**choices)
    system = System(_draw, _tokenize, lambda models: drawing.card(models[0]))
    return Loaded([drawing.load(path, choice, file)], [choice], system)


def _draw(models: Sequence[Model], prompts: Sequence[str], seeds: Sequence[int]) -> Any:
    return ([images] for images in drawing.draw_batches(models[0], prompts, seeds))


def _tokenize(model: Model, prompts: Sequence[str]) -> Any:
    return sampling.prompts(model.encoder, prompts, model.settings.sampler.negative_prompt)
