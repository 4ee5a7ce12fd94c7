"""Loading workdirs as models to draw from, or as checkpoints to write in other formats."""

import dataclasses
import os

import jax
import jax.numpy as jnp

from diffusion_jax import finetune, lora
from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.draw import model
from diffusion_jax.draw.model import Model, replaces
from diffusion_jax.machine import sharding
from diffusion_jax.weights import pretrained
from sd_jax import task
from sd_jax import vae as vae_module
from sd_jax.sampling import make_begin
from sd_jax.settings import Sampler, Settings, check_pipeline
from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import lora_files, names
from sd_jax.weights.checkpoints import Checkpoint, UNetPart, VAEPart
from sd_jax.weights.initial import of_run, read_unet, read_vae
from sd_jax.weights.text import from_folder


@model.with_fields_of("sampler", Sampler)
@dataclasses.dataclass(frozen=True)
class Choice(model.Choice):
    """Weights and options to draw with; None means the value in the workdir's config."""

    vae_weights: str | None = replaces(
        "vae.weights", "Another VAE: a file, a diffusers directory or a workdir.", loads=True
    )
    strength: float = 1.0
    """See settings.Pipeline."""
    preview: Preview | None = None
    """See sampling.make_sample."""


def load_model(workdir: str | os.PathLike[str], choice: Choice | None = None) -> Model:
    """Load the model of a workdir. Its settings are a Pipeline; it draws from sampling.prompts.

    Raises ValueError or FileNotFoundError if the workdir or a choice does not exist.
    """
    choice = choice or Choice()
    s = read_run(workdir, choice)
    if not s.vae_weights:
        raise ValueError(
            f"{workdir} was trained on moments without a VAE, but drawing needs one: give it with "
            "--vae_weights=PATH"
        )
    mesh = sharding.make_mesh()  # All devices of this machine; training may have had others.
    encoder, text = model.open_encoder(s.text, mesh, task.RULES)
    vae_params = read_vae(s.vae_weights, s.vae)
    p = s.pipeline._replace(strength=choice.strength)
    init_of = lambda run: task.make_task(run, encoder, None).init
    guide = model.load_guide(choice, "sd_jax", s, init_of, mesh, task.RULES)
    frozen = {"text": text, "vae": sharding.place_all(vae_params, mesh, task.RULES)}
    frozen |= {"guide": guide[1]} if guide else {}

    def begin_of(p, preview):
        check_pipeline(p)
        begin = make_begin(p, encoder, preview or choice.preview, guide and guide[0])
        return lora.drawn(begin, s.lora) if s.lora.rank else begin

    drawn = task.make_task(s, encoder, vae_params)._replace(frozen=frozen)
    base = lambda: read_unet(s.unet_weights, s.unet, s.text.width)
    drawn = finetune.adapted(drawn, workdir, s.lora, base, mesh)
    return model.load_model(workdir, choice, p, encoder, drawn, mesh, begin_of)


def read_run(workdir: str | os.PathLike[str], choice: Choice) -> Settings:
    """Return a workdir's settings with the chosen values; raises as `load_model` does."""
    s: Settings = model.read_run(workdir, choice, "sd_jax")
    check_pipeline(s.pipeline._replace(strength=choice.strength))
    return s


def to_checkpoint(
    workdir: str | os.PathLike[str], ema: str = "ema", base: str | None = None
) -> Checkpoint:
    """Return the UNet of a workdir with its VAE and text encoder, if it has them.

    The factors of a LoRA run are merged into its base weights, which are read from `base` or, by
    default, from the path in its config.
    """
    s = read_run(workdir, Choice())
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = of_run(workdir, s.unet, s.text.width, ema, base=base)
    plain = {"dtype": jnp.float32, "attention_impl": UNet.attention_impl}
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


def write_lora(
    workdir: str | os.PathLike[str], path: str | os.PathLike[str], dialect: str, ema: str = "ema"
) -> None:
    """Write the factors of a LoRA run to a file with the names of `dialect`."""
    s = read_run(workdir, Choice())
    if not s.lora.rank:
        raise ValueError(f"{workdir} is not a LoRA run: it has no factors to write")
    shapes = names.abstract_unet(s.unet, s.text.width)
    params = finetune.factors(workdir, s, shapes, ema)
    lora_files.write(path, params, s.lora, s.unet, dialect)
