"""Open Stable Diffusion models from diffusers directories and single checkpoint files."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from jax.typing import DTypeLike

from diffusion_jax import files
from diffusion_jax.devices import sharding
from diffusion_jax.draw.program import check_fits, make_programs
from diffusion_jax.draw.stage import Stage
from diffusion_jax.text import clip, tokenize
from diffusion_jax.text import encoder as text_encoder
from diffusion_jax.text.tokenize import TextTokenizer
from diffusion_jax.weights import pretrained
from sd_jax import sampling, settings
from sd_jax import vae as vae_module
from sd_jax.settings import Conditioning, Diffusion, Latents, Pipeline, Sampler
from sd_jax.unet import PIX2PIX, UNet
from sd_jax.vae import VAE
from sd_jax.weights import checkpoints, embedding_files, lora_files, schedulers
from sd_jax.weights import text as text_module
from sd_jax.weights.checkpoints import Checkpoint, UNetPart, VAEPart
from sd_jax.weights.opened import read_vae
from sd_jax.weights.text import TextPart

DEFAULTS = Sampler("plms", steps=50, eta=0.0, guidance=7.5, negative_prompt="", height=0, width=0)
"""NeMo's sampler settings, used for models without a scheduler. The height and width 0 mean the
size of the training images."""


class File(NamedTuple):
    """Settings of a model trained elsewhere, which its files may lack.

    None means the value in the files or, if they lack the setting, a default.
    """

    predicts: str | None = None
    """The UNet's prediction, "eps" or "v". The default is "eps" for Stable Diffusion 1.x; 2.x has
    no default."""
    tokenizer: str | None = None
    """Folder with CLIP's tokenizer, which a single file does not contain."""
    norm_groups: int | None = None
    """Number of groups of the norms in residual blocks: 16 for MLPerf's files. The default is 32.
    """
    dtype: DTypeLike | None = None
    """Data type in which the networks compute; by default bfloat16, or float32 on CPUs."""
    config: str | None = None
    """Path of LDM's yaml config, for a model in a single file (see ldm_config.py)."""
    lora: Sequence[str] | None = None
    """LoRA files to merge into the model, as FILE or FILE:STRENGTH (see lora_files.py)."""


NO_FACTS = File()


def load_stage(
    path: pathlib.Path, fields: Mapping[str, Any] = {}, ema: str = "ema", file: File = NO_FACTS, embedding: str = ""
) -> Stage:
    """Open the model in a diffusers directory or a file. The settings of the stage are a Pipeline.

    Args:
        path: The diffusers directory or the file.
        fields: Values that replace settings, keyed by field, such as "sampler.steps".
        ema: "raw" for the raw weights, or "ema" for their averages if the file has any.
        file: Settings that the files may lack.
        embedding: Files of textual inversion, separated by commas (see embedding_files.py).

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the model lacks a part, or its parts do not fit together.
    """
    # The networks.
    opened = checkpoints.load(path, ema, file.norm_groups, config=file.config)
    vae_weights, text_weights = fields.get("vae.weights"), fields.get("text.weights")
    unet, vae, text = _whole(path, opened, vae_weights, text_weights, file.lora or ())
    p = _pipeline(path, opened, file, unet.network, vae.network)
    tokenizer = path / "tokenizer"
    if file.tokenizer:
        tokenizer = files.local(file.tokenizer)
    elif text_weights:
        tokenizer = pretrained.locate(text_weights)
    opened_tokenizer = _tokenizer(path, text, tokenizer, unet.text_width)
    tower = text.tower.clone(dtype=p.unet.dtype)
    encoder = clip.of_tower(tower, (), opened_tokenizer, tower.max_tokens)
    text_params = text.params
    if embedding:
        encoder, text_params = embedding_files.apply(embedding, encoder, text_params)
    encoder, text_params = lora_files.add_words(file.lora or (), encoder, text_params)

    # The sampler.
    guiding = {"sampler.guiding": "pix2pix"} if p.sees == PIX2PIX else {}
    settings_with = lambda changes: p._replace(
        sampler=_sampler(path, opened.scheduler, {**guiding, **fields, **changes})
    )
    s = settings_with({})
    settings.check_pipeline(s)
    check_fits(*s.output_shape, s.vae.width * s.vae.channel_mult[0])
    for line in opened.report:
        logging.info("%s: %s", path, line)
    logging.info(
        "%s: predicts %s, computes in %s, attention %s, sampler %s%s",
        path,
        s.diffusion.predicts,
        jnp.dtype(s.unet.dtype).name,
        s.unet.attention_impl,
        s.sampler.name,
        f" on the grid {s.sampler.grid}" if s.sampler.grid else "",
    )

    # The weights on the devices.
    mesh = sharding.make_mesh()
    place = lambda params: sharding.place_all(_lean(params, p.unet.dtype), mesh, sharding.RULES)
    frozen, params = {"text": place(text_params), "vae": place(vae.params)}, place(unet.params)

    def inputs_of(p, preview, strength):
        p = p._replace(strength=strength)
        settings.check_pipeline(p)
        return sampling.make_sampler_inputs(p, encoder, preview)

    programs = make_programs(inputs_of, frozen, mesh)
    return Stage(
        str(path), s, encoder, params, ema, 0, frozen, inputs_of, programs, settings_with, programs(s, None, 1.0)
    )


def _whole(
    path: pathlib.Path, opened: Checkpoint, vae_weights: str | None, text_weights: str | None, lora: Sequence[str]
) -> tuple[UNetPart, VAEPart, TextPart]:
    """Return the UNet, VAE and text encoder with the LoRA files `lora` merged into them.

    The VAE is read from the path `vae_weights`, and the text encoder from `text_weights`. If such a
    path is None or "", the part of `opened` is used. Raises ValueError if a part is missing.
    """
    if vae_weights:
        network = opened.vae.network if opened.vae else VAE()  # All versions have the same network.
        opened = opened._replace(vae=VAEPart(network, read_vae(vae_weights, network)))
    if text_weights:
        folder = pretrained.locate(text_weights)
        opened = opened._replace(text=text_module.from_folder(folder))
    opened = lora_files.apply(lora, opened)
    unet, vae, text = opened.unet, opened.vae, opened.text
    if unet is None:
        raise ValueError(f"{path} holds no UNet: choose a model that has one")
    if vae is None:
        raise ValueError(f"{path} holds no VAE: give one with --vae_weights=PATH")
    if text is None:
        raise ValueError(f"{path} holds no text encoder: give one with --text_weights=FOLDER")
    return unet, vae, text


def _pipeline(path: pathlib.Path, opened: Checkpoint, file: File, unet: UNet, vae: VAE) -> Pipeline:
    """Return the settings for drawing with a checkpoint's UNet and VAE.

    Raises ValueError if neither `file` nor the checkpoint states what the UNet of a 2.x model
    predicts, eps or v.
    """
    predicts = file.predicts or opened.predicts or ("" if unet.linear_projections else "eps")
    if not predicts:
        raise ValueError(
            f"{path} does not state whether its UNet predicts eps or v: give --prediction=eps (2.x "
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
        Latents(image_size=size, scale=opened.scale, shift=opened.shift),
        Diffusion(predicts, noise=schedulers.read_diffusion(opened.scheduler or {})[1]),
        DEFAULTS,
    )


def _sampler(path: pathlib.Path, scheduler: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> Sampler:
    """Return the sampler settings of a diffusers scheduler, changed by the config fields `fields`.

    DEFAULTS takes the place of the scheduler's settings if there is no scheduler, if it is not
    supported, or if `fields` names another sampler.
    """
    chosen = {field.removeprefix("sampler."): value for field, value in fields.items() if field.startswith("sampler.")}
    sampler = DEFAULTS._replace(steps=chosen.get("steps", DEFAULTS.steps))
    if scheduler:
        try:
            scheduled = schedulers.read_sampler(scheduler, sampler)
            sampler = scheduled if chosen.get("name") in (None, scheduled.name) else sampler
        except ValueError as error:
            name = chosen.get("name", sampler.name)
            logging.warning("%s: %s; the sampler %s is used instead", path, error, name)
    return sampler._replace(**chosen)


def _tokenizer(path: pathlib.Path, text: TextPart, tokenizer: pathlib.Path, width: int) -> TextTokenizer:
    """Return the tokenizer in the folder `tokenizer`.

    Raises ValueError if there is no tokenizer, if it has more tokens than the text encoder, or if
    the text encoder's width is not `width`, the width of the text that the UNet attends to.
    """
    if text.tower.width != width:
        raise ValueError(
            f"the UNet in {path} attends to text of width {width}, but the text encoder has width "
            f"{text.tower.width}: give the UNet's text encoder with --text_weights=FOLDER"
        )
    if not tokenizer.is_dir():
        raise ValueError(
            f"{path} has no tokenizer: give --tokenizer=FOLDER, a folder with CLIP's vocab.json and merges.txt"
        )
    opened = tokenize.clip(tokenizer, open_clip=text.pads_with_0)
    text_encoder.check_fits("CLIP", tokenizer, text.tower, opened.vocab_size, width)
    return opened


def _lean(params: Any, dtype: DTypeLike) -> Any:
    """Return params with kernels cast to `dtype`, the data type in which the networks compute.

    This saves memory. It does not change results, because the networks cast the kernels anyway.
    """

    def cast(path, leaf):
        return leaf.astype(dtype) if path[-1].key == "kernel" else leaf

    return jax.tree.map_with_path(cast, params)
