"""Write a new run whose weights come from elsewhere, such as from another run or a file."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from diffusion_jax import files, runs
from diffusion_jax.weights import restore

_UNFINISHED = "unfinished"  # This file exists until everything is written.


@contextlib.contextmanager
def writing(workdir: files.Path, config: Mapping[str, Any], flag: str = "--out") -> Iterator[pathlib.Path]:
    """Write the config of a new run, and yield the folder for its checkpoint.

    This context manager holds the lock of the workdir. If the process is killed in this context,
    the same command starts again from the beginning. Raises ValueError, which names `flag`, if
    `workdir` holds checkpoints of a finished run.
    """
    folder, unfinished = files.path(workdir) / runs.CHECKPOINTS, files.path(workdir) / _UNFINISHED
    if restore.steps(folder) and not unfinished.exists():
        raise ValueError(f"{flag}={workdir} holds checkpoints already: name a new folder")
    with runs.writing(workdir):
        runs.claim(workdir, config)
        if jax.process_index() == 0:
            if unfinished.exists():
                files.remove_tree(folder)
            files.write_whole(unfinished, "")
        yield folder
        if jax.process_index() == 0:
            unfinished.unlink()
