"""The checkpoints of a run, read: which there are, and their parameters without the optimizer.

Beside them lie the snapshots of the averages by power functions, folders of the same kind. In a
folder that was packed to be passed on, a file of weights stands in place of what Orbax wrote.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from diffusion_jax.machine import checksums, distributed, files
from diffusion_jax.task import Params
from diffusion_jax.weights import averages, buckets, packed

EMA = "ema_"
"""How the item of an average begins; its decay follows, or "power-" and its width."""
SNAPSHOTS = "snapshots"
"""The folder of snapshots, beside that of the checkpoints."""
_NOTHING = 1e-7  # What counts less is not read: it is no digit of float32.
_FAR = 0.05  # The distance of profiles, a share of the wanted one's length, that is warned of.


Trace = tuple[int, epath.Path, str]
"""A stored average: the step, its folder, and its name there."""


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
    largest decay, of the largest width where there are no decays, or the parameters where there
    are no averages. Another number below 0.28 is the relative width of a power function, which is
    made of the snapshots. `step` None is the newest that is sound; of a width it may be a
    snapshot's. Leaves of `abstract_params` without a sharding go to the first device. ValueError
    for an average that is not there and for other names or shapes; FileNotFoundError if there is
    no checkpoint, Damaged if it is not sound.
    """
    return load_params_and_step(directory, abstract_params, which, step)[0]


def load_params_and_step(
    directory: str | os.PathLike[str], abstract_params: Params, which: str, step: int | None
) -> tuple[Params, int]:
    """What load_params gives, and the step that it is of."""
    root = absolute(directory)
    if step not in steps(root) and step in steps(root.parent / SNAPSHOTS):
        root = root.parent / SNAPSHOTS
    items = lambda step: items_of(root / str(step), which)
    if step is None:
        step = newest_sound(root, items)
    else:
        _check_sound(root, step, items)
    item, name = items(step)[0], name_of(root / str(step), which)
    if name.startswith(averages.POWER) and item != EMA + name:
        return _combined(root, step, name, abstract_params), step
    return load_items(root / str(step), {item: abstract_params})[item], step


def name_of(folder: epath.Path, which: str) -> str:
    """The whole name of an average that load_params takes of a step's folder: "power-0.05"."""
    return averages.canonical(which, stored(folder))


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """The whole checkpoints under `directory`, oldest first; empty if there is none."""
    root = absolute(directory)
    return sorted(ocp.path.step.checkpoint_steps(root)) if root.is_dir() else []


def absolute(directory: str | os.PathLike[str]) -> epath.Path:
    """The folder of the checkpoints as Orbax wants it."""
    if there := files.remote(directory):
        return buckets.absolute(str(there))
    return epath.Path(directory).absolute()


def newest_sound(
    directory: str | os.PathLike[str], items_of: Callable[[int], Collection[str]] | None = None
) -> int:
    """The newest checkpoint that holds what was saved; says in a line each what it passed over.

    Every process must call it alike. `items_of(step)` are the items to look at, if not all.
    FileNotFoundError if there is no checkpoint, Damaged if none is sound.
    """
    root, newest = absolute(directory), ""
    check_there(root)
    for step in reversed(steps(root)):
        found = _damage(root, step, items_of(step) if items_of else ())
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


def _check_sound(root: epath.Path, step: int, items_of: Callable[[int], Collection[str]]) -> None:
    check_there(root, step)
    if found := _damage(root, step, items_of(step)):
        raise Damaged(
            f"the checkpoint {root / str(step)} is damaged ({found}): name another of "
            f"{steps(root)}, or none for the newest that is sound"
        )


def _damage(root: epath.Path, step: int, items: Collection[str]) -> str | None:
    """What of a checkpoint is not as it was saved, in all of it or in some of its items."""
    part = jax.process_index(), jax.process_count()
    said = distributed.gather_text(checksums.damage(root / str(step), items, *part) or "")
    return next(filter(None, said), None)


def stored(root: epath.Path) -> list[str]:
    """The names of the averages in a step's folder: widths, then decays, the largest last."""
    names = [path.name.removeprefix(EMA) for path in root.glob(f"{EMA}*")]
    return sorted(names, key=averages.order)


def powers(root: epath.Path) -> list[str]:
    """Those of them that are averages by power functions."""
    return [name for name in stored(root) if name.startswith(averages.POWER)]


def items_of(root: epath.Path, which: str) -> list[str]:
    """The items that an average is read from, or made of: then all that are power functions."""
    names, name = stored(root), name_of(root, which)
    # A snapshot holds averages alone.
    whole = [item for item in ("params", packed.FILE) if (root / item).exists()]
    if whole and (which == "raw" or (which == "ema" and not names)):
        return whole[:1]
    if which == "ema" and names:
        return [EMA + names[-1]]
    if name in names:
        return [EMA + name]
    if name.startswith(averages.POWER) and (sources := powers(root)):
        return [EMA + source for source in sources]
    if (root / packed.FILE).exists():
        raise ValueError(f"no average {which!r} in {root}: it was packed with one, give no --ema")
    any_width = [f"a width below {averages.WIDEST:.2f}"] if powers(root) else []
    raise ValueError(
        f"no average {which!r} in {root}: choose one of {['raw'][: len(whole)] + names + any_width}"
    )


def traces(root: epath.Path, step: int) -> list[Trace]:
    """The power-function averages stored up to a step.

    `root` holds the checkpoints; of them only this step's counts, where there is no snapshot.
    """
    snapshots = root.parent / SNAPSHOTS
    folders = {at: snapshots / str(at) for at in steps(snapshots) if at <= step}
    folders.setdefault(step, root / str(step))
    return [(at, folder, name) for at, folder in folders.items() for name in powers(folder)]


def _combined(root: epath.Path, step: int, name: str, abstract_params: Params) -> Params:
    """The average of a width that was not kept, of the sound ones that are stored: see averages."""
    sources = []
    for at, folder, source in traces(root, step):
        if found := _damage(folder.parent, at, [EMA + source]):
            logging.warning("passing over the damaged snapshot %s (%s)", folder, found)
        else:
            sources.append((at, folder, source))
    width = averages.width_of(name)
    assert width is not None
    widths = [averages.width_of(source) or 0.0 for *_, source in sources]
    counts, distance = averages.combination([at for at, *_ in sources], widths, step, width)
    say = logging.warning if distance > _FAR else logging.info
    say(
        "%s of step %d from %d averages in %s; its profile is off by %.2g %%",
        name, step, len(sources), root.parent / SNAPSHOTS, 100 * distance,
    )  # fmt: skip
    total = add = None
    for (_, folder, source), count in zip(sources, counts.tolist(), strict=True):
        if abs(count) < _NOTHING:
            continue
        tree = load_items(folder, {EMA + source: abstract_params})[EMA + source]
        if add is None:
            where = jax.tree.map(lambda leaf: leaf.sharding, tree)
            plus = lambda total, tree, count: jax.tree.map(lambda a, b: a + count * b, total, tree)
            add = jax.jit(plus, donate_argnums=0, out_shardings=where)
            total = jax.tree.map(jnp.zeros_like, tree)
        total = add(total, tree, count)
    return total


def check_averages(root: epath.Path, wanted: list[str]) -> None:
    """ValueError unless the averages in a step's folder are those of a run."""
    if (wanted := sorted(wanted, key=averages.order)) != stored(root):
        raise ValueError(
            f"{root} keeps the averages {stored(root)}, this run {wanted}: "
            "set its EMA decays and widths to the former, or train in another workdir"
        )


def load_items(root: epath.Path, abstract: dict[str, Any]) -> dict[str, Any]:
    """The items of a step's folder named in `abstract`, placed as its leaves say."""
    check_items(root, abstract)
    placed = jax.tree.map(_placed, abstract)
    with _readable(root), ocp.StandardCheckpointer() as checkpointer:
        read = lambda name: checkpointer.restore if name != packed.FILE else packed.read
        return {name: read(name)(_place(root, name), placed[name]) for name in abstract}


def shapes(root: epath.Path, item: str) -> Any:
    """The tree of an item of a step's folder, in float32."""
    with _readable(root):
        if item == packed.FILE:
            return packed.shapes(_place(root, item))
        # The handler, not a checkpointer: the latter warns about a file that items do not have.
        saved = ocp.StandardCheckpointHandler().metadata(root / item).tree
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), saved)


def _place(root: epath.Path, item: str) -> Any:
    """Where an item is read: a file here, also of what lies in a bucket."""
    return files.local(str(root / item)) if item == packed.FILE else root / item


def check_items(root: epath.Path, abstract: dict[str, Any]) -> None:
    """ValueError unless a step's folder holds these items, in these shapes."""
    if (root / packed.FILE).exists() and packed.FILE not in abstract:
        raise ValueError(
            f"{root} was packed to be passed on, without what training goes on from: train in "
            "another workdir, and name this one as unet.weights"
        )
    for name, tree in abstract.items():
        _check_shapes(root / name, _shapes(shapes(root, name)), tree)


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
