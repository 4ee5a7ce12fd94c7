"""Write TensorBoard's event files through CLU. Only this module imports TensorFlow."""

import contextlib
import errno
import functools
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from diffusion_jax import files

FOLDER = "tensorboard"
"""The subfolder of a workdir that holds the event files."""
_HPARAMS = "_hparams_/"  # Prefix of the hparams' tags. Every start of a run writes them again.


class _Nothing:
    """A writer that ignores all calls."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class _Files:
    """A wrapper of CLU's writer. Its methods raise OSError if the disk is full."""

    def __init__(self, tf: Any, writer: Any) -> None:
        self._tf, self._writer = tf, writer

    # TensorFlow keeps every Python number that it is given for good, but not NumPy's.
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        arrays = {name: np.asarray(value) for name, value in scalars.items()}
        self._call("write_scalars", np.int64(step), arrays)

    def write_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        self._call("write_images", np.int64(step), images)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> None:
        with _as_os_errors(self._tf):
            getattr(self._writer, name)(*arguments)


@contextlib.contextmanager
def _as_os_errors(tf: Any) -> Iterator[None]:
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), FOLDER) from error


def import_beside() -> None:
    """Import TensorFlow in a thread, which takes seconds, while this process does something else.

    Only process 0 needs it.
    """
    if jax.process_index() == 0:
        threading.Thread(target=_import).start()


@contextlib.contextmanager
def writing(folder: pathlib.Path, after: int = 0) -> Iterator[Any]:
    """Yield a clu.metric_writers.MetricWriter for event files in `folder`, and close it at the end.

    First, the events of steps after `after` are removed from existing files in `folder`; with
    after=0, all events are removed. Only process 0 writes. If TensorFlow is not installed, a
    warning is logged and nothing is written.
    """
    writer = _Nothing() if jax.process_index() else _open(folder, after)
    try:
        yield writer
    finally:
        writer.close()


def _open(folder: pathlib.Path, after: int) -> Any:
    tf, metric_writers = _import()
    if tf is None:
        hint = "pip install -r requirements.txt"
        logging.warning("no event files for TensorBoard are written (%s): run %s", metric_writers, hint)
        return _Nothing()
    tf.config.set_visible_devices([], "GPU")  # By default, TensorFlow takes all GPU memory.
    for path in folder.glob("events.out.tfevents.*"):
        _drop_after(path, after)
    with _as_os_errors(tf):
        return _Files(tf, metric_writers.SummaryWriter(str(folder)))


def _import() -> tuple[Any, Any]:
    """Return TensorFlow and CLU's metric writers, or (None, the error) without one of them."""
    # By default, TensorFlow logs at each import that oneDNN may change its arithmetic.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    try:
        import tensorflow as tf
        from clu import metric_writers
    except ImportError as error:
        return None, error
    return tf, metric_writers


def hparams(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as TensorBoard's hparams: a dict from dotted names to numbers and strings."""
    leaves, _ = jax.tree.flatten_with_path(config, lambda v: not isinstance(v, Mapping))
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): _simple(value) for path, value in leaves}


def _simple(value: Any) -> bool | int | float | str:
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, bool | int | float | str) else str(value)


def _drop_after(path: pathlib.Path, step: int) -> None:
    """Remove events of steps after `step` from an event file.

    Hparams and an incomplete record at the end are removed, too. If no event remains, the file is
    deleted.
    """
    import tensorflow as tf
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    records = []
    for record in RawEventFileLoader(str(path)).Load() if step else ():
        event = Event.FromString(record)
        tags = [value.tag for value in event.summary.value]
        if event.step <= step and not any(tag.startswith(_HPARAMS) for tag in tags):
            records.append(record)
    if not records:
        path.unlink()
        return
    with files.whole(path) as temporary, tf.io.TFRecordWriter(str(temporary)) as out:
        for record in records:
            out.write(record)
