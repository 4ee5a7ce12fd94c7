"""Convert NeMo checkpoints to workdirs, and the weights of workdirs to files with NeMo's names."""

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from diffusion_jax import files, runs
from diffusion_jax.config import picture_fields
from diffusion_jax.devices import tuning
from diffusion_jax.task import Params
from diffusion_jax.train import checkpoint, optimizer
from diffusion_jax.train.state import TrainState, init_state
from diffusion_jax.weights import new_run, restore, torch_files, torch_weights
from imagen_jax.conditioning import example_inputs
from imagen_jax.settings import Settings, read_settings
from imagen_jax.weights import initial, nemo

FORMATS = (".safetensors", ".npz")


def to_workdir(source: str | os.PathLike[str], config: ConfigDict, workdir: str | os.PathLike[str]) -> None:
    """Convert a NeMo checkpoint to a workdir that holds its weights as the checkpoint of step 0.

    The workdir can be used to sample, to evaluate, and to continue training. `source` is a .ckpt,
    .nemo, .safetensors or .npz file. If NeMo's file of averages NAME-EMA.ckpt exists next to
    NAME.ckpt, the averages are read from it. Otherwise all averages equal the weights. At the end,
    `check_written` reads the workdir back and compares it with the converted weights.

    Raises ValueError if the file does not hold the network that the config describes, if the config
    sets up a LoRA, if the workdir already has checkpoints, or if `check_written` fails.
    """
    source, workdir = files.path(source), files.path(workdir)
    s = read_settings(config.to_dict())
    if s.lora.rank:
        raise ValueError(
            f"lora.rank is {s.lora.rank}, but only full weights can be converted: set it to 0, and "
            f"train the LoRA in another workdir with unet.weights={workdir}"
        )
    read = lambda path: s.diffusion.objective.with_learned(initial.read_nemo(path, s.unet, s.text.width))
    if source.suffix == ".nemo":
        check_nemo_config(torch_files.read_nemo_config(source), s)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = average = read(source)
        averaged = source.with_name(f"{source.stem}-EMA{source.suffix}")
        if averaged.is_file():
            logging.info("averages are read from %s", averaged)
            average = read(averaged)
        state = _first_state(params, average, s)
        weights = {"raw": params, **dict.fromkeys(state.ema, average)}
    tuning.release_freed_memory()  # Reading leaves freed memory as large as the weights.
    # A conversion that ends before it is verified remains unfinished.
    with new_run.writing(workdir, config.to_dict(), "--to") as folder:
        checkpoints = checkpoint.Checkpointer(folder, keep_last=1)
        checkpoints.save(0, state, _Start(), config.to_dict())
        checkpoints.close()
        del state, checkpoints  # The check needs their memory.
        tuning.release_freed_memory()
        check_written(workdir, s, weights)


def _first_state(params: Params, average: Params, s: Settings) -> TrainState:
    """Return the training state at step 0, in which equal arrays share memory.

    Every average in the state is `average`. All arrays of the optimizer's state are zeros (tests
    check this), so arrays of the same shape and type share one array.
    """
    tx, o = optimizer.make_optimizer(s.optimizer, s.run.steps), s.optimizer
    shapes = jax.eval_shape(lambda p: init_state(p, tx, o.ema_decays, o.ema_widths), params)
    zeros = functools.cache(jnp.zeros)
    opt_state = jax.tree.map(lambda leaf: zeros(leaf.shape, leaf.dtype), shapes.opt_state)
    ema = dict.fromkeys(shapes.ema, average)
    return TrainState(zeros((), jnp.int32), params, ema, opt_state, zeros((), jnp.int32))


def check_written(workdir: str | os.PathLike[str], s: Settings, weights: Mapping[str, Params]) -> None:
    """Raise ValueError unless the checkpoint in a workdir holds exactly the given weights.

    The keys of `weights` are "raw" and the names of the averages, such as "0.9999". For random
    inputs, the network must also compute the same finite outputs with the weights in the workdir as
    with the given weights.
    """
    folder = files.path(workdir) / runs.CHECKPOINTS
    with_learned = s.diffusion.objective.with_learned
    abstract = jax.eval_shape(with_learned, nemo.abstract_params(s.unet, s.text.width))
    unet = s.unet.clone(dtype=jnp.float32, attention_impl="xla", remat=False)
    inputs = example_inputs(unet, s.text.width)
    keys = iter(jax.random.split(jax.random.key(0), len(inputs)))
    inputs |= {name: jax.random.normal(next(keys), x.shape) for name, x in inputs.items() if x.dtype == jnp.float32}
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        compute = jax.jit(lambda params: unet.apply(params, **inputs))
        for name, expected in weights.items():
            restored = restore.load_params(folder, abstract, name)
            same = jax.tree.map(lambda a, b: _bits(a) == _bits(b), expected, restored)
            if not all(jax.tree.leaves(same)):
                raise ValueError(
                    f"the weights {name!r} read back from {workdir} differ from the converted "
                    "weights, so they were not written correctly: run the same command again"
                )
            output, restored_output = compute(expected), compute(restored)
            del restored  # The next weights need its memory.
            tuning.release_freed_memory()
            if _bits(output) != _bits(restored_output) or not jnp.isfinite(output).all():
                raise ValueError(
                    f"with the weights {name!r} read back from {workdir}, the outputs of the "
                    "network are not finite or differ from those with the converted weights: check "
                    "that the checkpoint is intact and fits the config, and run the command again"
                )
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract))
    logging.info(
        "%s: wrote %s parameters (%s) and verified them bit by bit and in a forward pass",
        workdir,
        f"{count:,}",
        ", ".join(weights),
    )


def from_workdir(
    workdir: str | os.PathLike[str],
    path: str | os.PathLike[str],
    ema: str = "ema",
    step: int | None = None,
    base: str | None = None,
) -> None:
    """Write the weights of a workdir to a .safetensors or .npz file with NeMo's names.

    Args:
        workdir: The workdir of the run. The factors of a LoRA run are merged into its base weights.
        path: The file.
        ema: "raw", the name of an average such as "0.9999", or "ema" for the average with the
            largest decay.
        step: The step of the checkpoint; None for the newest.
        base: The path of the base weights of a LoRA run; None for the path in its config.

    Raises:
        FileNotFoundError: If there is no such run or checkpoint.
        ValueError: If the run has no such average, NeMo has no network of this kind, or the name of
            the file does not end in .safetensors or .npz.
    """
    path = files.path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"cannot write --to={path}: the name must end in {' or '.join(FORMATS)}")
    s = read_settings(runs.load(workdir, "imagen_jax"))
    unet = nemo.require_nemo(s.unet)
    if getattr(s.unet, "patch", 1) != 1:
        raise ValueError(
            f"unet.patch is {s.unet.patch}, but NeMo's networks have no patches: only models with "
            "unet.patch=1 can be exported"
        )
    picture_fields.refuse(s.data.fields, workdir)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = initial.of_run(workdir, s.unet, s.text.width, ema, step, base)
    state = nemo.to_nemo(params, unet)
    torch_weights.write(path, {nemo.PREFIX + name: array for name, array in state.items()})


def check_nemo_config(config: Mapping[str, Any], s: Settings) -> None:
    """Raise ValueError if NeMo's config contradicts the settings `s`.

    Only the number and width of attention heads, the scaling of shortcuts and the preconditioner
    are compared. A wrong value of these would not be noticed otherwise, because the shapes of the
    weights do not depend on them.
    """
    nemo_unet = nemo.unet_from_config(config)
    pairs = [
        (f"unet.{name}", getattr(nemo_unet, name, None), getattr(s.unet, name, None))
        for name in ("head_dim", "num_heads", "scale_skips")
    ]
    kinds = {"EDM": True, "DDPM": False}
    nemo_kind = config.get("preconditioning_type", "EDM")
    if nemo_kind in kinds and kinds[nemo_kind] != (s.diffusion.predicts == "edm"):
        pairs.append(("diffusion.predicts", nemo_kind.lower(), s.diffusion.predicts))
    differences = [f"{name}: {b!r} in the config, {a!r} in the file" for name, a, b in pairs if a != b]
    if differences:
        raise ValueError(
            f"the model was trained with another config ({'; '.join(differences)}): give a config "
            "with the values in the file"
        )


class _Start:
    """A stand-in for a data iterator that has read nothing, for the checkpoint of step 0."""

    def get_state(self) -> bytes:
        return b'{"samples": 0}'

    def set_state(self, state: bytes) -> None:
        del state


def _bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()
