"""Folders that one worker of pytest -n fills and all workers use; exact metrics of runs."""

import os
import pathlib
import shutil
from collections.abc import Callable

import filelock
import pytest


def folder(factory: pytest.TempPathFactory, name: str, fill: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Return the session's folder NAME. The first worker that requests it fills it, others wait."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # Each worker has its own folder within the session's.
    path, filled = root / name, root / f"{name}.filled"
    with filelock.FileLock(root / f"{name}.lock"):
        if not filled.exists():
            shutil.rmtree(path, ignore_errors=True)  # Left by a failed worker.
            path.mkdir()
            fill(path)
            filled.touch()
    return path


def exact(lines):
    """Leave out of lines of metrics what depends on the process: times, and skipped records."""
    own = ("images_per_second", "cpu_seconds_per_step", "data/")
    return [{k: v for k, v in line.items() if not k.startswith(own)} for line in lines]
