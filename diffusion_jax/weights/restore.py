"""The checkpoints of a run, read: which there are, and their parameters without the optimizer."""

import os
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from diffusion_jax.task import Params

EMA = "ema_"
"""How the item of an average begins; its decay follows."""


def load_params(
    directory: str | os.PathLike[str],
    abstract_params: Params,
    which: str = "ema",
    step: int | None = None,
) -> Params:
    """Parameters alone, without reading the optimizer.

    `which` is "raw", the name of an average such as "0.9999", or "ema": the average of the
    largest decay. Leaves of `abstract_params` without a sharding go to the first device.
    ValueError for an average that is not there and for other names or shapes; FileNotFoundError
    if there is no checkpoint.
    """
    root = absolute(directory)
    root = root / str(find_step(root, step))
    item = _params_item(root, which)
    return load_items(root, {item: abstract_params})[item]


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """The whole checkpoints under `directory`, oldest first; empty if there is none."""
    root = absolute(directory)
    return sorted(ocp.path.step.checkpoint_steps(root)) if root.is_dir() else []


def absolute(directory: str | os.PathLike[str]) -> epath.Path:
    """The folder of the checkpoints as Orbax wants it."""
    return epath.Path(directory).absolute()


def find_step(root: epath.Path, step: int | None) -> int:
    """`step` if it is there, else an error; None means the last."""
    there = steps(root)
    if not there:
        raise FileNotFoundError(
            f"no whole checkpoint in {root}: train with this workdir first, or name another"
        )
    if step is not None and step not in there:
        raise FileNotFoundError(f"no checkpoint of step {step} in {root}: there are {there}")
    return there[-1] if step is None else step


def averages(root: epath.Path) -> list[str]:
    """The names of the averages in a step's folder, the largest decay last."""
    names = [path.name.removeprefix(EMA) for path in root.glob(f"{EMA}*")]
    return sorted(names, key=float)


def _params_item(root: epath.Path, which: str) -> str:
    names = averages(root)
    if which == "raw":
        return "params"
    if which == "ema" and names:
        return EMA + names[-1]
    if which in names:
        return EMA + which
    raise ValueError(f"no average {which!r} in {root}: choose one of {['raw', *names]}")


def check_averages(root: epath.Path, wanted: list[str]) -> None:
    """ValueError unless the averages in a step's folder are those of a run."""
    if sorted(wanted, key=float) != averages(root):
        raise ValueError(
            f"{root} keeps the averages {averages(root)}, this run {sorted(wanted, key=float)}: "
            "set its EMA decays to the former, or train in another workdir"
        )


def load_items(root: epath.Path, abstract: dict[str, Any]) -> dict[str, Any]:
    """The items of a step's folder named in `abstract`, placed as its leaves say."""
    for name, tree in abstract.items():
        _check_shapes(root / name, tree)
    placed = jax.tree.map(_placed, abstract)
    with ocp.StandardCheckpointer() as checkpointer:
        return {name: checkpointer.restore(root / name, placed[name]) for name in abstract}


def _check_shapes(item: epath.Path, abstract: Any) -> None:
    """ValueError naming the first leaves that are in one tree only or differ in shape."""
    # The handler, not a checkpointer: the latter warns about a file that items do not have.
    saved = _shapes(ocp.StandardCheckpointHandler().metadata(item).tree)
    expected = _shapes(abstract)
    differ = [name for name in saved | expected if saved.get(name) != expected.get(name)]
    if differ:
        lines = [
            f"  {name}: saved {saved.get(name, 'nothing')}, "
            f"expected {expected.get(name, 'nothing')}"
            for name in differ[:5]
        ]
        raise ValueError(
            f"{item} is of another architecture; {len(differ)} of {len(saved | expected)} arrays "
            "differ, first:\n" + "\n".join(lines) + "\nUse the config that the checkpoint was "
            "trained with, or another workdir"
        )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    named = jax.tree.leaves_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path): tuple(leaf.shape) for path, leaf in named}


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """A leaf's shape, with its own sharding or that of the first device."""
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
