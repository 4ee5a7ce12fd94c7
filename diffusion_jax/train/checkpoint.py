"""Checkpoints: saved in the background, whole or absent, restored into any sharding.

One folder a step, with one item for each thing that is read alone: `params`, one `ema_<decay>` for
each average, `optimizer` (with the step and the count of skipped ones), `data` (the position of
the data iterator, a file for each process) and `metadata` (the caller's JSON). Beside them lie the
checksums of all files, with which each save is read back, and each start finds the newest that is
sound. Snapshots are folders of the same kind that hold the averages by power functions alone.
"""

import asyncio
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
from orbax.checkpoint._src.path import temporary_paths

from diffusion_jax.config.settings import Optimizer
from diffusion_jax.machine import checksums, files
from diffusion_jax.task import Params
from diffusion_jax.train.state import TrainState
from diffusion_jax.weights import averages, restore

_DELETED = "deleted"  # What is in this folder is on its way out.
COMMIT = "commit_success.txt"
"""The file that Orbax writes last in a bucket, where no folder can be renamed."""
_DAMAGED = "damaged"  # And here lies what a start passed over.


@runtime_checkable
class DataIterator(Protocol):
    """A data iterator whose position, as bytes, a checkpoint can hold."""

    def get_state(self) -> bytes:
        """The position after the last batch."""
        ...

    def set_state(self, state: bytes) -> None:
        """Goes to a position: the next batch is the one that followed it."""
        ...


class NotSaved(RuntimeError):
    """A checkpoint could not be written, or read back."""


class Checkpointer:
    """The checkpoints of one run under `directory`; call `close` before the process ends.

    The last `keep_last` steps are kept (None: all), and every step that is a multiple of
    `keep_every` (0: no other). A step is listed only when all of it is on the disk.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep_last: int | None, keep_every: int = 0
    ) -> None:
        """Makes `directory` if need be, and removes what a killed save left in it.

        Damaged checkpoints that are newer than the newest sound one are moved into the folder
        `damaged`: their steps will be trained and saved again. restore.Damaged if none is sound.
        """
        last = checkpoint_managers.LatestN(keep_last)
        every = [checkpoint_managers.EveryNSteps(keep_every)] if keep_every else []
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([last, *every]),
            # Old steps are renamed before they are deleted: a kill amid a deletion must not leave
            # a folder that looks whole.
            todelete_subdir=_DELETED,
            # Processes wait for each other at places that are called so.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                barrier_sync_key_prefix=pathlib.Path(directory).name
            ),
        )
        self._directory = restore.absolute(directory)
        self._checking: futures.Future[None] | None = None
        self._hurried = threading.Event()
        self._snapshots: Snapshots | None = None
        self._checker = futures.ThreadPoolExecutor(1, "checksums")
        self._clear_unfinished()
        self._set_damaged_aside()
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        self._clear_deleted()

    def save(
        self,
        step: int,
        state: TrainState,
        data_iterator: DataIterator,
        metadata: Mapping[str, Any] | None = None,
        read_back: bool = True,
    ) -> None:
        """Copies `state` off the devices and returns; a thread writes it.

        The state may be donated as soon as this returns. Waits for the save before and raises its
        error (NotSaved). A step that is there already is left as it is. `metadata` is what
        JSON can hold. Without `read_back`, of the save before too, the process may end sooner: the
        checksums are written, and the next start compares.
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
        """The same of any trees, each of which becomes an item, and of other items."""
        if not read_back:
            self._hurried.set()
        self.wait()
        if step in restore.steps(self._directory):
            return
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        with self._explained():
            self._manager.save(step, args=ocp.args.Composite(**items, **others), force=True)
        self._checking = self._checker.submit(self._finish, step)

    def snapshots(self, settings: Optimizer) -> "Snapshots":
        """Those of this run, beside its checkpoints; they are closed with these."""
        folder = self._directory.parent / restore.SNAPSHOTS
        self._snapshots = Snapshots(folder, settings.snapshot_dtype, self.latest_step() or 0)
        return self._snapshots

    def latest_step(self) -> int | None:
        """The last whole checkpoint, or None; not one that is still being written.

        When the run starts it is the newest sound one.
        """
        return max(restore.steps(self._directory), default=None)

    def restore(
        self, abstract_state: TrainState, data_iterator: DataIterator, step: int | None = None
    ) -> TrainState:
        """The state of `step` (default: the last), and `data_iterator` set to its position.

        `abstract_state` holds a jax.ShapeDtypeStruct with a sharding for each leaf; the sharding
        need not be the one that was saved. ValueError if the parameters have other names or
        shapes; FileNotFoundError if there is no checkpoint.
        """
        self.wait()
        restore.check_exists(self._directory, step)
        step = self.latest_step() if step is None else step
        restore.check_averages(self._directory / str(step), list(abstract_state.ema))
        items = restore.load_items(self._directory / str(step), _items(abstract_state))
        data_iterator.set_state(_BytesHandler().restore(self._directory / str(step) / "data"))
        ema = {name: items[restore.EMA + name] for name in abstract_state.ema}
        return TrainState(params=items["params"], ema=ema, **items["optimizer"])

    def wait(self) -> None:
        """Returns when the last save is whole; NotSaved if it failed."""
        checking, self._checking = self._checking, None
        with self._explained():
            self._manager.wait_until_finished()
            if checking:
                checking.result()
        self._clear_deleted()

    def close(self) -> None:
        """Waits for the last save, raises its error, and stops the threads."""
        try:
            self.wait()
        finally:
            if self._snapshots:
                self._snapshots.close()
            self._checker.shutdown()
            with self._explained():  # It may not have written what it knows of the folder.
                self._manager.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """NotSaved in place of what Orbax raises."""
        try:
            yield
        except Exception as error:
            why, last = f"{error}".partition("\n")[0][:300], self.latest_step()
            whole = "There is no other" if last is None else f"The last whole one is of step {last}"
            raise NotSaved(
                f"a checkpoint under {self._directory} could not be written: {why}. {whole}; is "
                "the disk full?"
            ) from error

    def _finish(self, step: int) -> None:
        """Waits until all of a step is written, lists its checksums and reads it back."""
        self._manager.wait_until_finished()  # Its error is for `wait`.
        if step in restore.steps(self._directory):
            mine = self._directory / str(step), jax.process_index(), jax.process_count()
            checksums.write(*mine)
            checksums.read_back(*mine, unless=self._hurried.is_set)

    def _clear_unfinished(self) -> None:
        """Orbax's manager would do it in a thread, while other processes look at what is there."""
        if jax.process_index() == 0 and self._directory.exists():
            clearing = temporary_paths.cleanup_temporary_paths(self._directory)
            self._checker.submit(asyncio.run, clearing).result()  # Notebooks have a loop here.
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("unfinished checkpoints")

    def _set_damaged_aside(self) -> None:
        if not (there := restore.steps(self._directory)):
            return
        newest = restore.newest_sound(self._directory)
        damaged = [step for step in there if step > newest]
        if jax.process_index() == 0:
            for aside in _set_aside(self._directory, damaged, _DAMAGED):
                logging.warning("it lies in %s now; going on from step %d", aside, newest)
        if damaged and jax.process_count() > 1:  # Before the manager looks at what is there.
            multihost_utils.sync_global_devices("damaged checkpoints")

    def _clear_deleted(self) -> None:
        deleted = self._directory / _DELETED
        if jax.process_index() == 0 and deleted.exists():
            deleted.rmtree()


def _set_aside(directory: epath.Path, steps: list[int], name: str) -> list[epath.Path]:
    """Moves the folders of these steps into the folder `name`; their places there."""
    places = [directory / name / str(step) for step in steps]
    for place in places:
        if name == _DELETED and files.remote(directory):
            _delete(directory / place.name)
            continue
        place.parent.mkdir(exist_ok=True)
        if place.exists():
            place.rmtree()
        if there := files.remote(directory / place.name):
            # Without it Orbax takes this folder for one that is being written, and clears it.
            (place.parent / COMMIT).write_text("")
            there.copy_to(files.path(place))
            _delete(directory / place.name)
        else:
            (directory / place.name).rename(place)
    return places


def _delete(folder: epath.Path) -> None:
    """Deletes a checkpoint in a bucket; what is left after a kill does not look whole."""
    (folder / COMMIT).unlink(missing_ok=True)
    folder.rmtree()


class Snapshots:
    """The averages by power functions of a run, small: a folder every so many steps, all kept.

    Each is whole before training goes on, so that whatever checkpoint a run continues from, the
    snapshots before it are there. Those after it are deleted, and written again.
    """

    def __init__(self, directory: str | os.PathLike[str], dtype: str, step: int) -> None:
        """`dtype` is that of the stored numbers; the run starts at `step`."""
        cast = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        self._cast = jax.jit(lambda tree: jax.tree.map(cast, tree))
        folder = restore.absolute(directory)
        if jax.process_index() == 0:
            _set_aside(folder, [later for later in restore.steps(folder) if later > step], _DELETED)
        if jax.process_count() > 1:  # Before another looks at what is there.
            multihost_utils.sync_global_devices("later snapshots")
        self._files = Checkpointer(directory, keep_last=None)

    def save(self, step: int, state: TrainState) -> None:
        """Writes those of a state; NotSaved if it fails."""
        self._files.save_trees(step, self._cast(powers(state)))
        self._files.wait()

    def close(self) -> None:
        """Stops the threads."""
        self._files.close()


def powers(state: TrainState) -> dict[str, Params]:
    """The averages by power functions of a state, by the names of their items."""
    names = [name for name in state.ema if name.startswith(averages.POWER)]
    return {restore.EMA + name: state.ema[name] for name in names}


def check(directory: str | os.PathLike[str], step: int, state: TrainState) -> None:
    """ValueError unless the checkpoint of a step is of a state of these shapes; nothing is read."""
    root = restore.absolute(directory) / str(step)
    restore.check_averages(root, list(state.ema))
    restore.check_items(root, _items(state))


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


def _items(state: TrainState) -> dict[str, Any]:
    """The trees of a checkpoint, by the names of their items."""
    averages = {restore.EMA + name: tree for name, tree in state.ema.items()}
    rest = {"step": state.step, "opt_state": state.opt_state, "skipped": state.skipped}
    return {"params": state.params, **averages, "optimizer": rest}
