"""Open the weights of Stable Diffusion, whatever holds them: a run, a directory or a file."""

import os
from collections.abc import Collection
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax import files, runs, systems
from diffusion_jax.config import picture_fields
from diffusion_jax.weights import finetune, pretrained, restore
from sd_jax import unet as unet_module
from sd_jax import vae as vae_module
from sd_jax.settings import Settings, read_settings
from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import checkpoints, names, schedulers
from sd_jax.weights.checkpoints import Checkpoint, UNetPart, VAEPart
from sd_jax.weights.text import from_folder

_VAE_RUN = "sd_jax.vae"
# Fields that do not change what a network computes, or that belong to Flax.
_EXECUTION = ("parent", "name", "dtype", "remat", "remat_keeps", "attention_impl", "linear_projections")


def open_checkpoint(
    path: str | os.PathLike[str],
    parts: Collection[str] = checkpoints.PARTS,
    *,
    ema: str = "ema",
    config: str | os.PathLike[str] | None = None,
    norm_groups: int | None = None,
    expect: UNet | None = None,
    base: str | None = None,
) -> Checkpoint:
    """Read the parts of a model from a workdir, a diffusers directory or a checkpoint file.

    A run of Stable Diffusion has the UNet that it trained, into which LoRA factors are merged, and
    the VAE and text encoder that its config names. A run of sd_jax.train_vae has a VAE. All params
    are float32 arrays on the host.

    Args:
        path: The workdir, directory or file. It may also be WORKDIR@STEP, for the checkpoint of
            that step.
        parts: The parts to read: "unet", "vae" and "text".
        ema: "ema" or "raw" (see `checkpoints.load`). For a run, "ema" is the average with the
            largest decay, and the name of an average, such as "0.9999", selects that one.
        config: For files, the path of LDM's yaml of the model.
        norm_groups: For files, the number of groups in the norms of residual blocks.
        expect: For files, the UNet whose heads and norm groups are used if the file states none.
        base: The path of the weights that a LoRA run adapts; None for the path in its config.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: `path` holds no supported model, or the run has no such weights.
    """
    workdir, step = finetune.at_step(path)
    if not runs.is_workdir(workdir):
        heads = (expect.num_heads, expect.head_dim) if expect else None
        groups = expect.norm_groups if expect else norm_groups
        return checkpoints.load(path, ema, groups, config=config, heads=heads, parts=parts)
    run = runs.load(workdir)
    if run["system"] == _VAE_RUN:
        vae: VAE = systems.read(run, _VAE_RUN).vae
        folder = files.path(workdir) / runs.CHECKPOINTS
        params = restore.load_params(folder, names.abstract_vae(vae), ema, step)
        part = VAEPart(vae.clone(dtype=jnp.float32), jax.device_get(params))
        return Checkpoint(None, part, [f"{workdir}: the VAE"], scale=1.0)
    s = read_settings(runs.load(workdir, "sd_jax"))
    unet = _unet_of_run(workdir, s, ema, step, base) if "unet" in parts else None
    vae_part = text = None
    if "vae" in parts and s.vae_weights:
        vae_part = VAEPart(s.vae.clone(dtype=jnp.float32), read_vae(s.vae_weights, s.vae))
    if "text" in parts and s.text.encoder.startswith("clip") and s.text.weights:
        text = from_folder(pretrained.locate(s.text.weights))
    held = {"the UNet": unet, "the VAE": vae_part, "the text encoder": text}
    report = [f"{workdir}: {', '.join(name for name, part in held.items() if part)}"]
    size = s.latents.image_size // vae_module.factor(s.vae)
    zero_snr = s.diffusion.noise == schedulers.ZERO_SNR
    scheduler = checkpoints.ddim(zero_snr) if zero_snr else None
    return Checkpoint(
        unet, vae_part, report, text, s.diffusion.predicts, size, s.latents.scale, scheduler, s.latents.shift
    )


def read_vae(path: str | os.PathLike[str], vae: VAE) -> Any:
    """Return the params of the VAE at `path` as float32 arrays on the host.

    `path` is a workdir, a diffusers directory or a checkpoint file. Raises FileNotFoundError if
    `path` does not exist, and ValueError if there is no VAE at `path` or its fields differ from
    those of `vae`.
    """
    return _checked(open_checkpoint(path, ("vae",)).vae, vae, path, "VAE").params


def read_unet(path: str | os.PathLike[str], unet: UNet, text_width: int) -> Any:
    """Return the params of the UNet at `path` as float32 arrays on the host.

    `path` is a workdir, a diffusers directory or a checkpoint file. For a checkpoint file, `unet`
    gives the number of norm groups, and also the number of attention heads if the file does not
    state it. If `unet` inpaints, and the UNet at `path` reads only the latents, zeros are appended
    to its first kernel, as RunwayML's inpainting model was initialised. Raises FileNotFoundError if
    `path` does not exist. Raises ValueError if there is no UNet at `path`, if its fields differ
    from those of `unet`, or if it attends to text of another width than `text_width`.
    """
    opened = open_checkpoint(path, ("unet",), expect=unet)
    stored = _without_picture(unet, opened.unet.network.in_channels) if opened.unet else unet
    part = _checked(opened.unet, stored, path, "UNet")
    if part.text_width != text_width:
        raise ValueError(
            f"the UNet in {path} attends to text of width {part.text_width}, but text.width is "
            f"{text_width}: set the `text` group to the text encoder that it was trained with"
        )
    return _widened(part.params, unet)


def _unet_of_run(workdir: str, s: Settings, ema: str, step: int | None, base: str | None) -> Any:
    """Return the UNet of a run, with LoRA factors merged into the weights they adapt."""
    finetune.check_wanted(base, s.lora, s.text)
    if s.text.learned_tokens:
        raise ValueError(
            f"{workdir} is a run of text.learned_tokens={s.text.learned_tokens!r}, which trains "
            f"no UNet: name its base, {s.unet_weights}, or write the word's embedding with "
            "convert --names=diffusers"
        )
    read = lambda: read_unet(base or s.unet_weights, s.unet, s.text.width)
    abstract = names.abstract_unet(s.unet, s.text.width, picture_fields.read(s.data.fields))
    abstract = jax.eval_shape(s.diffusion.objective.with_learned, abstract)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = finetune.network(workdir, s.lora, abstract, read, ema, step)
    plain = s.unet.clone(dtype=jnp.float32, attention_impl=UNet.attention_impl, remat=False)
    return UNetPart(plain, s.text.width, params)


def _without_picture(unet: UNet, in_channels: int) -> UNet:
    """Return the UNet to read: `unet`, or the same without a picture if the stored one sees none.

    `in_channels` is the number of input channels of the stored UNet.
    """
    sees_none = in_channels == unet.out_channels
    adds = sees_none and unet_module.sees(unet.in_channels, unet.out_channels)
    return unet.clone(in_channels=in_channels) if adds else unet


def _widened(params: Any, unet: UNet) -> Any:
    """Append zeros to the first kernel of `params`, for the input channels that `unet` adds."""
    network = params["params"]
    kernel = network["init_conv"]["kernel"]
    zeros = ((0, 0), (0, 0), (0, unet.in_channels - kernel.shape[2]), (0, 0))
    first = {**network["init_conv"], "kernel": np.pad(kernel, zeros)}
    return {**params, "params": {**network, "init_conv": first}}


def _checked(part: Any, network: nn.Module, path: str | os.PathLike[str], kind: str) -> Any:
    if part is None:
        raise ValueError(f"{path} holds no {kind}: name a file or a directory that has one")
    pairs = zip(_fields(part.network), _fields(network), strict=True)
    differences = [
        f"{field} is {in_file!r} in the file, but {'' if name == field else f'{name} is '}{in_config!r} in the config"
        for (field, in_file), (name, in_config) in pairs
        if (field, in_file) != (name, in_config)
    ]
    if differences:
        raise ValueError(f"the {kind} in {path} does not fit the config ({'; '.join(differences)}): change the config")
    return part


def _fields(network: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and values of the fields that determine what a network computes."""
    # A UNet's num_heads and head_dim are two ways to set the same thing.
    ignored = "head_dim" if getattr(network, "num_heads", 0) else "num_heads"
    names = [n for n in network.__dataclass_fields__ if n not in (*_EXECUTION, ignored)]
    return [(name, getattr(network, name)) for name in names]
