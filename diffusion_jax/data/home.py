"""Find the table of a data set, or import it: where tables live, and when they are still true.

A table lives beside the data, in the hidden folder .diffusion_jax/RULE. RULE is a digest of the
settings that the rows depend on. If this folder cannot be written, it lives in the user's cache, or
else in memory.
The card holds a digest of the names, sizes and times of the files. If they change, the data are
imported again, which writes only the parts that changed. A copy of the data set that keeps the
times of the files needs no import.
"""

import contextlib
import copy
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import filelock
from absl import logging

from diffusion_jax import files
from diffusion_jax.data import storage, table, tars
from diffusion_jax.data.inventory import LeftOut
from diffusion_jax.data.table import Row, Table


class Source(NamedTuple):
    """A data set as an importer found it, without reading its files."""

    root: str
    """The folder or URL that holds the files."""
    files: Sequence[str]
    """The paths or URLs of all files that the rows may depend on, in a fixed order."""
    rule: Mapping[str, Any]
    """The settings that the rows depend on, as JSON; "fields" are the names of numbers."""
    rows: Callable[[LeftOut], Iterator[Row]]
    """Reads the rows, and completes the inventory."""
    left: LeftOut
    """The files that were left out while the others were found."""
    facts: dict[str, Any]
    """More for the card, complete after the last row: the "suffixes" of all files, and "warnings",
    which are logged whenever the table is opened."""


def open_table(source: Source) -> Table:
    """Return the table of a data set, which is imported if it is new or has changed.

    Raises:
        ValueError: a file cannot be read; see the importers.
        OSError: a file is missing.
    """
    found = _open_or_import(source)
    for warning in found.card["facts"].get("warnings", ()):
        logging.warning("%s", warning)
    return found


def _open_or_import(source: Source) -> Table:
    seen, folders = _seen(source), _folders(source)
    for folder in folders:
        if (found := _open(folder, source, seen)) is not None:
            return found
    for folder in filter(_is_writable, folders):
        with filelock.FileLock(folder / ".lock", mode=0o666):
            if (found := _open(folder, source, seen)) is not None:  # Another process imported it.
                return found
            for temporary in folder.glob(".*.tmp"):  # Left by imports that were killed.
                temporary.unlink(missing_ok=True)
            try:
                return _import(folder, source, seen)
            except OSError as error:
                if not files.is_full(error):
                    raise
    return _import({}, source, seen)


def _import(place: pathlib.Path | dict[str, bytes], source: Source, seen: str) -> Table:
    """Write the table into a folder, or into a dictionary that stays in memory."""
    left = copy.deepcopy(source.left)  # A full disk leads to a second import.
    table.write(place, source.rows(left), left, root=source.root, rule=source.rule,
                facts=source.facts, seen=seen)  # fmt: skip
    return Table(place)


def _open(folder: pathlib.Path, source: Source, seen: str) -> Table | None:
    """Return the table in a folder, or None if it is missing, foreign, damaged or out of date."""
    if not tars.is_trusted(folder / table.CARD, source.files[0] if source.files else source.root):
        return None
    with contextlib.suppress(Exception):  # A damaged card can raise anything.
        found = Table(folder, source.root)
        return found if found.card["seen"] == seen else None


def _seen(source: Source) -> str:
    digest = hashlib.blake2b(json.dumps(source.left.saved()).encode(), digest_size=16)
    for name, stamp in zip(source.files, storage.stamps(source.files), strict=True):
        digest.update(os.fsencode(f"{name.removeprefix(source.root)}\0{stamp}\0"))
    return digest.hexdigest()


def _folders(source: Source) -> list[pathlib.Path]:
    """Return the folders for a table, the preferred one first."""
    rule, is_url = _digest(json.dumps(source.rule, sort_keys=True)), storage.is_url(source.root)
    beside = [] if is_url else [pathlib.Path(source.root, storage.OWN, rule)]
    root = _digest(source.root if is_url else os.path.realpath(source.root))
    return [*beside, *(cache / f"{rule}-{root}" for cache in tars.cache_folders())]


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def _is_writable(folder: pathlib.Path) -> bool:
    mode = 0o777 if folder.parent.name == storage.OWN else 0o700  # A cache is private.
    with contextlib.suppress(OSError):
        folder.parent.mkdir(mode, parents=True, exist_ok=True)
        folder.mkdir(mode, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return True
    return False
