"""Find the table of a data set, or import it: where tables live, and when they are still true.

A table lives beside the data, in the hidden folder .diffusion_jax/RULE. RULE is a digest of the
settings that the rows depend on. If this folder cannot be written, it lives in the user's cache, or
else in memory. For data at URLs, it lives in the cache of each machine and, for other machines, in
the bucket.

The card holds a digest of the names, sizes and times of the files. If they change, the data are
imported again, which writes only the parts that changed. A copy of the data set that keeps the
times of the files needs no import. The last tables are kept, and those of runs whose workdirs
exist: a run whose data set grew goes on with its own table. A table that data.path itself names is
never imported again.
"""

import collections
import contextlib
import contextvars
import copy
import hashlib
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import filelock
import numpy as np
from absl import logging

from diffusion_jax import files
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.data import storage, table, tars
from diffusion_jax.data.inventory import LeftOut
from diffusion_jax.data.table import Row, Table
from diffusion_jax.files import untrusted
from diffusion_jax.logs import progress

RUN = "data.json"
"""The file in a workdir that holds the ids of the tables that the run reads."""
COLUMN = r"[\w-]+\.npy"
"""The pattern of the names of columns in data.text."""
_KEPT = 3  # Number of tables of a data set that are kept.


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
    stamps: Sequence[str] = ()
    """What storage.stamps returns for the files, if it is known."""


def rule(source: str, text: str, fields: Sequence[Field], **more: Any) -> dict[str, Any]:
    """Return Source.rule: data.source, data.text, the numbers, and more settings."""
    return {"source": source, "text": text, "ranges": [*map(str, fields)], "fields": [f.name for f in fields], **more}


class Tables:
    """The tables that a run reads: for each rule, their ids in the order in which they are opened.

    A run may read several data sets with one rule, as the parts of a mixture.
    """

    def __init__(self, workdir: str | os.PathLike[str], begun: bool):
        """Read the ids in a workdir. If the run has not `begun`, it may read any table."""
        self._path, self._ids = files.path(workdir).absolute() / RUN, collections.defaultdict[str, list](list)
        self._homes = list[tuple[pathlib.Path, str]]()
        self._used: Mapping[str, list[str]] = {}
        if begun and self._path.exists():
            self._used = untrusted.parse_json(self._path.read_text())

    def choose(self, name: str, found: Table, source: Source) -> Table:
        """Return the table that the run reads: `found`, or its own one if the data set grew.

        Raises ValueError if files of its own table are missing.
        """
        used, number, own = self._used.get(name, []), len(self._ids[name]), found
        pruned = None if found.home and files.store_path(found.home) else found.home  # In buckets, all are kept.
        if found.home and number < len(used) and used[number] != found.id():
            card = table.card_of(used[number])
            own = _open(found.home, source, None, card)
            if pruned:
                with contextlib.suppress(OSError):
                    os.utime(pruned / card)  # So that later imports keep it.
        if own is not None and not same_rows(own, found):
            _check_grown(own, found, source)
            found = own
        self._ids[name].append(found.id())
        if pruned:
            self._homes.append((pruned, found.id()))
        return found

    def write(self) -> None:
        """Write the ids of the opened tables into the workdir, and its path beside these tables."""
        if self._ids != self._used:
            files.write_whole(self._path, json.dumps(self._ids))
        for folder, id in self._homes:
            with contextlib.suppress(OSError):  # It may be another user's.
                files.write_whole(folder / f"run-{_digest(str(self._path))}.json", json.dumps([str(self._path), id]))


_RUN = contextvars.ContextVar[Tables | None]("the tables of the run", default=None)


@contextlib.contextmanager
def tables_of(workdir: str | os.PathLike[str], begun: bool = True) -> Iterator[Tables]:
    """In this context, `open_table` opens the tables that the run in `workdir` reads."""
    tables = Tables(workdir, begun)
    token = _RUN.set(tables)
    try:
        yield tables
    finally:
        _RUN.reset(token)


def open_table(source: Source) -> Table:
    """Return the table of a data set, which is imported if it is new or has changed.

    Raises:
        ValueError: a file cannot be read; see the importers.
        OSError: a file is missing.
    """
    found = of_run(_newest(source, _name(source)), source)
    for warning in found.card["facts"].get("warnings", ()):
        logging.warning("%s", warning)
    return found


def of_run(found: Table, source: Source) -> Table:
    """Return the table that this context's run reads: `found`, or its own one if the data grew."""
    run = _RUN.get()
    return run.choose(_name(source), found, source) if run and found.home else found


def _name(source: Source) -> str:
    return _digest(json.dumps(source.rule, sort_keys=True))


def _newest(source: Source, name: str) -> Table:
    """Return the table of the data set as it is now, which is imported if necessary."""
    stamps = source.stamps or storage.stamps(source.files)
    stamps = dict(zip(source.files, stamps, strict=True))
    seen, folders = _seen(source, stamps), _folders(source, name)
    for folder in folders:
        if (found := _open(folder, source, seen)) is not None:
            return found
    shared = files.store_path(os.path.join(source.root, storage.OWN, name))
    for folder in filter(_is_writable, folders):
        with filelock.FileLock(folder / ".lock", mode=0o666):
            if (found := _open(folder, source, seen)) is not None:  # Another process imported it.
                return found
            try:
                if shared and (found := _download(shared, folder, source, seen)) is not None:
                    return found
                found = _import(folder, source, seen, stamps)
                _prune(folder, table.card_of(found.id()))
                if shared and found.card["seen"]:
                    _upload(folder, found, shared)
                return found
            except OSError as error:
                if not files.is_full(error):
                    raise
    return _import({}, source, seen, stamps)


def _download(shared: files.Remote, folder: pathlib.Path, source: Source, seen: str) -> Table | None:
    """Copy a table from a bucket and return it, or None if it is missing or out of date."""
    # Any error means that there is none, or that only the data may be read.
    with contextlib.suppress(Exception):  # A damaged card can raise anything.
        card = json.loads(written := (shared / table.CARD).read_bytes())
        own = os.path.basename(table.card_of(card["id"]))
        if card["seen"] == seen:
            for name in table.files_of(card):
                with files.whole(folder / name) as temporary:
                    (shared / name).get(temporary)
            for name in (own, table.CARD):
                files.write_whole(folder / name, written)
            return _open(folder, source, seen)


def _upload(folder: pathlib.Path, found: Table, shared: files.Remote) -> None:
    try:
        for name in (*table.files_of(found.card), table.CARD):
            (shared / name).send(folder / name)
    except OSError as error:
        logging.warning("the table of the data cannot be uploaded, so each machine makes its own: %s", error)


def is_home(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names the folder of a table, on a disk or in a bucket.

    A data set may have a card.json of its own, such as the caption of card.jpg.
    """
    readable = files.is_store(path) or not storage.is_url(os.fspath(path))
    if not path or not readable or not (files.path(path) / table.CARD).is_file():
        return False
    return any(table.FILE.fullmatch(file.name) for file in files.path(path).iterdir())


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
    card = card_of(path, rule["text"])
    found = Table(path, card=card)
    root = found.card["root"]
    if not tars.is_trusted(files.path(path) / card, root):
        raise ValueError(f"{path} is a table by a user who owns neither it nor {root}: import the data yourself")
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
                f"{path} is a table of the data in {root}, but {place.file} is missing: import the data again"
            )
    return found


def column_card(text: str) -> str:
    """Return the name of the card of the column that data.text names, such as "t5.npy"."""
    return f"column-{text}.json"


def card_of(path: str | os.PathLike[str], text: str) -> str:
    """Return the name of the card in a table's folder that has the texts that data.text names."""
    card = column_card(text)
    exists = re.fullmatch(COLUMN, text) and (files.path(path) / card).is_file()
    return card if exists else table.CARD


def cards(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of all cards of the table in a folder: its own, and those of columns."""
    names = (file.name for file in files.path(path).iterdir())
    return [table.CARD, *sorted(name for name in names if name.startswith("column-"))]


def _import(place: pathlib.Path | dict[str, bytes], source: Source, seen: str, stamps: Mapping[str, str]) -> Table:
    """Write the table into a folder, or into a dictionary that stays in memory."""
    left = copy.deepcopy(source.left)  # A full disk leads to a second import.
    table.write(
        place, source.rows(left), left, root=source.root, rule=source.rule, facts=source.facts, seen=seen, stamps=stamps
    )
    return Table(place)


def _prune(folder: pathlib.Path, newest: str) -> None:
    """Delete all tables but the last ones and those of runs, and the files that only they need.

    `newest` is the name of the last card: the clock may have been set back.
    """
    used = {table.card_of(id) for path in folder.glob("run-*.json") for id in _used(path)}
    age = lambda path: (path.name == newest, path.stat().st_mtime_ns)
    cards = sorted(folder.glob("card-*.json"), key=age)
    for card in cards[:-_KEPT]:
        if card.name not in used:
            card.unlink(missing_ok=True)
    kept = set[str]()
    for card in [*folder.glob("card-*.json"), *folder.glob("column-*.json")]:
        with contextlib.suppress(Exception):  # Nothing is kept for a damaged card.
            kept |= table.files_of(json.loads(card.read_bytes()))
    for path in folder.iterdir():
        # Left by an import that was killed.
        unfinished = path.match(".*.arrow.*.tmp") or path.match(".pictures.*.tmp")
        if unfinished or (table.FILE.fullmatch(path.name) and path.name not in kept):
            path.unlink(missing_ok=True)


def _used(path: pathlib.Path) -> list[str]:
    """Return the id of the table that the run reads whose workdir the file at `path` names.

    If it no longer reads this table, delete the file and return [].
    """
    with contextlib.suppress(Exception):  # A damaged file can raise anything.
        name, id = untrusted.parse_json(path.read_text())
        # Data from elsewhere may bring such a file, which must not make us open a pipe or a device.
        run = files.path(name)
        if run.name == RUN and run.is_file() and any(id in of for of in untrusted.parse_json(run.read_text()).values()):
            return [id]
    path.unlink(missing_ok=True)
    return []


def same_rows(one: Table, other: Table) -> bool:
    """Return whether two tables have the same pictures, with and without texts, in one order."""
    rows = np.arange(len(one))
    return (
        len(one) == len(other)
        and np.array_equal(one.keys(rows), other.keys(rows))
        and np.array_equal(one.bare(), other.bare())
    )


def _check_grown(own: Table, found: Table, source: Source) -> None:
    """Check that all files of a run's table exist, and log how many pictures came later."""
    stamps = found.card["stamps"]
    changed = [n for n, old in own.card["stamps"].items() if stamps.get(n, old) != old]
    if changed:
        raise ValueError(
            f"{own.path(changed[0])} has changed since this run began: restore it, or start a new "
            "run, which keeps the weights with --continue_from"
        )
    present = set(source.files)
    others = (path for path in own.files() if path not in present)
    if missing := [path for path in others if not files.path(path).exists()]:
        raise ValueError(
            f"the {len(own)} pictures of this run lie in files of which {len(missing)} no longer "
            f"exist, such as {', '.join(missing[:3])}. Restore them, or start a new run, which keeps the weights "
            "with --continue_from"
        )
    came = len(found) - len(own)
    logging.info(
        "%s came to %s after this run began, which goes on with its %d; a new run with --continue_from also uses them",
        progress.counted(max(came, came + len(own.bare()) - len(found.bare())), "picture"),
        source.root,
        len(own),
    )


def _open(folder: pathlib.Path, source: Source, seen: str | None, card: str = table.CARD) -> Table | None:
    """Return the table in a folder, or None if it is missing, foreign, damaged or out of date.

    If `seen` is None, it may be out of date.
    """
    if not tars.is_trusted(folder / card, source.files[0] if source.files else source.root):
        return None
    with contextlib.suppress(Exception):  # A damaged card can raise anything.
        found = Table(folder, source.root, card)
        return found if seen in (None, found.card["seen"]) else None


def _seen(source: Source, stamps: Mapping[str, str]) -> str:
    digest = hashlib.blake2b(json.dumps(source.left.saved()).encode(), digest_size=16)
    for name, stamp in stamps.items():
        digest.update(os.fsencode(f"{name.removeprefix(source.root)}\0{stamp}\0"))
    return digest.hexdigest()


def _folders(source: Source, name: str) -> list[pathlib.Path]:
    """Return the folders for a table, the preferred one first."""
    is_url = storage.is_url(source.root)
    beside = [] if is_url else [pathlib.Path(source.root, storage.OWN, name)]
    root = _digest(source.root if is_url else os.path.realpath(source.root))
    return [*beside, *(cache / f"{name}-{root}" for cache in tars.cache_folders())]


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
