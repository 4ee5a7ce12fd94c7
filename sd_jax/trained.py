"""A trained model, read from the workdir of its run."""

import os
from typing import NamedTuple

from diffusion_jax import settings, sharding, trained
from diffusion_jax.trained import Encoders, Model, with_weights
from sd_jax import task
from sd_jax.pretrained import read_vae
from sd_jax.settings import Settings, check, read_settings

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
    eta: float | None = None
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    text_weights: str | None = None
    """Where the text encoder's weights are: a folder or a Hugging Face name."""
    vae_weights: str | None = None
    """Where the VAE's are: a file, a diffusers directory or a workdir."""


def load_model(
    workdir: str | os.PathLike[str],
    choice: Choice | None = None,
    encoders: Encoders | None = None,
) -> Model:
    """The model of a training run; ValueError or FileNotFoundError if there is no such one.

    Models that are loaded with the same `encoders` (a dict, empty at first) share the weights of
    their text encoders. What they draw from is `task.prompts`.
    """
    choice = choice or Choice()
    s = read_run(workdir, choice)
    if not s.vae_weights:
        raise ValueError(
            f"{workdir} was trained on moments without a VAE, which drawing needs: say where it "
            "is, --vae_weights=PATH"
        )
    mesh = sharding.make_mesh()  # Of the devices here, which need not be those of the training.
    encoder, text = trained.open_encoder(s.text, mesh, task.RULES, encoders)
    vae_params = read_vae(s.vae_weights, s.vae)
    frozen = {"text": text, "vae": sharding.place_all(vae_params, mesh, task.RULES)}
    made = task.make_task(s, encoder, vae_params)
    model = trained.open_model(str(workdir), s, encoder, made, frozen, mesh)
    return with_weights(model, choice.ema, choice.checkpoint)


def read_run(workdir: str | os.PathLike[str], choice: Choice) -> Settings:
    """The settings of a run, with what was chosen in place of the config's.

    ValueError or FileNotFoundError if there is no such run or no such choice.
    """
    s = read_settings(settings.load(workdir).to_dict())
    fields = ("guidance", "steps", "eta", "negative_prompt", "height", "width")
    asked = {"name": choice.sampler} | {name: getattr(choice, name) for name in fields}
    sampler = s.sampler._replace(**{k: v for k, v in asked.items() if v is not None})
    text = s.text if choice.text_weights is None else s.text._replace(weights=choice.text_weights)
    vae_weights = s.vae_weights if choice.vae_weights is None else choice.vae_weights
    s = s._replace(sampler=sampler, text=text, vae_weights=vae_weights)
    check(s)
    return s
