"""A trained model, read from the workdir of its run."""

import os
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

from diffusion_jax import runs
from diffusion_jax.draw import model as trained
from diffusion_jax.draw.model import Model, with_weights
from diffusion_jax.machine import sharding
from diffusion_jax.train import checkpoint
from diffusion_jax.weights import pretrained
from sd_jax import task
from sd_jax import vae as vae_module
from sd_jax.sampling import Preview, make_sample
from sd_jax.settings import Sampler, Settings, check, check_pipeline
from sd_jax.vae import VAE
from sd_jax.weights import names
from sd_jax.weights.checkpoints import Checkpoint, UNetPart, VAEPart
from sd_jax.weights.pretrained import read_vae
from sd_jax.weights.text import from_folder

__all__ = ["Choice", "Model", "load_model", "read_run", "with_weights"]


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
    strength: float = 1.0
    """See settings.Pipeline."""
    preview: Preview | None = None
    """See sampling.make_sample."""


def load_model(workdir: str | os.PathLike[str], choice: Choice | None = None) -> Model:
    """The model of a training run; its settings are a Pipeline, it draws from sampling.prompts.

    ValueError or FileNotFoundError if there is no such run or choice.
    """
    choice = choice or Choice()
    s = read_run(workdir, choice)
    if not s.vae_weights:
        raise ValueError(
            f"{workdir} was trained on moments without a VAE, which drawing needs: say where it "
            "is, --vae_weights=PATH"
        )
    mesh = sharding.make_mesh()  # Of the devices here, which need not be those of the training.
    encoder, text = trained.open_encoder(s.text, mesh, task.RULES)
    vae_params = read_vae(s.vae_weights, s.vae)
    frozen = {"text": text, "vae": sharding.place_all(vae_params, mesh, task.RULES)}
    p = s.pipeline._replace(strength=choice.strength)
    made = task.make_task(s, encoder, vae_params)
    made = made._replace(sample=make_sample(p, encoder, choice.preview))
    model = trained.open_model(str(workdir), p, encoder, made, frozen, mesh)
    return with_weights(model, choice.ema, choice.checkpoint)


def chosen_sampler(sampler: Sampler, choice: Choice) -> Sampler:
    """The sampler with what was chosen in place of its own."""
    fields = ("guidance", "steps", "eta", "negative_prompt", "height", "width")
    asked = {"name": choice.sampler} | {name: getattr(choice, name) for name in fields}
    return sampler._replace(**{k: v for k, v in asked.items() if v is not None})


def read_run(workdir: str | os.PathLike[str], choice: Choice) -> Settings:
    """The settings of a run, with what was chosen in place of the config's.

    ValueError or FileNotFoundError if there is no such run or no such choice.
    """
    s: Settings = runs.read(workdir, "sd_jax")
    sampler = chosen_sampler(s.sampler, choice)
    text = s.text if choice.text_weights is None else s.text._replace(weights=choice.text_weights)
    vae_weights = s.vae_weights if choice.vae_weights is None else choice.vae_weights
    s = s._replace(sampler=sampler, text=text, vae_weights=vae_weights)
    check(s)
    check_pipeline(s.pipeline._replace(strength=choice.strength))
    return s


def to_checkpoint(workdir: str | os.PathLike[str], ema: str = "ema") -> Checkpoint:
    """The weights of a run with its VAE and its text encoder, where it has them, to be written."""
    s = read_run(workdir, Choice())
    abstract = names.abstract_unet(s.unet, s.text.width)
    folder = pathlib.Path(workdir) / runs.CHECKPOINTS
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = jax.device_get(checkpoint.load_params(folder, abstract, ema))
    plain = {"dtype": jnp.float32, "attention_impl": "xla"}
    unet = UNetPart(s.unet.clone(**plain, remat=False), s.text.width, params)
    vae = text = None
    if s.vae_weights:
        plain = {"dtype": jnp.float32, "query_chunk": VAE.query_chunk}
        vae = VAEPart(s.vae.clone(**plain), read_vae(s.vae_weights, s.vae))
    if s.text.encoder.startswith("clip") and s.text.weights:
        text = from_folder(pretrained.locate(s.text.weights))
    report = [f"{workdir}: the UNet{' and the VAE' * bool(vae)}{', the text encoder' * bool(text)}"]
    size = s.latents.image_size // vae_module.factor(s.vae)
    return Checkpoint(unet, vae, report, text, s.diffusion.predicts, size, s.latents.scale)
