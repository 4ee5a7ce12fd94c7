"""Read the weights of a UNet from a run or a NeMo checkpoint."""

import os
from typing import Any

import jax

from diffusion_jax import files, runs
from diffusion_jax.config import picture_fields
from diffusion_jax.files import untrusted
from diffusion_jax.weights import finetune, torch_files
from imagen_jax.settings import read_settings
from imagen_jax.weights import nemo
from imagen_jax.weights.nemo import NemoNetwork


def read_unet(path: str | os.PathLike[str], unet: NemoNetwork, text_width: int) -> Any:
    """Return the parameters for `unet` that are stored at `path`, as float32 arrays on the host.

    `path` is a NeMo checkpoint, or WORKDIR or WORKDIR@STEP for a run. For a run, the parameters are
    its average with the largest decay. `text_width` is the width of the text embeddings. Raises
    FileNotFoundError if `path` does not exist, and ValueError if the names or shapes of the
    parameters differ from those of `unet`.
    """
    workdir, step = finetune.at_step(path)
    if (files.path(workdir) / runs.CONFIG).is_file():
        return of_run(workdir, unet, text_width, step=step)
    return jax.device_get(read_nemo(path, unet, text_width))


def check_prediction(path: str | os.PathLike[str], predicts: str) -> None:
    """Raise ValueError if the run at `path` was not trained to predict `predicts`.

    `path` is WORKDIR or WORKDIR@STEP. A NeMo checkpoint is not checked, because it does not name
    its preconditioner.
    """
    workdir, _ = finetune.at_step(path)
    if not (files.path(workdir) / runs.CONFIG).is_file():
        return
    trained = read_settings(runs.load(workdir, "imagen_jax")).diffusion.predicts
    if trained != predicts:
        raise ValueError(
            f"the model in unet.weights={path} predicts {trained!r}, but diffusion.predicts is "
            f"{predicts!r}: a LoRA cannot change what a network predicts, so set "
            f"diffusion.predicts={trained}"
        )


def of_run(
    workdir: str | os.PathLike[str],
    unet: NemoNetwork,
    text_width: int,
    which: str = "ema",
    step: int | None = None,
    base: str | None = None,
) -> Any:
    """Return the parameters of a run's UNet. LoRA factors are merged into the weights they adapt.

    Args:
        workdir: The workdir of the run.
        unet: The network of the run.
        text_width: The width of the run's text embeddings.
        which: "raw", the name of an average such as "0.9999", or "ema" for the average with the
            largest decay.
        step: The step of the checkpoint; by default, the newest one.
        base: The path of the weights that a LoRA run adapts; by default, the path in its config.

    Raises:
        FileNotFoundError: If there is no such run or checkpoint.
        ValueError: If the run has no such average, or `base` is given for a run without LoRA.
    """
    s = read_settings(runs.load(workdir, "imagen_jax"))
    abstract = nemo.abstract_params(unet, text_width, picture_fields.read(s.data.fields))
    abstract = jax.eval_shape(s.diffusion.objective.with_learned, abstract)
    finetune.check_wanted(base, s.lora, s.text)
    read = lambda: read_unet(base or s.unet_weights, unet, text_width)
    return finetune.network(workdir, s.lora, abstract, read, which, step)


def read_nemo(path: str | os.PathLike[str], unet: NemoNetwork, text_width: int) -> Any:
    """Return the parameters in a .ckpt, .nemo, .safetensors or .npz file with NeMo's names.

    `unet` is the network of the parameters, and `text_width` the width of the text embeddings.
    Raises FileNotFoundError if there is no such file, and ValueError if the file does not hold the
    parameters of `unet`, or NeMo has no network of this kind.
    """
    with untrusted.naming(str(path)):
        state = torch_files.read_state_dict(path)
        params = nemo.from_nemo(state, nemo.require_nemo(unet), text_width)
    return jax.tree.map(jax.numpy.asarray, params)
