"""NeMo's checkpoints as workdirs, and workdirs' weights as NeMo's: both whole or not at all."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from diffusion_jax import runs
from diffusion_jax.diffusion import objective
from diffusion_jax.machine import files
from diffusion_jax.task import Params
from diffusion_jax.train import checkpoint, optimizer
from diffusion_jax.train.state import init_state
from diffusion_jax.weights import restore, torch_files, torch_weights
from imagen_jax.conditioning import example_inputs
from imagen_jax.settings import Settings, read_settings
from imagen_jax.weights import initial, nemo

FORMATS = (".safetensors", ".npz")
_UNFINISHED = "unfinished"  # A file that is there until all has been written and compared.


def to_workdir(
    source: str | os.PathLike[str], config: ConfigDict, workdir: str | os.PathLike[str]
) -> None:
    """A NeMo checkpoint as a workdir at step 0: to draw from, to score, to train on from.

    `source` is a .ckpt, .nemo, .safetensors or .npz file. Where NAME-EMA.ckpt lies beside
    NAME.ckpt, as NeMo leaves them, its weights are the averaged ones; otherwise the averages start
    at the weights. What was written is read again, compared to the last bit, and computed
    with once. ValueError if file and config do not fit, or the workdir is not empty.
    """
    source, workdir = files.path(source), files.path(workdir)
    s = read_settings(config.to_dict())
    # A kill may come between the weights and the comparison: the same command does both again.
    folder, unfinished = workdir / runs.CHECKPOINTS, workdir / _UNFINISHED
    there = restore.steps(folder)
    if there and not (unfinished.exists() and there == [0]):
        raise ValueError(f"{workdir} holds checkpoints already: name a new folder")
    if s.lora.rank:
        raise ValueError(
            f"lora.rank is {s.lora.rank}, and whole weights are converted: leave it at 0 here, and "
            "train the factors in another workdir with unet.weights"
        )
    read = lambda path: objective.make(s.diffusion).with_learned(
        initial.read_nemo(path, s.unet, s.text.width)
    )
    if source.suffix == ".nemo":
        check_nemo_config(torch_files.read_nemo_config(source), s)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = average = read(source)
        tx, o = optimizer.make_optimizer(s.optimizer, s.run.steps), s.optimizer
        state = init_state(params, tx, o.ema_decays, o.ema_widths)
        averaged = source.with_name(f"{source.stem}-EMA{source.suffix}")
        if averaged.is_file():
            logging.info("the averages are those of %s", averaged)
            average = read(averaged)
            state = state._replace(ema={name: average for name in state.ema})
        weights = {"raw": params, **dict.fromkeys(state.ema, average)}
    with runs.writing(workdir):
        files.write_whole(unfinished, "")
        runs.claim(workdir, config.to_dict())
        files.remove_tree(folder)
        checkpoints = checkpoint.Checkpointer(folder, keep_last=1)
        checkpoints.save(0, state, _Start(), config.to_dict())
        checkpoints.close()
        check_written(workdir, s, weights)
        unfinished.unlink()


def check_written(
    workdir: str | os.PathLike[str], s: Settings, weights: Mapping[str, Params]
) -> None:
    """ValueError unless a workdir holds these weights, by the names of averages, to the last bit.

    The network must compute the same from what is read as from them, and finite numbers.
    """
    folder = files.path(workdir) / runs.CHECKPOINTS
    learning = objective.make(s.diffusion).with_learned
    abstract = jax.eval_shape(learning, nemo.abstract_params(s.unet, s.text.width))
    unet = s.unet.clone(dtype=jnp.float32, attention_impl="xla", remat=False)
    inputs = example_inputs(unet, s.text.width)
    keys = iter(jax.random.split(jax.random.key(0), len(inputs)))
    inputs |= {
        name: jax.random.normal(next(keys), x.shape)
        for name, x in inputs.items()
        if x.dtype == jnp.float32
    }
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        compute = jax.jit(lambda params: unet.apply(params, **inputs))
        for name, expected in weights.items():
            read = restore.load_params(folder, abstract, name)
            same = jax.tree.map(lambda a, b: _bits(a) == _bits(b), expected, read)
            if not all(jax.tree.leaves(same)):
                raise ValueError(f"{workdir} does not hold the weights {name!r} that were read")
            one, other = compute(expected), compute(read)
            if _bits(one) != _bits(other) or not jnp.isfinite(one).all():
                raise ValueError(f"{workdir}: the weights {name!r} do not compute finite numbers")
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract))
    logging.info(
        "%s: %s parameters (%s) written and read again, the same to the last bit and in a forward "
        "pass", workdir, f"{count:,}", ", ".join(weights),
    )  # fmt: skip


def from_workdir(
    workdir: str | os.PathLike[str],
    path: str | os.PathLike[str],
    ema: str = "ema",
    step: int | None = None,
    base: str | None = None,
) -> None:
    """The weights of a run as a NeMo state dict, in a .safetensors or .npz file.

    Of a run of LoRA these are the adapted weights, which lie in `base` if not where its config
    says, with what it learned merged into them. `ema` and `step` as for restore.load_params.
    ValueError or FileNotFoundError if there are no such weights, or NeMo has no such network.
    """
    path = files.path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"cannot write {path}: its name must end in {' or '.join(FORMATS)}")
    s = initial.settings_of(workdir)
    unet = nemo.known(s.unet)
    if getattr(s.unet, "patch", 1) != 1:
        raise ValueError(f"unet.patch is {s.unet.patch}: NeMo's networks have no patches")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = initial.of_run(workdir, s.unet, s.text.width, ema, step, base)
    state = nemo.to_nemo(params, unet)
    torch_weights.write(path, {nemo.PREFIX + name: array for name, array in state.items()})


def check_nemo_config(config: Mapping[str, Any], s: Settings) -> None:
    """ValueError where NeMo's config asks for another model in ways that no weight shows."""
    theirs = nemo.unet_from_config(config)
    pairs = [
        (f"unet.{name}", getattr(theirs, name, None), getattr(s.unet, name, None))
        for name in ("head_dim", "num_heads", "scale_skips")
    ]
    kinds = {"EDM": True, "DDPM": False}
    their_kind = config.get("preconditioning_type", "EDM")
    if their_kind in kinds and kinds[their_kind] != (s.diffusion.precond == "edm"):
        pairs.append(("diffusion.precond", their_kind.lower(), s.diffusion.precond))
    differing = [f"{name}: {b!r} here, {a!r} there" for name, a, b in pairs if a != b]
    if differing:
        raise ValueError(
            f"the model was trained with another config ({'; '.join(differing)}): choose the "
            "config that it was trained with, or change these fields"
        )


class _Start:
    """The position at the start of any data."""

    def get_state(self) -> bytes:
        return b'{"samples": 0}'

    def set_state(self, state: bytes) -> None:
        del state


def _bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()
