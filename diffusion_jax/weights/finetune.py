"""Prepare fine-tuning: start a run from given weights, and train either all weights or a LoRA.

lora.py defines LoRA. A LoRA run does not store the weights that it adapts. Its config holds the
path of these weights, and base.json holds their fingerprint (pretrained.digest). To draw images,
the weights are read from the path, and their fingerprint must match base.json.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh

from diffusion_jax import files, runs
from diffusion_jax.config import picture_fields
from diffusion_jax.config.settings import Lora, Text
from diffusion_jax.devices import sharding
from diffusion_jax.files import untrusted
from diffusion_jax.task import Params, Task
from diffusion_jax.weights import lora, pretrained, restore

BASE, FROZEN = "base.json", "frozen.json"

ReadParams = Callable[[], Params]
Adapt = Callable[[Task, Params], Task]
"""A function (task, weights to freeze) -> the task that trains something else, as lora.adapt."""


class FineTuningStart(NamedTuple):
    """A run's task and its initial parameters."""

    task: Task
    read: ReadParams | None = None
    """Reads the initial parameters as host arrays. None: task.init creates them."""
    base: str = ""
    """The fingerprint of the weights that a LoRA adapts; "" if the run trains all weights."""


def start(
    task: Task, s: Lora, weights: str, read: ReadParams, fields: Sequence[str] = (), adapt: Adapt | None = None
) -> FineTuningStart:
    """Return the task and the initial parameters of a run. If s.rank > 0, the run trains a LoRA.

    Args:
        task: The task that trains all parameters.
        s: The config's `lora` group.
        weights: The path in the config's `unet.weights`, or "" for none.
        read: Reads `weights` as host arrays.
        fields: The config's `data.fields`. A LoRA needs the ranges of the fields of `weights`.
        adapt: Freezes `weights` even if s.rank is 0, to train something else than a LoRA.

    Raises FileNotFoundError if `weights` does not exist. Raises ValueError if a LoRA has no weights
    to adapt, or if `s` does not fit their layers.
    """
    if weights and not any(files.path(p).exists() for p in (weights, at_step(weights)[0])):
        raise FileNotFoundError(f"unet.weights is {weights!r}: there is no such run, folder or file")

    def named() -> Params:
        with untrusted.naming(f"unet.weights={weights}"):
            return read()

    adapt = functools.partial(lora.adapt, s=s) if s.rank else adapt
    if not adapt:
        if weights and (others := _other_ranges(weights, fields)):
            logging.warning("%s, so the network sees other numbers than before", others)
        return FineTuningStart(task, (lambda: _with_fields(task, weights, named())) if weights else None)
    if not weights:
        raise ValueError(
            f"lora.rank is {s.rank} and unet.weights is empty: name the model to adapt, such as "
            "unet.weights=runs/base, or train all weights with lora.rank=0"
        )
    base = _with_fields(task, weights, named(), all_needed=True)
    if others := _other_ranges(weights, fields):
        raise ValueError(f"{others}: use the same ranges")
    return FineTuningStart(adapt(task, base), None, pretrained.digest(base))


def _with_fields(task: Task, weights: str, params: Params, all_needed: bool = False) -> Params:
    """Return `params`, the weights in the file or folder `weights`, after checking their fields.

    Raises ValueError if the weights have a field that the task lacks or, with `all_needed`, lack a
    field of the task.
    """
    names = lambda tree: {name for name in tree["params"] if name.startswith(picture_fields.PREFIX)}
    stored, own = names(params), names(jax.eval_shape(task.init, jax.random.key(0)))
    if stored - own or (all_needed and own - stored):
        shown = lambda found: ", ".join(sorted(n.removeprefix(picture_fields.PREFIX) for n in found)) or "none"
        raise ValueError(
            f"unet.weights={weights} has the fields {shown(stored)}, but data.fields names "
            f"{shown(own)}: name the fields of these weights"
        )
    return params


def _other_ranges(weights: str, fields: Sequence[str]) -> str:
    """Return a warning if the run `weights` was trained with other ranges of `fields`, else "".

    Fields that only one of the two runs has do not count. Files, and folders of diffusers, do not
    tell their ranges, and cause no warning.
    """
    workdir, _ = at_step(weights)
    if not runs.is_workdir(workdir):
        return ""
    stored = runs.load(workdir)["data"].get("fields", ())
    before, now = picture_fields.ranges(stored), picture_fields.ranges(fields)
    if all(before[name] == now[name] for name in before.keys() & now.keys()):
        return ""
    return (
        f"unet.weights={weights} was trained with data.fields {', '.join(stored)}, but "
        f"data.fields is {', '.join(fields)}"
    )


def check_base(workdir: files.Path, base: str) -> None:
    """Raise ValueError if `workdir` holds a LoRA of weights whose fingerprint is not `base`."""
    path = files.path(workdir) / BASE
    if not path.is_file():
        return
    saved = pretrained.read_json(path)
    if saved.get("fingerprint") != base:
        raise ValueError(
            f"the run in {workdir} adapts weights that differ from those in unet.weights: name "
            "the checkpoint that it was trained on with --unet_weights=WORKDIR@STEP or "
            "--unet_weights=PATH (in training, with --config.unet.weights)"
        )


def check_wanted(base: str | None, s: Lora, text: Text) -> None:
    """Raise ValueError if `base`, a path of weights to adapt, is given for a run that adapts none.

    `s` and `text` are groups of the run's config.
    """
    if base and not (s.rank or text.learned_tokens):
        raise ValueError(
            f"--unet_weights={base} names the weights that a LoRA run adapts, but this run trains "
            "all weights: remove --unet_weights"
        )


def keep_base(workdir: files.Path, base: str) -> None:
    """Write `base`, the fingerprint of the weights that a LoRA run adapts, into its workdir.

    If `base` is "", the run trains no LoRA, and nothing is written.
    """
    if base and jax.process_index() == 0:
        path = files.path(workdir) / BASE
        files.write_whole(path, json.dumps({"fingerprint": base}))


def keep_frozen(workdir: files.Path, frozen: Any) -> None:
    """Write the fingerprints of a task's frozen text encoder and VAE into a workdir."""
    fingerprints, path = _fingerprints(frozen), files.path(workdir) / FROZEN
    if fingerprints and jax.process_index() == 0:
        stored = pretrained.read_json(path) if path.is_file() else {}
        files.write_whole(path, json.dumps(stored | fingerprints))


def check_frozen(workdir: files.Path, frozen: Any) -> None:
    """Raise ValueError if the run in `workdir` was trained with another text encoder or VAE.

    `frozen` holds the frozen weights of a task. Runs of earlier versions stored no fingerprints.
    """
    path = files.path(workdir) / FROZEN
    stored = pretrained.read_json(path) if path.is_file() else {}
    for part, fingerprint in _fingerprints(frozen).items():
        if stored.get(part, fingerprint) != fingerprint:
            raise ValueError(
                f"the run in {workdir} was trained with other weights than {part}.weights names: "
                f"set --config.{part}.weights to those, or start a new run from its UNet with "
                f"--config.unet.weights={workdir}"
            )


def _fingerprints(frozen: Any) -> dict[str, str]:
    """Return the fingerprints of the text encoder and the VAE, which do not depend on their types.

    A part without weights has none.
    """
    own = frozen.get("task", frozen) if isinstance(frozen, Mapping) else {}
    parts = {name: own[name] for name in ("text", "vae") if jax.tree.leaves(own.get(name))}
    return {name: pretrained.digest(params, jnp.bfloat16) for name, params in parts.items()}


def describe(workdir: files.Path, scale: float | None) -> dict[str, Any]:
    """Return the fields "lora_scale" and "base" of a card, the JSON that is saved with a picture.

    "base" is the fingerprint of the weights that the run adapts. Only a LoRA has a scale. If
    `scale` is None, the scale comes from the run's config. For other runs, return {}.
    """
    path = files.path(workdir) / BASE
    if not path.is_file():
        return {}
    base, s = pretrained.read_json(path)["fingerprint"], runs.load(workdir)["lora"]
    scaled = {"lora_scale": s["scale"] if scale is None else scale} if s["rank"] else {}
    return {**scaled, "base": base}


def adapted(task: Task, workdir: files.Path, s: Lora, read: ReadParams, mesh: Mesh, adapt: Adapt | None = None) -> Task:
    """Return a task whose `sample` takes the parameters that the run in `workdir` trained.

    For a LoRA run, this task adds the LoRA factors to the base weights. For other runs, it is
    `task`, or what `adapt` makes of it. `read` reads the base weights. All arrays of `task.frozen`
    must be on the devices already. Raises ValueError if the run was trained on other base weights.
    """
    adapt = functools.partial(lora.adapt, s=s) if s.rank else adapt
    if not adapt:
        return task
    base = read()
    check_base(workdir, pretrained.digest(base))
    return adapt(task, sharding.place_all(base, mesh, task.rules))


def network(
    workdir: files.Path, s: Lora, abstract: Params, read: ReadParams, which: str = "ema", step: int | None = None
) -> Params:
    """Return the parameters {"params": ...} of a run's network as host arrays.

    LoRA factors are merged into the weights that they adapt.

    Args:
        workdir: The workdir of the run.
        s: The `lora` group of the run's config.
        abstract: The shapes of the parameters that training has without LoRA: the network's, and
            those of a learned loss weighting.
        read: Reads the weights that a LoRA run adapts.
        which: "raw", the name of an average such as "0.9999", or "ema" for the average
            with the largest decay.
        step: The step of the checkpoint; None: the newest undamaged one.

    Raises ValueError or FileNotFoundError if the run has no such weights or checkpoint.
    """
    params = factors(workdir, s, abstract, which, step)
    if s.rank:
        base = read()
        check_base(workdir, pretrained.digest(base))
        params = lora.merge(base, params, s)
    return jax.device_get({"params": params["params"]})


def factors(workdir: files.Path, s: Lora, abstract: Params, which: str = "ema", step: int | None = None) -> Params:
    """Return the parameters that a run saved: for a LoRA run, the factors and not the weights.

    The arguments and errors are those of `network`.
    """
    shapes = jax.eval_shape(lambda key: lora.init(key, abstract, s), jax.random.key(0)) if s.rank else abstract
    return restore.load_params(files.path(workdir) / runs.CHECKPOINTS, shapes, which, step)


def at_step(path: files.Path) -> tuple[str, int | None]:
    """Split a path WORKDIR@STEP into (workdir, step). Without @STEP, the step is None."""
    workdir, at, step = str(path).rpartition("@")
    named = at and step.isdigit() and not runs.is_workdir(path)  # A workdir's name may end like it.
    return (workdir, int(step)) if named else (str(path), None)
