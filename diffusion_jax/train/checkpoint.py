"""Checkpoints: saved in the background, whole or absent, restored into any sharding.

One folder a step, with one item for each thing that is read alone: `params`, one `ema_<decay>` for
each average, `optimizer` (with the step and the count of skipped ones), `data` (the position of
the data iterator, a file for each process) and `metadata` (the caller's JSON).
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from diffusion_jax.task import Params
from diffusion_jax.train.state import TrainState

_EMA = "ema_"
_DELETED = "deleted"  # What is in this folder is on its way out.


@runtime_checkable
class DataIterator(Protocol):
    """A data iterator whose position, as bytes, a checkpoint can hold."""

    def get_state(self) -> bytes:
        """The position after the last batch."""
        ...

    def set_state(self, state: bytes) -> None:
        """Goes to a position: the next batch is the one that followed it."""
        ...


class Checkpointer:
    """The checkpoints of one run under `directory`; call `close` before the process ends.

    The last `keep_last` steps are kept, and every step that is a multiple of `keep_every`
    (0: no other). A step is listed only when all of it is on the disk.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep_last: int, keep_every: int = 0
    ) -> None:
        """Makes `directory` if need be, and removes what a killed save left in it."""
        last = checkpoint_managers.LatestN(keep_last)
        every = [checkpoint_managers.EveryNSteps(keep_every)] if keep_every else []
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([last, *every]),
            cleanup_tmp_directories=True,
            # Old steps are renamed before they are deleted: a kill amid a deletion must not leave
            # a folder that looks whole.
            todelete_subdir=_DELETED,
        )
        self._directory = _absolute(directory)
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        self._clear_deleted()

    def save(
        self,
        step: int,
        state: TrainState,
        data_iterator: DataIterator,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Copies `state` off the devices and returns; a thread writes it.

        The state may be donated as soon as this returns. Waits for the save before and raises its
        error (RuntimeError). A step that is there already is left as it is. `metadata` is what
        JSON can hold.
        """
        self.wait()
        if step in steps(self._directory):
            return
        trees = {name: ocp.args.StandardSave(tree) for name, tree in _items(state).items()}
        args = ocp.args.Composite(
            **trees,
            data=_BytesSave(data_iterator.get_state()),
            metadata=ocp.args.JsonSave(dict(metadata or {})),
        )
        self._manager.save(step, args=args, force=True)

    def latest_step(self) -> int | None:
        """The last whole checkpoint, or None; not one that is still being written."""
        return max(steps(self._directory), default=None)

    def restore(
        self, abstract_state: TrainState, data_iterator: DataIterator, step: int | None = None
    ) -> TrainState:
        """The state of `step` (default: the last), and `data_iterator` set to its position.

        `abstract_state` holds a jax.ShapeDtypeStruct with a sharding for each leaf; the sharding
        need not be the one that was saved. ValueError if the parameters have other names or
        shapes; FileNotFoundError if there is no checkpoint.
        """
        self.wait()
        step = _find_step(self._directory, step)
        _check_averages(self._directory / str(step), list(abstract_state.ema))
        items = _restore(self._directory / str(step), _items(abstract_state))
        data_iterator.set_state(_BytesHandler().restore(self._directory / str(step) / "data"))
        ema = {name: items[_EMA + name] for name in abstract_state.ema}
        return TrainState(params=items["params"], ema=ema, **items["optimizer"])

    def wait(self) -> None:
        """Returns when the last save is whole; RuntimeError if it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise RuntimeError(
                f"a checkpoint under {self._directory} could not be written: {error}. The last "
                f"whole one is of step {self.latest_step()}; is the disk full?"
            ) from error
        self._clear_deleted()

    def close(self) -> None:
        """Waits for the last save, raises its error, and stops the threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _clear_deleted(self) -> None:
        deleted = self._directory / _DELETED
        if jax.process_index() == 0 and deleted.exists():
            deleted.rmtree()


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
    root = _absolute(directory)
    root = root / str(_find_step(root, step))
    item = _params_item(root, which)
    return _restore(root, {item: abstract_params})[item]


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """The whole checkpoints under `directory`, oldest first; empty if there is none."""
    root = _absolute(directory)
    return sorted(ocp.path.step.checkpoint_steps(root)) if root.is_dir() else []


class _BytesHandler(ocp.CheckpointHandler):
    """A file of bytes for each process."""

    def save(self, directory: epath.Path, args: "_BytesSave") -> None:
        _mine(directory).write_bytes(args.item)

    def restore(self, directory: epath.Path, args: None = None) -> bytes:
        """This process's bytes; with another number of processes, the bytes if all agree."""
        if _mine(directory).exists():
            return _mine(directory).read_bytes()
        files = list(directory.glob("process_*"))
        states = {file.read_bytes() for file in files}
        if len(states) == 1:
            return states.pop()
        raise ValueError(
            f"{directory} holds the data positions of {len(files)} processes and they differ, but "
            f"this run has {jax.process_count()}: start as many processes as there were"
        )


@ocp.args.register_with_handler(_BytesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _BytesSave(ocp.args.CheckpointArgs):
    item: bytes


def _mine(directory: epath.Path) -> epath.Path:
    return directory / f"process_{jax.process_index()}-of-{jax.process_count()}"


def _absolute(directory: str | os.PathLike[str]) -> epath.Path:
    return epath.Path(directory).absolute()


def _items(state: TrainState) -> dict[str, Any]:
    """The trees of a checkpoint, by the names of their items."""
    averages = {_EMA + name: tree for name, tree in state.ema.items()}
    rest = {"step": state.step, "opt_state": state.opt_state, "skipped": state.skipped}
    return {"params": state.params, **averages, "optimizer": rest}


def _find_step(root: epath.Path, step: int | None) -> int:
    """`step` if it is there, else an error; None means the last."""
    there = steps(root)
    if not there:
        raise FileNotFoundError(
            f"no whole checkpoint in {root}: train with this workdir first, or name another"
        )
    if step is not None and step not in there:
        raise FileNotFoundError(f"no checkpoint of step {step} in {root}: there are {there}")
    return there[-1] if step is None else step


def _averages(root: epath.Path) -> list[str]:
    """The names of the averages in a step's folder, the largest decay last."""
    names = [path.name.removeprefix(_EMA) for path in root.glob(f"{_EMA}*")]
    return sorted(names, key=float)


def _params_item(root: epath.Path, which: str) -> str:
    averages = _averages(root)
    if which == "raw":
        return "params"
    if which == "ema" and averages:
        return _EMA + averages[-1]
    if which in averages:
        return _EMA + which
    raise ValueError(f"no average {which!r} in {root}: choose one of {['raw', *averages]}")


def _check_averages(root: epath.Path, wanted: list[str]) -> None:
    if sorted(wanted, key=float) != _averages(root):
        raise ValueError(
            f"{root} keeps the averages {_averages(root)}, this run {sorted(wanted, key=float)}: "
            "set its EMA decays to the former, or train in another workdir"
        )


def _restore(root: epath.Path, abstract: dict[str, Any]) -> dict[str, Any]:
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
    wanted = _shapes(abstract)
    differ = [name for name in saved | wanted if saved.get(name) != wanted.get(name)]
    if differ:
        lines = [
            f"  {name}: saved {saved.get(name, 'nothing')}, expected {wanted.get(name, 'nothing')}"
            for name in differ[:5]
        ]
        raise ValueError(
            f"{item} is of another architecture; {len(differ)} of {len(saved | wanted)} arrays "
            "differ, first:\n" + "\n".join(lines) + "\nUse the config that the checkpoint was "
            "trained with, or another workdir"
        )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    named = jax.tree.leaves_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path): tuple(leaf.shape) for path, leaf in named}


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """With a sharding of its own, or on the first device."""
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
