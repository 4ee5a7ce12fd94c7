"""Read the checkpoints of a run: list them, and load parameters without the optimizer.

A folder next to the checkpoints holds snapshots of power-function averages, in the same layout. In
a packed workdir, a checkpoint is a .safetensors file of weights (packed.py) instead of the folders
that Orbax writes.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jaxtyping import Float

from diffusion_jax import files
from diffusion_jax.devices import distributed
from diffusion_jax.files import checksums, manifest
from diffusion_jax.task import Params
from diffusion_jax.weights import buckets, packed, power_averages, torch_weights

EMA = "ema_"
"""The prefix in the names of checkpoint items that hold averages.

The decay ("0.9999") or the power-function name ("power-0.05") follows the prefix.
"""
LISTED = "has_checksums"
"""A key in the metadata of checkpoints that were saved with a list of checksums."""
SNAPSHOTS = "snapshots"
"""The folder of snapshots of power-function averages, next to the folder of checkpoints."""
_NOTHING = 1e-7  # A smaller coefficient is below float32's precision, so its average is skipped.
_FAR = 0.05  # A larger relative error of an average's profile causes a warning.


StoredAverage = tuple[int, epath.Path, str]
"""A stored average: its step, the folder of that step, and its name in the folder."""


class Damaged(ValueError):
    """Error for a checkpoint whose files are damaged."""


def load_params(
    directory: str | os.PathLike[str], abstract_params: Params, average: str = "ema", step: int | None = None
) -> Params:
    """Load parameters from a checkpoint, without the optimizer.

    Args:
        directory: The folder of the checkpoints.
        abstract_params: A tree of shapes, types and shardings. Leaves without a sharding are placed
            on the first device.
        average: "raw" loads the raw parameters. The name of an average, such as "0.9999", loads
            that average. "ema" loads the EMA with the largest decay; without EMAs, it loads the
            power-function average with the largest width, or else the raw parameters. Any other
            number above 0 and up to 0.28 is the relative width of a power-function average, which
            is computed from the snapshots.
        step: The step of the checkpoint. For power-function averages it may also be the step of a
            snapshot. None loads the newest undamaged checkpoint.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        Damaged: The checkpoint is damaged.
        ValueError: There is no such average, or the names or shapes of its arrays differ from
            those in `abstract_params`.
    """
    return load_params_and_step(directory, abstract_params, average, step)[0]


def load_params_and_step(
    directory: str | os.PathLike[str], abstract_params: Params, average: str, step: int | None
) -> tuple[Params, int]:
    """Load parameters without the optimizer, and return (parameters, step of the checkpoint).

    Takes the arguments of `load_params`, and raises the same errors.
    """
    root = absolute(directory)
    if step not in steps(root) and step in steps(root.parent / SNAPSHOTS):
        root = root.parent / SNAPSHOTS
    items = lambda step: items_of(root / str(step), average)
    if step is None:
        step = newest_sound(root, items)
    else:
        check_exists(root, step)
        if damage := _damage(root, step, items(step)):
            raise Damaged(
                f"the checkpoint {root / str(step)} is damaged ({damage}): choose another of "
                f"{steps(root)}, or name no step, to load the newest undamaged one"
            )
    item, name = items(step)[0], name_of(root / str(step), average)
    if name.startswith(power_averages.POWER) and item != EMA + name:
        return _combined(root, step, name, abstract_params), step
    return load_items(root / str(step), {item: abstract_params})[item], step


def name_of(folder: epath.Path, average: str) -> str:
    """Return the full name of an average: "power-0.05" for the relative width "0.05".

    If `folder`, the folder of a step, holds an average with the name `average`, this name is
    returned unchanged.
    """
    return power_averages.canonical(average, stored(folder))


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the complete checkpoints under `directory`, oldest first."""
    root = absolute(directory)
    return sorted(ocp.path.step.checkpoint_steps(root)) if root.is_dir() else []


def absolute(directory: str | os.PathLike[str]) -> epath.Path:
    """Return a folder of checkpoints as an absolute path for Orbax."""
    if remote_path := files.store_path(directory):
        return buckets.absolute(str(remote_path))
    return epath.Path(directory).absolute()


def newest_sound(
    directory: str | os.PathLike[str],
    items_of: Callable[[int], Collection[str]] | None = None,
    until: int | None = None,
) -> int:
    """Return the step of the newest undamaged checkpoint, and log a warning for each damaged one.

    All processes must call this function with the same arguments.

    Args:
        directory: The folder of the checkpoints.
        items_of: items_of(step) returns the items to check. None checks all items.
        until: The last step to consider. None considers all steps.

    Raises:
        FileNotFoundError: There is no checkpoint.
        Damaged: All checkpoints are damaged.
    """
    root, newest = absolute(directory), ""
    check_exists(root)
    for step in reversed([step for step in steps(root) if until is None or step <= until]):
        damage = _damage(root, step, items_of(step) if items_of else ())
        if damage is None:
            return step
        logging.warning("skipping the damaged checkpoint %s (%s)", root / str(step), damage)
        newest = newest or f"step {step}: {damage}"
    raise Damaged(
        f"all checkpoints in {root} are damaged ({newest}): restore a copy, or move the folder "
        "away to start from scratch"
    )


def check_exists(root: epath.Path, step: int | None = None) -> None:
    """Raise FileNotFoundError if there is no checkpoint, or none at `step` if `step` is set."""
    available = steps(root)
    if not available:
        raise FileNotFoundError(f"no complete checkpoint in {root}: train with this workdir, or choose another workdir")
    if step is not None and step not in available:
        raise FileNotFoundError(f"no checkpoint of step {step} in {root}: choose from {available}")


def _damage(root: epath.Path, step: int, items: Collection[str]) -> str | None:
    """Return a message about the first damaged item of a checkpoint, or None for no damage.

    If `items` is empty, all items are checked.
    """
    part = jax.process_index(), jax.process_count()
    message = _without_list(root, step) or checksums.damage(root / str(step), items, *part)
    return next(filter(None, distributed.gather_text(message or "")), None)


def _without_list(root: epath.Path, step: int) -> str | None:
    """Return a message if a checkpoint has lost its list of checksums, or else None.

    Earlier versions wrote no lists, so the first checkpoints of an old run may have none. A
    checkpoint without a list has lost it if an older checkpoint has a list. It has also lost it if
    its metadata mentions checksums and any other checkpoint has a list.
    """
    listed = [other for other in steps(root) if checksums.exist(root / str(other))]
    if step in listed:
        return None
    metadata = root / str(step) / checksums.METADATA
    mentioned = listed and metadata.exists() and LISTED.encode() in metadata.read_bytes()
    if mentioned or any(other < step for other in listed):
        return f"{checksums.FOLDER}: missing, although other checkpoints of the run have one"
    _warn_without_list(root)
    return None


@functools.cache
def _warn_without_list(root: epath.Path) -> None:
    logging.warning("checkpoints in %s have no checksums: damage to them goes unnoticed", root)


def stored(root: epath.Path) -> list[str]:
    """Return the sorted names of the averages in a step's folder: power functions, then EMAs."""
    # epath's glob would take "[1]" in the path of the folder for a pattern.
    inside = [path.name for path in root.iterdir()] if root.exists() else []
    names = [name.removeprefix(EMA) for name in inside if name.startswith(EMA)]
    return sorted(names, key=power_averages.order)


def powers(root: epath.Path) -> list[str]:
    """Return the names of the power-function averages in a step's folder."""
    return [name for name in stored(root) if name.startswith(power_averages.POWER)]


def items_of(root: epath.Path, average: str) -> list[str]:
    """Return the names of the checkpoint items to read for an average.

    Usually, one item holds the average. A power-function average that was not stored is computed
    from all stored ones, so the items of all stored ones are returned.

    Raises:
        ValueError: The step's folder has no such average.
    """
    names, name = stored(root), name_of(root, average)
    # A snapshot has averages only, no raw parameters.
    raw = [item for item in ("params", packed.FILE) if (root / item).exists()]
    if raw and (average == "raw" or (average == "ema" and not names)):
        return raw[:1]
    if average == "ema" and names:
        return [EMA + names[-1]]
    if name in names:
        return [EMA + name]
    if name.startswith(power_averages.POWER) and (sources := powers(root)):
        return [EMA + source for source in sources]
    if (root / packed.FILE).exists():
        raise ValueError(
            f"no average {average!r} in {root}: it was packed with one set of weights only, so remove --ema"
        )
    any_width = [f"a width up to {power_averages.WIDEST}"] if powers(root) else []
    raise ValueError(f"no average {average!r} in {root}: choose one of {['raw'][: len(raw)] + names + any_width}")


def traces(root: epath.Path, step: int) -> list[StoredAverage]:
    """Return a StoredAverage for each power-function average that was stored up to `step`.

    These are the averages in snapshots. If `step` has no snapshot, the averages in the checkpoint
    of this step are added.

    Args:
        root: The folder of the checkpoints.
        step: The last step.
    """
    snapshots = root.parent / SNAPSHOTS
    folders = {saved: snapshots / str(saved) for saved in steps(snapshots) if saved <= step}
    folders.setdefault(step, root / str(step))
    return [(saved, folder, name) for saved, folder in folders.items() for name in powers(folder)]


def combination(
    root: epath.Path, sources: Sequence[StoredAverage], step: int, width: float
) -> tuple[Float[np.ndarray, "N"], float]:
    """Return coefficients that combine `sources` into an average at `step`, and its relative error.

    `root` is the folder of the checkpoints, and `width` the relative width of the result.
    """
    start = manifest.read_averages_from(root.parent)
    widths_from = manifest.read_widths_from(root.parent)
    widths = [power_averages.width_of(name) or 0.0 for *_, name in sources]
    begun = [max(0, widths_from.get(w, 0) - start) for w in widths]
    steps = [saved - start for saved, *_ in sources]
    return power_averages.combination(steps, widths, step - start, width, begun)


def _combined(root: epath.Path, step: int, name: str, abstract_params: Params) -> Params:
    sources = []
    for saved_step, folder, source in traces(root, step):
        if damage := _damage(folder.parent, saved_step, [EMA + source]):
            logging.warning("skipping the damaged snapshot %s (%s)", folder, damage)
        else:
            sources.append((saved_step, folder, source))
    width = power_averages.width_of(name)
    assert width is not None
    coefficients, error = combination(root, sources, step, width)
    log = logging.warning if error > _FAR else logging.info
    log(
        "computed %s of step %d from %d averages in %s: its profile has an error of %.2g %%",
        name,
        step,
        len(sources),
        root.parent / SNAPSHOTS,
        100 * error,
    )
    total = add = None
    for (_, folder, source), coefficient in zip(sources, coefficients.tolist(), strict=True):
        if abs(coefficient) < _NOTHING:
            continue
        tree = load_items(folder, {EMA + source: abstract_params})[EMA + source]
        if add is None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, tree)
            plus = lambda total, tree, count: jax.tree.map(lambda a, b: a + count * b, total, tree)
            add = jax.jit(plus, donate_argnums=0, out_shardings=shardings)
            total = jax.tree.map(jnp.zeros_like, tree)
        total = add(total, tree, coefficient)
    return total


def check_averages(root: epath.Path, expected: list[str]) -> None:
    """Raise ValueError unless a step's folder holds exactly the averages named in `expected`."""
    if (expected := sorted(expected, key=power_averages.order)) != stored(root):
        raise ValueError(
            f"{root} holds the averages {stored(root)}, but this run has {expected}: set "
            "optimizer.ema_decays and optimizer.ema_widths to the stored values, or train in "
            "another workdir"
        )


def load_items(root: epath.Path, abstract: dict[str, Any]) -> dict[str, Any]:
    """Load items of a checkpoint, such as parameters or averages, from a step's folder.

    `abstract` maps the name of each item to a tree of shapes, types and shardings.

    Raises:
        Damaged: An item cannot be read.
        ValueError: The array names or shapes of an item differ from `abstract`, or the checkpoint
            was packed without the optimizer.
    """
    check_items(root, abstract)
    placed = jax.tree.map(_placed, abstract)
    with _readable(root), ocp.StandardCheckpointer() as checkpointer:
        read = lambda name: checkpointer.restore if name != packed.FILE else packed.read
        return {name: read(name)(_item_path(root, name), placed[name]) for name in abstract}


def shapes(root: epath.Path, item: str) -> Any:
    """Return the shapes of a checkpoint's item as a tree of float32 jax.ShapeDtypeStructs."""
    with _readable(root):
        if item == packed.FILE:
            return packed.shapes(_item_path(root, item))
        # A checkpointer would warn about a missing file, so this uses the handler.
        saved = ocp.StandardCheckpointHandler().metadata(root / item).tree
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), saved)


def _item_path(root: epath.Path, item: str) -> Any:
    """Return the path of an item. A packed file in a bucket is copied to this machine first."""
    return files.local(str(root / item)) if item == packed.FILE else root / item


def check_items(root: epath.Path, abstract: dict[str, Any]) -> None:
    """Raise ValueError if a step's folder does not hold all items of `abstract`.

    `abstract` maps the name of each item to a tree of shapes. The arrays of the item in the folder
    must have the same names and shapes.
    """
    if (root / packed.FILE).exists() and packed.FILE not in abstract:
        raise ValueError(
            f"{root} was packed without the optimizer, so training cannot continue from it: train "
            "in a new workdir, with unet.weights set to the packed workdir"
        )
    for name, tree in abstract.items():
        _check_shapes(root / name, _shapes(shapes(root, name)), tree)


@contextlib.contextmanager
def _readable(root: epath.Path) -> Iterator[None]:
    """Convert read errors of TensorStore and Orbax into Damaged with a one-line message."""
    try:
        yield
    except (ValueError, OSError, KeyError) as error:
        first = f"{error}".strip().partition("\n")[0][:200]
        raise Damaged(
            f"the checkpoint {root} cannot be read ({type(error).__name__}: {first}): move this "
            "folder elsewhere to continue from the previous checkpoint"
        ) from error


def _check_shapes(item: epath.Path, saved: dict[str, tuple[int, ...]], abstract: Any) -> None:
    """Raise ValueError if the shapes `saved`, keyed by array name, differ from those in `abstract`.

    The message lists the first differences. It names `item`, the path of the saved arrays.
    """
    expected = _shapes(abstract)
    differ = [name for name in saved | expected if saved.get(name) != expected.get(name)]
    if differ:
        lines = [
            f"{name} ({expected.get(name, 'nothing')}, but {saved.get(name, 'nothing')} is saved)"
            for name in differ[:3]
        ]
        raise ValueError(
            f"{item} has another architecture; {len(differ)} of {len(saved | expected)} arrays "
            f"differ, such as {', '.join(lines)}: use the config that it was trained with, or "
            "another workdir"
        )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in torch_weights.named(tree).items()}


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
