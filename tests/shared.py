"""Folders that one worker of pytest -n fills and all of them use."""

import os
import pathlib
import shutil
from collections.abc import Callable

import filelock
import pytest


def folder(
    factory: pytest.TempPathFactory, name: str, fill: Callable[[pathlib.Path], None]
) -> pathlib.Path:
    """The session's folder NAME; the first that asks for it fills it, and the others wait."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # Each worker has a folder of its own in the session's.
    path, filled = root / name, root / f"{name}.filled"
    with filelock.FileLock(root / f"{name}.lock"):
        if not filled.exists():
            shutil.rmtree(path, ignore_errors=True)  # Of one that failed.
            path.mkdir()
            fill(path)
            filled.touch()
    return path
