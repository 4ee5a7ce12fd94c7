"""The network of a run or of NeMo's checkpoint: to start from, to adapt, to write elsewhere."""

import os
from typing import Any

import jax

from diffusion_jax import finetune, runs
from diffusion_jax.machine import files
from diffusion_jax.weights import torch_files
from imagen_jax.settings import Settings, read_settings
from imagen_jax.weights import nemo


def read_unet(path: str | os.PathLike[str], s: Settings) -> Any:
    """The parameters of a network of the settings `s`, float32 on the host.

    `path` is WORKDIR or WORKDIR@STEP of a run, whose average is taken, or a checkpoint of NeMo's.
    FileNotFoundError, or ValueError for those of another network.
    """
    workdir, step = finetune.at_step(path)
    if (files.path(workdir) / runs.CONFIG).is_file():
        return of_run(workdir, s, step=step)
    return jax.device_get(read_nemo(path, s))


def of_run(
    workdir: str | os.PathLike[str],
    s: Settings,
    which: str = "ema",
    step: int | None = None,
    base: str | None = None,
) -> Any:
    """The same of a run's weights; `which` and `step` as for restore.load_params.

    `base` is where what a run of LoRA adapts lies now, if not where its config says.
    """
    there, abstract = settings_of(workdir), nemo.abstract_params(s.unet, s.text.width)
    finetune.check_wanted(base, there.lora)
    read = lambda: read_unet(base or there.unet_weights, s)
    return finetune.network(workdir, there, abstract, read, which, step)


def settings_of(workdir: str | os.PathLike[str]) -> Settings:
    """The settings of a run; ValueError or FileNotFoundError if it is none."""
    return read_settings(runs.load(workdir, "imagen_jax"))


def read_nemo(path: str | os.PathLike[str], s: Settings) -> Any:
    """The parameters in a .ckpt, .nemo, .safetensors or .npz file with NeMo's names."""
    try:
        params = nemo.from_nemo(torch_files.read_state_dict(path), nemo.known(s.unet), s.text.width)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return jax.tree.map(jax.numpy.asarray, params)
