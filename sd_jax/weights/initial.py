"""Read the weights with which training starts: the frozen VAE's, and initial ones of the UNet."""

import os
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from diffusion_jax import files, runs
from diffusion_jax.config import picture_fields
from diffusion_jax.weights import finetune, restore
from sd_jax import unet as unet_module
from sd_jax.settings import read_settings
from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import checkpoints, names

# Fields that do not change what a network computes, or that belong to Flax.
_EXECUTION = (
    "parent", "name", "dtype", "remat", "remat_keeps", "attention_impl", "linear_projections",
)  # fmt: skip


def read_vae(path: str | os.PathLike[str], vae: VAE) -> Any:
    """Return a VAE's params, float32 on the host, from a file, a diffusers directory or a workdir.

    From a workdir of sd_jax.train_vae, the average with the largest decay is read. Raises
    FileNotFoundError if `path` does not exist, and ValueError if there is no VAE at `path` or its
    fields differ from those of `vae`.
    """
    if runs.is_workdir(path):
        folder = files.path(path) / runs.CHECKPOINTS
        return jax.device_get(restore.load_params(folder, names.abstract_vae(vae)))
    return _checked(checkpoints.load(path, parts=("vae",)).vae, vae, path, "VAE").params


def read_unet(path: str | os.PathLike[str], unet: UNet, text_width: int) -> Any:
    """Return a UNet's params, float32 on the host, from a file, a diffusers directory or a workdir.

    `path` may also be WORKDIR@STEP, for the checkpoint of that step. From a workdir, the average
    with the largest decay is read. For a checkpoint file, `unet` gives the number of norm groups,
    and also the number of attention heads if the file does not state it. If `unet` inpaints, and
    the UNet at `path` reads only the latents, zeros are appended to its first kernel, as RunwayML's
    inpainting model was initialised. Raises FileNotFoundError if `path` does not exist. Raises
    ValueError if there is no UNet at `path`, if its fields differ from those of `unet`, or if it
    attends to text of another width than `text_width`.
    """
    workdir, step = finetune.at_step(path)
    if runs.is_workdir(workdir):
        run = read_settings(runs.load(workdir, "sd_jax"))
        stored = _without_picture(unet, run.unet.in_channels)
        return _widened(of_run(workdir, stored, text_width, step=step), unet)
    heads = unet.num_heads, unet.head_dim
    opened = checkpoints.load(path, norm_groups=unet.norm_groups, heads=heads, parts=("unet",))
    stored = _without_picture(unet, opened.unet.network.in_channels) if opened.unet else unet
    part = _checked(opened.unet, stored, path, "UNet")
    if part.text_width != text_width:
        raise ValueError(
            f"the UNet in {path} attends to text of width {part.text_width}, but text.width is "
            f"{text_width}: set the `text` group to the text encoder that it was trained with"
        )
    return _widened(part.params, unet)


def of_run(
    workdir: str | os.PathLike[str],
    unet: UNet,
    text_width: int,
    which: str = "ema",
    step: int | None = None,
    base: str | None = None,
) -> Any:
    """Return the params of a run's UNet, with LoRA factors merged into the weights they adapt.

    Args:
        workdir: The workdir of the run.
        unet: The network of the run.
        text_width: The width of the run's text embeddings.
        which: "raw", the name of an average such as "0.9999", or "ema" for the average with the
            largest decay.
        step: The step of the checkpoint; None for the newest.
        base: The path of the weights that a LoRA run adapts; None for the path in its config.
    """
    run = read_settings(runs.load(workdir, "sd_jax"))
    finetune.check_wanted(base, run)
    if run.text.learned_tokens:
        raise ValueError(
            f"{workdir} is a run of text.learned_tokens={run.text.learned_tokens!r}, which trains "
            f"no UNet: name its base, {run.unet_weights}, or write the word's embedding with "
            "convert --names=diffusers"
        )
    read = lambda: read_unet(base or run.unet_weights, unet, text_width)
    abstract = names.abstract_unet(unet, text_width, picture_fields.read(run.data.fields))
    return finetune.network(workdir, run, abstract, read, which, step)


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
        f"{field} is {in_file!r} in the file, but {'' if name == field else f'{name} is '}"
        f"{in_config!r} in the config"
        for (field, in_file), (name, in_config) in pairs
        if (field, in_file) != (name, in_config)
    ]
    if differences:
        raise ValueError(
            f"the {kind} in {path} does not fit the config ({'; '.join(differences)}): change the "
            "config"
        )
    return part


def _fields(network: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and values of the fields that determine what a network computes."""
    # A UNet's num_heads and head_dim are two ways to set the same thing.
    ignored = "head_dim" if getattr(network, "num_heads", 0) else "num_heads"
    names = [n for n in network.__dataclass_fields__ if n not in (*_EXECUTION, ignored)]
    return [(name, getattr(network, name)) for name in names]
