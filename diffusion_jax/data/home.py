"""Find the table of a data set, or import it: where tables live, and when they are still true.

A table lives beside the data, in the hidden folder .diffusion_jax/RULE. RULE is a digest of the
settings that the rows depend on. If this folder cannot be written, it lives in the user's cache.
The card holds a digest of the names, sizes and times of the files. If they change, the data are
imported again, which writes only the parts that changed.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import filelock

from diffusion_jax.data import storage, table, tars
from diffusion_jax.data.inventory import LeftOut
from diffusion_jax.data.table import Row, Table

FOLDER = ".diffusion_jax"


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
    """More for the card, such as the "suffixes" of all files; complete after the last row."""


def open_table(source: Source) -> Table:
    """Return the table of a data set, which is imported if it is new or has changed.

    Raises:
        ValueError: a file cannot be read; see the importers.
        OSError: a file is missing.
    """
    seen, name = _seen(source), _digest(source.rule)
    folders = _folders(source, name)
    for folder in folders:
        if (found := _open(folder, source, seen)) is not None:
            return found
    options = {"root": source.root, "rule": source.rule, "facts": source.facts, "seen": seen}
    folder = next(filter(_is_writable, folders), None)
    if folder is None:
        return table.in_memory(source.rows(source.left), source.left, **options)
    with filelock.FileLock(folder / ".lock"):
        if (found := _open(folder, source, seen)) is not None:  # Another process imported it.
            return found
        table.write(folder, source.rows(source.left), source.left, **options)
        return Table(folder)


def _open(folder: pathlib.Path, source: Source, seen: str) -> Table | None:
    """Return the table in a folder, or None if it is missing, foreign, damaged or out of date."""
    if not tars.is_trusted(folder / table.CARD, source.files[0] if source.files else source.root):
        return None
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = Table(folder)
        if found.card["seen"] == seen and found.card["root"] == source.root:
            return found


def _seen(source: Source) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, stamp in zip(source.files, storage.stamps(source.files), strict=True):
        digest.update(os.fsencode(f"{name.removeprefix(source.root)} {stamp}\n"))
    return digest.hexdigest()


def _digest(rule: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:16]


def _folders(source: Source, name: str) -> list[pathlib.Path]:
    beside = [] if storage.is_url(source.root) else [pathlib.Path(source.root, FOLDER, name)]
    root = hashlib.sha256(os.fsencode(source.root)).hexdigest()[:16]
    return [*beside, *(pathlib.Path(cache, f"{name}-{root}") for cache in tars.cache_folders())]


def _is_writable(folder: pathlib.Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return True
    return False
