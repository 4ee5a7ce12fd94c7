"""Runs that start from given weights: whole, or frozen beside factors of low rank (see lora).

A run of factors holds neither the weights that it adapts nor more of them than their path, in its
config, and their fingerprint, in base.json: who draws with it reads them again, and none others.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from diffusion_jax import lora, runs
from diffusion_jax.config.settings import Lora
from diffusion_jax.diffusion import objective
from diffusion_jax.machine import files, sharding, untrusted
from diffusion_jax.task import Params, Task
from diffusion_jax.weights import pretrained, restore

BASE = "base.json"
Path = str | os.PathLike[str]
Read = Callable[[], Params]


class Start(NamedTuple):
    """What a run trains, and from which weights."""

    task: Task
    read: Read | None = None
    """Reads the parameters to start from, host arrays; None: the task's own initial ones."""
    base: str = ""
    """The fingerprint of the frozen weights, if there are such."""


def begin(task: Task, s: Lora, weights: str, read: Read) -> Start:
    """The task of a config, of factors where `s` asks for them; `read` reads `weights`, if any.

    ValueError or FileNotFoundError if there is nothing to adapt, or s does not fit it.
    """
    if weights and not any(files.path(p).exists() for p in (weights, at_step(weights)[0])):
        raise FileNotFoundError(
            f"unet.weights is {weights!r}: there is no such run, folder or file"
        )
    if not s.rank:
        return Start(task, read if weights else None)
    if not weights:
        raise ValueError(
            f"lora.rank is {s.rank} and unet.weights is empty: say which model is adapted, such as "
            "unet.weights=runs/base, or train all weights with lora.rank=0"
        )
    base = read()
    return Start(lora.adapt(task, base, s), None, pretrained.digest(base))


def check_base(workdir: Path, base: str) -> None:
    """ValueError if the run in `workdir` adapts other weights than those of this fingerprint."""
    path = files.path(workdir) / BASE
    if not path.is_file():
        return
    kept: Mapping[str, Any] = untrusted.parse_json(path.read_text())
    if kept.get("fingerprint") != base:
        raise ValueError(
            f"{workdir} adapts other weights than those that lie in unet.weights now: name the "
            "checkpoint that it was trained on, as --unet_weights=WORKDIR@STEP or PATH (in "
            "training --config.unet.weights)"
        )


def check_wanted(base: str | None, s: Lora) -> None:
    """ValueError where a place of adapted weights is given for a run that adapts none."""
    if base and not s.rank:
        raise ValueError(
            f"--unet_weights={base} says where the weights lie that a run of LoRA adapts, and this "
            "run is none: leave it out"
        )


def keep_base(workdir: Path, base: str) -> None:
    """Writes the fingerprint of the weights that a run adapts, if it does."""
    if base and jax.process_index() == 0:
        path = files.path(workdir) / BASE
        files.write_whole(path, json.dumps({"fingerprint": base}))


def describe(workdir: Path, scale: float | None) -> dict[str, Any]:
    """What the pictures of a run of factors depend on besides, for cards; {} of other runs.

    `scale` stands in place of its config's, unless None.
    """
    path = files.path(workdir) / BASE
    if not path.is_file():
        return {}
    scale = runs.load(workdir)["lora"]["scale"] if scale is None else scale
    return {"lora_scale": scale, "base": untrusted.parse_json(path.read_text())["fingerprint"]}


def adapted(task: Task, workdir: Path, s: Lora, read: Read, mesh: Mesh) -> Task:
    """The task that a run draws with: itself, or of factors, `read` giving what they adapt.

    task.frozen lies on the devices already, and what it returns does too. ValueError if the weights
    are not those that the run was trained on.
    """
    if not s.rank:
        return task
    base = read()
    check_base(workdir, pretrained.digest(base))
    return lora.adapt(task, sharding.place_all(base, mesh, task.rules), s)


def network(
    workdir: Path, s: Any, abstract: Params, read: Read, which: str = "ema", step: int | None = None
) -> Params:
    """The network of a run of the settings `s`, host arrays: factors merged, all else left out.

    `abstract` holds its shapes, `read` reads what the factors adapt; `which` and `step` as for
    restore.load_params, and so the errors.
    """
    params = factors(workdir, s, abstract, which, step)
    if s.lora.rank:
        base = read()
        check_base(workdir, pretrained.digest(base))
        params = lora.merge(base, params, s.lora)
    return jax.device_get({"params": params["params"]})


def factors(
    workdir: Path, s: Any, abstract: Params, which: str = "ema", step: int | None = None
) -> Params:
    """What a run trained, as it is saved: of a LoRA the factors; arguments as of `network`."""
    shapes = jax.eval_shape(objective.make(s.diffusion).with_learned, abstract)
    if s.lora.rank:
        shapes = jax.eval_shape(lambda key: lora.init(key, shapes, s.lora), jax.random.key(0))
    return restore.load_params(files.path(workdir) / runs.CHECKPOINTS, shapes, which, step)


def at_step(path: Path) -> tuple[str, int | None]:
    """(workdir, step) of WORKDIR or WORKDIR@STEP."""
    workdir, at, step = str(path).rpartition("@")
    return (workdir, int(step)) if at and step.isdigit() else (str(path), None)
