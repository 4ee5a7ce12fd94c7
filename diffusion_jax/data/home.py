"""Find the table of a data set, or import it: where tables live, and when they are still true.

A table lives beside the data, in the hidden folder .diffusion_jax/RULE. RULE is a digest of the
settings that the rows depend on. If this folder cannot be written, it lives in the user's cache.
The card holds a digest of the names, sizes and times of the files. If they change, the data are
imported again, which writes only the parts that changed. A table that data.path itself names is
never imported again.
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


def is_home(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names the folder of a table, on a disk or in a bucket."""
    readable = files.is_store(path) or not storage.is_url(os.fspath(path))
    return bool(path) and readable and (files.path(path) / table.CARD).is_file()


def saved(path: str | os.PathLike[str], rule: Mapping[str, Any]) -> Table | None:
    """Return the table that data.path itself names, or None if it does not name a table.

    The files of the table are checked, and that the first and last picture exist, but not whether
    the data have changed since the import. `rule` holds settings that must be those of the import.

    Raises:
        FileNotFoundError: one of the two pictures is missing.
        ValueError: the table was imported with other settings, is damaged, or is another user's.
    """
    if not is_home(path):
        return None
    found = Table(path)
    root = found.card["root"]
    if not tars.is_trusted(files.path(path) / table.CARD, root):
        raise ValueError(
            f"{path} is a table by a user who owns neither it nor {root}: import the data yourself"
        )
    for name, value in rule.items():
        if (imported := found.card["rule"].get(name)) != value:
            raise ValueError(
                f"{path} was imported with {name} {imported!r}, but this run has {value!r}: set "
                "data.source, data.text, data.fields and data.loss_mask as in the import, or "
                "import the data again"
            )
    for place in found.places([0, len(found) - 1] if len(found) else []):
        if not files.path(place.file).exists():
            raise FileNotFoundError(
                f"{path} is a table of the data in {root}, but {place.file} is missing: import the "
                "data again"
            )
    return found


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
    beside = [] if storage.is_url(source.root) else [pathlib.Path(source.root, storage.OWN, name)]
    root = hashlib.sha256(os.fsencode(source.root)).hexdigest()[:16]
    return [*beside, *(pathlib.Path(cache, f"{name}-{root}") for cache in tars.cache_folders())]


def _is_writable(folder: pathlib.Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return True
    return False
