"""Loading published models to draw from: diffusers directories and single files."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from jax.typing import DTypeLike

from diffusion_jax.config.ranges import check
from diffusion_jax.draw.model import Model
from diffusion_jax.draw.program import make_programs
from diffusion_jax.machine import files, sharding
from diffusion_jax.text import TextEncoder, clip
from diffusion_jax.weights import pretrained
from sd_jax import sampling, settings, task
from sd_jax import vae as vae_module
from sd_jax.settings import Conditioning, Diffusion, Latents, Pipeline, Sampler
from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import checkpoints, lora_files, schedulers
from sd_jax.weights import text as text_module
from sd_jax.weights.checkpoints import Checkpoint, UNetPart, VAEPart
from sd_jax.weights.initial import read_vae
from sd_jax.weights.text import TextPart
from sd_jax.weights.trained import Choice

DEFAULTS = Sampler("plms", steps=50, eta=0.0, guidance=7.5, negative_prompt="", height=0, width=0)
"""NeMo's sampler, used for models without a scheduler. Height and width 0 mean the size that the
model was trained on."""


class File(NamedTuple):
    """Facts that a model's files may lack; None means the files' own value, or the usual one."""

    predicts: str | None = None
    """The UNet's prediction, "eps" or "v"; by default the scheduler's, or "eps" for 1.x."""
    tokenizer: str | None = None
    """Folder with CLIP's tokenizer, which single files lack."""
    norm_groups: int | None = None
    """Groups of the norms in residual blocks: 16 for MLPerf's files."""
    dtype: DTypeLike | None = None
    """Type that the networks compute in; by default bfloat16, or float32 on CPUs."""
    config: str | None = None
    """LDM's yaml of a single file (see ldm_config)."""
    lora: Sequence[str] | None = None
    """LoRA files to merge into the model, as FILE or FILE:STRENGTH (see lora_files)."""


def load_model(path: pathlib.Path, choice: Choice, file: File) -> Model:
    """Load a diffusers directory or a single file; the model's settings are a Pipeline.

    Raises ValueError or FileNotFoundError for missing or unsupported parts.
    """
    check(Sampler, choice.fields_of("sampler"), "sampler")  # Before reading.
    if choice.guide:
        raise ValueError("--guide is for models of a workdir, --workdir, only")
    opened = checkpoints.load(path, choice.ema, file.norm_groups, config=file.config)
    unet, vae, text = _whole(path, opened, choice, file)
    p = _pipeline(path, opened, file, unet.network, vae.network)
    scheduler = opened.scheduler
    settle = lambda choice: p._replace(
        sampler=_sampler(path, scheduler, choice), strength=choice.strength
    )
    p = settle(choice)
    settings.check_pipeline(p)
    encoder = _encoder(path, text, choice, file, unet.text_width, p.unet.dtype)
    logging.info(
        "%s: predicts %s, computes in %s, attention %s, sampler %s%s",
        path, p.diffusion.predicts, jnp.dtype(p.unet.dtype).name, p.unet.attention_impl,
        p.sampler.name, f" on the grid {p.sampler.grid}" if p.sampler.grid else "",
    )  # fmt: skip
    mesh = sharding.make_mesh()
    place = lambda params: sharding.place_all(_lean(params, p.unet.dtype), mesh, task.RULES)
    frozen = {"text": place(text.params), "vae": place(vae.params)}

    def begin_of(p, preview):
        settings.check_pipeline(p)
        return sampling.make_begin(p, encoder, preview or choice.preview)

    programs = make_programs(begin_of, frozen, mesh)
    params = place(unet.params)
    return Model(
        str(path), p, encoder, programs.draw(p), params, choice.ema, 0, "", programs, settle
    )


def _whole(
    path: pathlib.Path, opened: Checkpoint, choice: Choice, file: File
) -> tuple[UNetPart, VAEPart, TextPart]:
    """Return all parts: the chosen ones or else the checkpoint's, with LoRA merged."""
    if choice.vae_weights:
        network = opened.vae.network if opened.vae else VAE()  # All versions have the same network.
        vae = VAEPart(network, read_vae(choice.vae_weights, network))
        opened = opened._replace(vae=vae)
    if choice.text_weights:
        folder = pretrained.locate(choice.text_weights)
        opened = opened._replace(text=text_module.from_folder(folder))
    opened = lora_files.apply(file.lora or (), opened)
    unet, vae, text = opened.unet, opened.vae, opened.text
    if unet is None:
        raise ValueError(f"{path} holds no UNet: choose a complete model")
    if vae is None:
        raise ValueError(f"{path} holds no VAE: give one with --vae_weights=PATH")
    if text is None:
        raise ValueError(f"{path} holds no text encoder: give one with --text_weights=FOLDER")
    return unet, vae, text


def _pipeline(path: pathlib.Path, opened: Checkpoint, file: File, unet: UNet, vae: VAE) -> Pipeline:
    """Return a checkpoint's settings. Raises ValueError if the UNet's prediction is unknown."""
    predicts = file.predicts or opened.predicts or ("" if unet.linear_projections else "eps")
    if not predicts:
        raise ValueError(
            f"{path} does not say whether its UNet predicts eps or v: give --prediction=eps (2.x "
            "with 512 pixels) or --prediction=v (2.x with 768 pixels, and MLPerf)"
        )
    backend = jax.default_backend()
    dtype = jnp.dtype(file.dtype or (jnp.float32 if backend == "cpu" else jnp.bfloat16))
    attention = "cudnn" if backend == "gpu" and dtype.itemsize == 2 else "xla"
    size = opened.latent_size * vae_module.factor(vae)
    return Pipeline(
        unet.clone(dtype=dtype, attention_impl=attention),
        vae.clone(dtype=dtype),
        Conditioning(drop_to="empty", pad_to=0),
        Latents(image_size=size, scale=opened.scale, pixels="symmetric"),
        Diffusion(predicts, noise=schedulers.read_diffusion(opened.scheduler or {})[1]),
        DEFAULTS,
    )


def _sampler(path: pathlib.Path, scheduler: Mapping[str, Any] | None, choice: Choice) -> Sampler:
    """Return the directory's sampler unless it is unsupported, with the chosen fields replaced."""
    overrides = choice.fields_of("sampler")
    sampler = DEFAULTS._replace(steps=overrides.get("steps", DEFAULTS.steps))
    if scheduler:
        try:
            scheduled = schedulers.read_sampler(scheduler, sampler)
            sampler = scheduled if overrides.get("name") in (None, scheduled.name) else sampler
        except ValueError as error:
            name = overrides.get("name", sampler.name)
            logging.warning("%s: %s; the sampler %s is used instead", path, error, name)
    return sampler._replace(**overrides)


def _encoder(
    path: pathlib.Path, text: TextPart, choice: Choice, file: File, width: int, dtype: DTypeLike
) -> TextEncoder:
    """Return the text encoder without its weights; the tokenizer is the chosen or the model's."""
    if text.tower.width != width:
        raise ValueError(
            f"the UNet in {path} attends to text of width {width}, but the text encoder has width "
            f"{text.tower.width}: they belong to different models"
        )
    folder = path / "tokenizer"
    if file.tokenizer:
        folder = files.local(file.tokenizer)
    elif choice.text_weights:
        folder = pretrained.locate(choice.text_weights)
    if not folder.is_dir():
        raise ValueError(
            f"{path} has no tokenizer: give a folder with CLIP's (vocab.json and merges.txt) with "
            "--tokenizer=FOLDER"
        )
    tokenizer = clip.open_tokenizer(folder, text.pads_with_0)
    return clip.of_tower(text.tower.clone(dtype=dtype), (), tokenizer, text.tower.max_tokens)


def _lean(params: Any, dtype: DTypeLike) -> Any:
    """Cast kernels to the type that they are used in, which saves memory and changes no result."""

    def cast(path, leaf):
        return leaf.astype(dtype) if path[-1].key == "kernel" else leaf

    return jax.tree.map_with_path(cast, params)
