"""Folders that one worker of pytest -n fills and all workers use."""

import os
import pathlib
import shutil
from collections.abc import Callable

import filelock
import pytest


def folder(
    factory: pytest.TempPathFactory, name: str, fill: Callable[[pathlib.Path], None]
) -> pathlib.Path:
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
