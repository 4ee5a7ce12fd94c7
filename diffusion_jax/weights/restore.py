"""The checkpoints of a run, read: which there are, and their parameters without the optimizer."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from diffusion_jax.machine import checksums, distributed
from diffusion_jax.task import Params

EMA = "ema_"
"""How the item of an average begins; its decay follows."""


class Damaged(ValueError):
    """A checkpoint that does not hold what was saved."""


def load_params(
    directory: str | os.PathLike[str],
    abstract_params: Params,
    which: str = "ema",
    step: int | None = None,
) -> Params:
    """Parameters alone, without reading the optimizer.

    `which` is "raw", the name of an average such as "0.9999", or "ema": the average of the
    largest decay. `step` None is the newest that is sound. Leaves of `abstract_params` without a
    sharding go to the first device. ValueError for an average that is not there and for other
    names or shapes; FileNotFoundError if there is no checkpoint, Damaged if it is not sound.
    """
    return load_params_and_step(directory, abstract_params, which, step)[0]


def load_params_and_step(
    directory: str | os.PathLike[str], abstract_params: Params, which: str, step: int | None
) -> tuple[Params, int]:
    """What load_params gives, and the step that it is of."""
    root = absolute(directory)
    item_of = lambda step: _params_item(root / str(step), which)
    if step is None:
        step = newest_sound(root, item_of)
    else:
        _check_sound(root, step, item_of)
    item = item_of(step)
    return load_items(root / str(step), {item: abstract_params})[item], step


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """The whole checkpoints under `directory`, oldest first; empty if there is none."""
    root = absolute(directory)
    return sorted(ocp.path.step.checkpoint_steps(root)) if root.is_dir() else []


def absolute(directory: str | os.PathLike[str]) -> epath.Path:
    """The folder of the checkpoints as Orbax wants it."""
    return epath.Path(directory).absolute()


def newest_sound(
    directory: str | os.PathLike[str], item_of: Callable[[int], str] | None = None
) -> int:
    """The newest checkpoint that holds what was saved; says in a line each what it passed over.

    Every process must call it alike. `item_of(step)` is the one item to look at, if not all.
    FileNotFoundError if there is no checkpoint, Damaged if none is sound.
    """
    root, newest = absolute(directory), ""
    check_there(root)
    for step in reversed(steps(root)):
        found = _damage(root, step, [item_of(step)] if item_of else ())
        if found is None:
            return step
        logging.warning("passing over the damaged checkpoint %s (%s)", root / str(step), found)
        newest = newest or f"step {step}: {found}"
    raise Damaged(
        f"no checkpoint in {root} is sound ({newest}): put a copy in its place, or move the folder "
        "away to start anew"
    )


def check_there(root: epath.Path, step: int | None = None) -> None:
    """FileNotFoundError unless there is a checkpoint, and this one if a step is given."""
    there = steps(root)
    if not there:
        raise FileNotFoundError(
            f"no whole checkpoint in {root}: train with this workdir first, or name another"
        )
    if step is not None and step not in there:
        raise FileNotFoundError(f"no checkpoint of step {step} in {root}: there are {there}")


def _check_sound(root: epath.Path, step: int, item_of: Callable[[int], str]) -> None:
    check_there(root, step)
    if found := _damage(root, step, [item_of(step)]):
        raise Damaged(
            f"the checkpoint {root / str(step)} is damaged ({found}): name another of "
            f"{steps(root)}, or none for the newest that is sound"
        )


def _damage(root: epath.Path, step: int, items: Collection[str]) -> str | None:
    """What of a checkpoint is not as it was saved, in all of it or in some of its items."""
    part = jax.process_index(), jax.process_count()
    said = distributed.gather_text(checksums.damage(root / str(step), items, *part) or "")
    return next(filter(None, said), None)


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
    check_items(root, abstract)
    placed = jax.tree.map(_placed, abstract)
    with _readable(root), ocp.StandardCheckpointer() as checkpointer:
        return {name: checkpointer.restore(root / name, placed[name]) for name in abstract}


def check_items(root: epath.Path, abstract: dict[str, Any]) -> None:
    """ValueError unless a step's folder holds these items, in these shapes."""
    with _readable(root):
        # The handler, not a checkpointer: the latter warns about a file that items do not have.
        handler = ocp.StandardCheckpointHandler()
        saved = {name: _shapes(handler.metadata(root / name).tree) for name in abstract}
    for name, tree in abstract.items():
        _check_shapes(root / name, saved[name], tree)


@contextlib.contextmanager
def _readable(root: epath.Path) -> Iterator[None]:
    """Damaged, in one line, for what TensorStore and Orbax say of files that they cannot read."""
    try:
        yield
    except (ValueError, OSError, KeyError) as error:
        first = f"{error}".strip().partition("\n")[0][:200]
        raise Damaged(
            f"the checkpoint {root} cannot be read ({type(error).__name__}: {first}): move it out "
            "of its folder to go on from the one before it"
        ) from error


def _check_shapes(item: epath.Path, saved: dict[str, tuple[int, ...]], abstract: Any) -> None:
    """ValueError naming the first leaves that are in one tree only or differ in shape."""
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
