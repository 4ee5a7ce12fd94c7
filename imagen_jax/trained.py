"""A trained model, read from the workdir of its run."""

import os
from typing import NamedTuple

from diffusion_jax import runs
from diffusion_jax.draw import model as trained
from diffusion_jax.draw.model import Encoders, Model, with_weights
from diffusion_jax.machine import sharding
from imagen_jax import task
from imagen_jax.settings import Settings, check

__all__ = ["Choice", "Encoders", "Model", "load_model", "read_run", "with_weights"]


class Choice(NamedTuple):
    """Which weights draw, and how; None stands for what the run's config says."""

    ema: str = "ema"
    """A decay such as "0.9999", "ema" for the largest, or "raw"."""
    checkpoint: int | None = None
    """A step that was saved; None for the last."""
    guidance: float | None = None
    sampler: str | None = None
    steps: int | None = None
    threshold: str | None = None
    aug_sigma: float | None = None
    text_weights: str | None = None
    """Where the text encoder's weights are: a folder or a Hugging Face name."""


def load_model(
    workdir: str | os.PathLike[str],
    choice: Choice | None = None,
    encoders: Encoders | None = None,
) -> Model:
    """The model of a training run; ValueError or FileNotFoundError if there is no such one.

    Models that are loaded with the same `encoders` (a dict, empty at first) share the weights of
    their text encoders.
    """
    choice = choice or Choice()
    s = read_run(workdir, choice)
    mesh = sharding.make_mesh()  # Of the devices here, which need not be those of the training.
    encoder, frozen = trained.open_encoder(s.text, mesh, task.RULES, encoders)
    imagen = task.make_task(s, encoder)
    model = trained.open_model(str(workdir), s, encoder, imagen, frozen, mesh)
    return with_weights(model, choice.ema, choice.checkpoint)


def read_run(workdir: str | os.PathLike[str], choice: Choice) -> Settings:
    """The settings of a run, with what was chosen in place of the config's.

    ValueError or FileNotFoundError if there is no such run or no such choice.
    """
    s: Settings = runs.read(workdir, "imagen_jax")
    asked = {
        "guidance": choice.guidance,
        "name": choice.sampler,
        "steps": choice.steps,
        "threshold": choice.threshold,
    }
    sampler = s.sampler._replace(**{k: v for k, v in asked.items() if v is not None})
    sr = s.super_resolution
    if choice.aug_sigma is not None:
        sr = sr._replace(aug_sigma=choice.aug_sigma)
    text = s.text if choice.text_weights is None else s.text._replace(weights=choice.text_weights)
    s = s._replace(sampler=sampler, super_resolution=sr, text=text)
    check(s)
    return s
