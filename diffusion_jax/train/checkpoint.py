"""Save the checkpoints of a training run in the background, and restore them into any sharding.

Each saved step has a folder. The folder holds one item for each part that can be read alone:
`params`, an `ema_<name>` for each average, `optimizer` (with the step and the count of skipped
steps), `data` (the position of the data iterator, one file per process) and `metadata` (JSON values
from the caller). The folder also holds checksums of all files, which are written before the folder
gets its final name. After each save, the files are read back and compared with the checksums. A run
continues from the newest checkpoint whose files match their checksums. Snapshots are folders of the
same format that hold only the power-function averages.
"""

import contextlib
import dataclasses
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from diffusion_jax import files
from diffusion_jax.config.settings import SNAPSHOT_DTYPE
from diffusion_jax.files import checksums
from diffusion_jax.task import Params
from diffusion_jax.train.save_limit import SaveLimit, advice
from diffusion_jax.train.state import TrainState
from diffusion_jax.weights import power_averages, restore

_DELETED = "deleted"  # The folder of checkpoints that are being deleted.
_DAMAGED = "damaged"  # The folder of checkpoints that failed their checksums.


@runtime_checkable
class DataIterator(Protocol):
    """An iterator over batches. It can save its position as bytes and return to it."""

    def get_state(self) -> bytes:
        """Return the position after the last batch that was read."""
        ...

    def set_state(self, state: bytes) -> None:
        """Return to a saved position, so that the batch after it is read next."""
        ...


class NotSaved(RuntimeError):
    """Error raised if a checkpoint cannot be written or read back."""


class Checkpointer:
    """Saves and restores the checkpoints of one run. Call `close` before the process ends.

    The checkpoints are in the folder `directory`. A run keeps the newest `keep_last` checkpoints
    (None: all) and every checkpoint whose step is a multiple of `keep_every` (0: no others). A
    checkpoint counts as saved when all its files are on the disk.
    """

    def __init__(self, directory: str | os.PathLike[str], keep_last: int | None, keep_every: int = 0) -> None:
        """Create `directory` if it does not exist, and remove incomplete saves.

        Damaged checkpoints that are newer than the newest undamaged one are moved into the
        subfolder `damaged`, because training will save their steps again. Raises restore.Damaged
        if every checkpoint is damaged.
        """
        last = checkpoint_managers.LatestN(keep_last)
        every = [checkpoint_managers.EveryNSteps(keep_every)] if keep_every else []
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([last, *every]),
            # Old steps are renamed before they are deleted, so that a kill during a deletion does
            # not leave a folder that looks complete.
            todelete_subdir=_DELETED,
            # Despite its name, Orbax calls this in process 0 before the folder gets its final name.
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
            # With this prefix, checkpoints and snapshots use different barriers.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                barrier_sync_key_prefix=pathlib.Path(directory).name
            ),
        )
        self._directory = restore.absolute(directory)
        self._checking: futures.Future[None] | None = None
        self._hurried = threading.Event()
        self._saving: int | None = None
        self._snapshots: Snapshots | None = None
        self._checker = futures.ThreadPoolExecutor(1, "checksums")
        self._clear_unfinished()
        self._set_damaged_aside()
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        self._clear_deleted()
        self._last = self.latest_step()  # For error messages: listing the folder takes memory.
        self._limit = SaveLimit()

    def save(
        self,
        step: int,
        state: TrainState,
        data_iterator: DataIterator,
        metadata: Mapping[str, Any] | None = None,
        read_back: bool = True,
    ) -> None:
        """Copy `state` to the host and return. A thread writes it to disk.

        The state may be donated as soon as this method returns. The method first waits for the
        previous save. If the step is saved already, nothing is written.

        Args:
            step: The step of the state.
            state: The state to save.
            data_iterator: The iterator whose position is saved.
            metadata: Values that JSON can hold.
            read_back: Whether to compare the written files with their checksums. If False, the
                comparison of a previous save also stops, so that the process can end sooner. The
                next start then compares the files.

        Raises NotSaved if the previous save failed, or if this one cannot start.
        """
        data = _BytesSave(data_iterator.get_state())
        others = {"data": data, "metadata": ocp.args.JsonSave(dict(metadata or {}))}
        self.save_trees(step, _items(state), others, read_back=read_back)

    def save_trees(
        self,
        step: int,
        trees: Mapping[str, Params],
        others: Mapping[str, ocp.args.CheckpointArgs] = MappingProxyType({}),
        *,
        read_back: bool = True,
    ) -> None:
        """Save a checkpoint of `step` with the items in `trees` and `others`, keyed by item name.

        The method waits, returns and raises as `save` does. `save` explains `read_back`.
        """
        if not read_back:
            self._hurried.set()
        self.wait()
        with self._explained():
            if step in restore.steps(self._directory):
                return
            items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
            self._saving = step
            size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(dict(trees)))
            name = f"the checkpoint of step {step} under {self._directory}"
            self._limit.start(size // jax.process_count(), name, self._last_whole())
            args = ocp.args.Composite(**items, **others)
            listed = {restore.LISTED: True}
            self._manager.save(step, args=args, force=True, custom_metadata=listed)
            self._checking = self._checker.submit(self._finish, step)

    def snapshots(self) -> "Snapshots":
        """Open the run's snapshots, whose folder is next to that of its checkpoints. Return them.

        The method `close` also closes these snapshots.
        """
        folder = self._directory.parent / restore.SNAPSHOTS
        self._snapshots = Snapshots(folder, self.latest_step() or 0)
        return self._snapshots

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None if there is none.

        A checkpoint that is still being written does not count. Neither do damaged checkpoints
        that were found when this object was created, because they were set aside then.
        """
        return max(restore.steps(self._directory), default=None)

    def restore(self, abstract_state: TrainState, data_iterator: DataIterator, step: int | None = None) -> TrainState:
        """Wait for the last save, and return the saved state of `step` as `restore_state` does.

        Raises NotSaved if the last save failed.
        """
        self.wait()
        return restore_state(self._directory, abstract_state, data_iterator, step)

    def wait(self) -> None:
        """Wait until the last save is complete. Raises NotSaved if it failed."""
        checking, self._checking = self._checking, None
        with self._explained():
            self._manager.wait_until_finished()
            if checking:
                checking.result()
            self._clear_deleted()

    def close(self) -> None:
        """Wait for the last save and stop the threads. Raises NotSaved if the save failed."""
        try:
            self.wait()
        finally:
            if self._snapshots:
                self._snapshots.close()
            self._checker.shutdown()
            with self._explained():  # Closing may write too, and fail on a full disk.
                self._manager.close()
            self._limit.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._limit.stop()
            reason = f"{error}".partition("\n")[0]
            raise NotSaved(
                f"a checkpoint under {self._directory} could not be written: {reason[:400]} "
                f"({advice(reason)}). {self._last_whole()}"
            ) from error

    def _last_whole(self) -> str:
        step, none = self._last, "There is no complete checkpoint."
        return none if step is None else f"The newest complete checkpoint is from step {step}."

    def _write_checksums(self) -> None:
        folders = self._directory.glob(f"{self._saving}.orbax-checkpoint-tmp*")
        # In a bucket, an unfinished checkpoint has its final name.
        for folder in list(folders) or [self._directory / str(self._saving)]:
            checksums.write(folder)

    def _finish(self, step: int) -> None:
        self._manager.wait_until_finished()  # `wait` reports an error of this save.
        self._limit.stop()
        if step in restore.steps(self._directory):
            self._last = step
            part = self._directory / str(step), jax.process_index(), jax.process_count()
            checksums.read_back(*part, unless=self._hurried.is_set)

    def _clear_unfinished(self) -> None:
        # Orbax's manager would do this in a thread, while other processes already list the folder.
        if jax.process_index() == 0 and self._directory.exists():
            # Use another thread, because in notebooks this one already runs an event loop.
            found = self._checker.submit(ocp.path.step.all_temporary_paths, self._directory)
            for unfinished in found.result():
                unfinished.get().rmtree()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("unfinished checkpoints")

    def _set_damaged_aside(self) -> None:
        steps = restore.steps(self._directory)
        if not steps:
            return
        newest = restore.newest_sound(self._directory)
        damaged = [step for step in steps if step > newest]
        if jax.process_index() == 0:
            for aside in _set_aside(self._directory, damaged, _DAMAGED):
                logging.warning("moved a checkpoint to %s; continuing from step %d", aside, newest)
        if damaged and jax.process_count() > 1:  # Before any manager lists the folder.
            multihost_utils.sync_global_devices("damaged checkpoints")

    def _clear_deleted(self) -> None:
        deleted = self._directory / _DELETED
        if jax.process_index() == 0 and deleted.exists():
            deleted.rmtree()


def _set_aside(directory: epath.Path, steps: list[int], name: str) -> list[epath.Path]:
    """Move the folders of these steps into the folder directory/name. Return their new paths."""
    places = [directory / name / str(step) for step in steps]
    for place in places:
        if name == _DELETED and files.store_path(directory):  # A move would copy every file.
            _delete(directory / place.name)
            continue
        place.parent.mkdir(exist_ok=True)
        if place.exists():
            place.rmtree()
        if remote := files.store_path(directory / place.name):
            # Without this file Orbax takes the folder for an unfinished save, and deletes it.
            (place.parent / checksums.COMMIT).write_text("")
            remote.copy_to(files.path(place))
            _delete(directory / place.name)
        else:
            (directory / place.name).rename(place)
    return places


def _delete(folder: epath.Path) -> None:
    """Delete a checkpoint in a bucket.

    The commit file is deleted first. If the process is killed midway, the remaining files do not
    count as a checkpoint.
    """
    (folder / checksums.COMMIT).unlink(missing_ok=True)
    folder.rmtree()


class Snapshots:
    """Snapshots of a run's power-function averages, one folder per step. All are kept.

    Training waits until a snapshot is complete. So when a run continues from a checkpoint, all
    snapshots of earlier steps exist. Snapshots of later steps are deleted and written again.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int) -> None:
        """Open the snapshots of a run that continues from `step`. Delete those of later steps."""
        cast = lambda x: x.astype(SNAPSHOT_DTYPE) if jnp.issubdtype(x.dtype, jnp.floating) else x
        self._cast = jax.jit(lambda tree: jax.tree.map(cast, tree))
        folder = restore.absolute(directory)
        if jax.process_index() == 0:
            _set_aside(folder, [later for later in restore.steps(folder) if later > step], _DELETED)
        if jax.process_count() > 1:  # Before any process lists the folder.
            multihost_utils.sync_global_devices("later snapshots")
        self._files = Checkpointer(directory, keep_last=None)

    def save(self, step: int, state: TrainState) -> None:
        """Write the power-function averages of a state. Raises NotSaved if this fails."""
        self._files.save_trees(step, self._cast(powers(state)))
        self._files.wait()

    def close(self) -> None:
        self._files.close()


def restore_state(
    directory: str | os.PathLike[str], abstract_state: TrainState, data_iterator: DataIterator, step: int | None = None
) -> TrainState:
    """Return the saved state of `step`, and move `data_iterator` to the saved position.

    If `step` is None, the newest checkpoint is read. `abstract_state` holds a jax.ShapeDtypeStruct
    with a sharding for each leaf. The saved state may have had other shardings. Nothing is written.
    Raises ValueError if the saved arrays differ in names or shapes from `abstract_state`, and
    FileNotFoundError if there is no such checkpoint.
    """
    root = restore.absolute(directory)
    restore.check_exists(root, step)
    folder = root / str(max(restore.steps(root)) if step is None else step)
    restore.check_averages(folder, list(abstract_state.ema))
    items = restore.load_items(folder, _items(abstract_state))
    data_iterator.set_state(position(folder))
    ema = {name: items[restore.EMA + name] for name in abstract_state.ema}
    return TrainState(params=items["params"], ema=ema, **items["optimizer"])


def restore_changed(folder: epath.Path, abstract_state: TrainState) -> TrainState:
    """Return the state in the folder of a step, for a run with other averages.

    Averages that are not stored start at the parameters. Arrays may be stored in another dtype.
    Otherwise, this function takes the arguments of `restore_state`, and raises the same errors.
    """
    stored = set(restore.stored(folder)) & abstract_state.ema.keys()
    ema = {name: abstract_state.ema[name] for name in stored}
    items = restore.load_items(folder, _items(abstract_state._replace(ema=ema)))
    params, names = items["params"], {name: restore.EMA + name for name in abstract_state.ema}
    copy = lambda: jax.tree.map(jnp.copy, params)
    ema = {name: items[item] if item in items else copy() for name, item in names.items()}
    return TrainState(params=params, ema=ema, **items["optimizer"])


def check_changed(folder: epath.Path, abstract_state: TrainState) -> None:
    """Raise ValueError if `restore_changed` cannot read the folder of a step."""
    restore.check_items(folder, _items(abstract_state._replace(ema={})))


def position(folder: epath.Path) -> bytes:
    """Return the data position in the folder of a step, for `DataIterator.set_state`."""
    return _BytesHandler().restore(folder / "data")


def powers(state: TrainState) -> dict[str, Params]:
    """Return the power-function averages of a state, keyed by item name."""
    names = [name for name in state.ema if name.startswith(power_averages.POWER)]
    return {restore.EMA + name: state.ema[name] for name in names}


def check(directory: str | os.PathLike[str], step: int, state: TrainState) -> None:
    """Raise ValueError if the checkpoint of `step` and `state` differ in array names or shapes."""
    root = restore.absolute(directory) / str(step)
    restore.check_averages(root, list(state.ema))
    restore.check_items(root, _items(state))


class _BytesHandler(ocp.CheckpointHandler):
    """An Orbax handler for items of bytes. Each process reads and writes its own file."""

    def save(self, directory: epath.Path, args: "_BytesSave") -> None:
        _own_file(directory).write_bytes(args.item)

    def restore(self, directory: epath.Path, args: None = None) -> bytes:
        """Return the bytes that this process saved.

        If the number of processes changed, all saved files must have the same content, which is
        returned. Raises ValueError if they differ.
        """
        if _own_file(directory).exists():
            return _own_file(directory).read_bytes()
        files = list(directory.glob("process_*"))
        states = {file.read_bytes() for file in files}
        if len(states) == 1:
            return states.pop()
        raise ValueError(
            f"{directory} holds the data positions of {len(files)} processes, which differ, but "
            f"the number of processes is now {jax.process_count()}: start {len(files)} processes"
        )


@ocp.args.register_with_handler(_BytesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _BytesSave(ocp.args.CheckpointArgs):
    item: bytes


def _own_file(directory: epath.Path) -> epath.Path:
    return directory / f"process_{jax.process_index()}-of-{jax.process_count()}"


def _items(state: TrainState) -> dict[str, Any]:
    """Return the arrays that a checkpoint stores: a tree for each item, keyed by item name."""
    averages = {restore.EMA + name: tree for name, tree in state.ema.items()}
    optimizer = {"step": state.step, "opt_state": state.opt_state, "skipped": state.skipped}
    return {"params": state.params, **averages, "optimizer": optimizer}
