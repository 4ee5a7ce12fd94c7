"""Trained models in a notebook.

import imagen_jax

model = imagen_jax.load("runs/quickstart")
model.draw(["a red seven on gray paper"], guidance=3, steps=20, sampler="ddim")
"""

import os
from collections.abc import Sequence
from typing import Any

from diffusion_jax.draw.loaded import Loaded, System
from diffusion_jax.draw.model import Model
from imagen_jax import cascade
from imagen_jax.cascade import Choice


def load(*workdirs: str | os.PathLike[str], **choices: Any) -> Loaded:
    """A run, or several in the order in which they draw; `choices` as the flags of `sample`.

    ValueError or FileNotFoundError for what is none, or does not fit.
    """
    if not workdirs:
        raise ValueError('name the folder of a run: load("runs/quickstart")')
    each = [Choice(**choices)] * len(workdirs)
    return Loaded(cascade.load(workdirs, each), each, System(_draw, _tokenize, cascade.card))


def _draw(stages: Sequence[Model], prompts: Sequence[str], seeds: Sequence[int]) -> Any:
    cascade.check_low_res(stages[0], None)
    texts = [stage.encoder.tokenize(list(prompts)) for stage in stages]
    return cascade.draw_batches(stages, texts, seeds, cascade.batch_sizes(stages, len(seeds)))


def _tokenize(stage: Model, prompts: Sequence[str]) -> Any:
    return stage.encoder.tokenize(list(prompts))
