"""Columns: arrays that a network computed for captions or pictures, each found by its key.

A column is a folder:

    column.json             the version and the identity: all settings that the values depend on
    HASH.safetensors        a chunk, named by its keys: keys uint8 [N, 16]; first int64 [N + 1], the
                            first row of each item, then T; check int64 [N], a CRC-32 of an item's
                            key and rows; `values` and other arrays of T rows; `errors`, a summary
    index.safetensors       keys, sorted, with the number of the chunk and the place in it; the
                            names and sizes of the chunks. It is written last: without it, the
                            column is unfinished

The value of an item is a function of the identity and its key, 16 bytes of a hash. So an item is
computed once, whichever part of the data it is in, and is kept when the data grow.

To fill a column, call `start`, then `fill` with an array of the type ITEM: the key of each item and
a number by which `Work.read` finds it. Captions: the key hashes the text, the number is that of a
row which has it. Pictures: the key hashes the picture, and the number is its row. `Work.compute`
returns the rows of each item; a picture that cannot be read has none. To read a column, hash the
keys again; `Column.find` returns their places, and `Column.rows` the arrays at a place. Or write a
table whose places are those of the values in the chunks.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from absl import logging
from jaxtyping import Int, Shaped

from diffusion_jax import files
from diffusion_jax.data.engines import ALONE, Engine
from diffusion_jax.files import settings_record, sorted_tables, untrusted
from diffusion_jax.files.safetensors_files import map_safetensors, open_safetensors
from diffusion_jax.files.sorted_tables import KEY, KEY_SIZE
from diffusion_jax.logs import progress

CARD = "column.json"
INDEX = "index.safetensors"
ITEM = np.dtype([("key", KEY), ("number", np.int64)])
BYTES_PER_ITEM = 32 + 24
"""Bytes per item in a chunk, without its rows, and in the index."""
Identity = Mapping[str, Any]
_VERSION = 2
_DIGEST = 12  # Bytes of the name of a chunk.
_CHUNK = re.compile(r"[0-9a-f]{24}\.safetensors")
_TEMPORARY = re.compile(rf"(items-\w+|\.{_CHUNK.pattern}\.\w+)\.tmp")  # Left by killed workers.
_NO_ROWS = {"keys", "first", "check", "errors"}  # Arrays of a chunk that have no row for each row.
_OPEN_CHUNKS = 4096  # Chunks that are mapped at once; Linux allows 65,530 maps per process.
_THREADS = 8  # Chunks whose checksums are compared at once.


class Kind(NamedTuple):
    """What messages say of a kind of column."""

    command: str
    """The shell command that makes or completes the column in the folder {path}."""
    settings: str
    """The settings that an identity consists of, such as "the text group of the config"."""

    def make(self, path: str | os.PathLike[str], *flags: str) -> str:
        """Return the command for a folder, with more flags, on a line of its own."""
        return " ".join(["\n ", self.command.format(path=path), *flags])


class Computed(NamedTuple):
    """The values of N items, one after another."""

    lengths: Int[np.ndarray, "N"]
    """The number of rows of each item; 0: it has no value."""
    rows: Mapping[str, Shaped[np.ndarray, "T ..."]]
    """Arrays with a row for each of the T rows of all items."""
    errors: np.ndarray = np.zeros(0)
    """A summary of the errors of all rows, which is stored with the chunk."""


class Work(NamedTuple):
    """How to compute the values of items. With Beam, everything in it is pickled."""

    read: Callable[[Shaped[np.ndarray, "N"]], Any]
    """Reads what is to be computed for an array of the type ITEM. It runs in a thread."""
    compute: Callable[[Any], Computed]
    """Computes the values from what `read` returned."""
    size: int
    """Items per chunk. A killed worker loses at most one chunk."""
    noun: str = "items"
    """The items in progress lines, such as "captions"."""
    engine: Engine = ALONE
    verify: bool = False
    """Whether to compare all checksums, and to compute damaged chunks again."""
    doing: str = "encoding"
    """What happens to the items, in progress lines."""


class Filled(NamedTuple):
    """What a column holds."""

    items: int
    bytes: int
    names: Sequence[str]
    """The names of all chunks."""
    chunks: Sequence[Mapping[str, np.ndarray]]
    """The arrays of all chunks."""


class Column:
    """A finished column, mapped into memory. Several threads may use it."""

    def __init__(self, path: str | os.PathLike[str], kind: Kind) -> None:
        """Open a column, and check the size of each chunk.

        Raises:
            FileNotFoundError: a file is missing. The message shows the command that creates it.
            ValueError: a file is damaged, or the column is unfinished or of another version.
        """
        self.path, self.kind = pathlib.Path(path), kind
        self.identity = read_identity(self.path, kind)
        """All settings that the values depend on."""
        if not (self.path / INDEX).is_file():
            raise ValueError(f"{path} is unfinished: continue with{kind.make(path)}")
        try:
            self._index = map_safetensors(self.path / INDEX)
            self._keys = self._index["keys"].view(KEY)[:, 0]
            sizes = zip(_names(self._index), self._index["bytes"].tolist(), strict=True)
        except (ValueError, KeyError):
            message = f"{self.path / INDEX} is damaged: create it again with{kind.make(path)}"
            raise ValueError(message) from None
        self._names = [self._sized(name, size) for name, size in sizes]
        self._chunk = functools.lru_cache(_OPEN_CHUNKS)(self._map_chunk)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: Shaped[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
        """Return the place of each key in the column; -1 for a key that is missing."""
        at = np.minimum(np.searchsorted(self._keys, keys), len(self) - 1)
        return np.where(self._keys[at] == keys, at, -1)

    def rows(self, place: int, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of the item at a place, [L, ...] for its L rows, keyed by name.

        Raises ValueError, which calls the item `name`, if they are damaged.
        """
        key, number, at = (self._index[n][place] for n in ("keys", "chunk", "at"))
        file, rows = self.path / INDEX, {}
        try:
            file = self.path / self._names[number]
            chunk = self._chunk(int(number))
            first, end = chunk["first"][at : at + 2].tolist()
            rows = {n: chunk[n][first:end] for n in chunk.keys() - _NO_ROWS}
            sound = checksum(key, rows) == chunk["check"][at]
        except (ValueError, KeyError, IndexError):
            sound = False
        if not sound:
            raise ValueError(
                f"the values of {name} in {file} are damaged: compute the damaged files again with"
                f"{self.kind.make(self.path, '--verify')}"
            )
        return rows

    def _map_chunk(self, number: int) -> dict[str, np.ndarray]:
        return map_safetensors(self.path / self._names[number])

    def _sized(self, name: str, size: int) -> str:
        file = self.path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} of {size} bytes"
            error = FileNotFoundError if actual is None else ValueError
            raise error(f"{file} {state}: create it again with{self.kind.make(self.path)}")
        return name


def read_identity(path: pathlib.Path, kind: Kind) -> Identity:
    """Return the identity of the column in a folder.

    Raises:
        FileNotFoundError: there is no column.
        ValueError: it is damaged, or another version wrote it.
    """
    card = {}
    if (path / CARD).is_file():
        with contextlib.suppress(ValueError):
            card = untrusted.parse_json((path / CARD).read_text())
    elif not (path / INDEX).is_file():
        problem = f"holds no {CARD}" if path.is_dir() else "does not exist"
        command = kind.make(path)
        raise FileNotFoundError(f"{path} {problem}: check the path, or make it with{command}")
    if card.get("version") != _VERSION:
        raise ValueError(f"{path} is damaged, or another version wrote it: make it again with{kind.make('NEW_FOLDER')}")
    return card["identity"]


def check_identity(path: str | os.PathLike[str], stored: Identity, wanted: Identity, kind: Kind) -> None:
    """Raise ValueError if a column's identity `stored` differs from `wanted`.

    `path` is its folder. Settings that `wanted` lacks are not compared.
    """
    if different := settings_record.differences({n: stored.get(n) for n in wanted}, wanted):
        raise ValueError(
            f"the values in {path} were made with other settings ({different}): set "
            f"{kind.settings} to the stored values, or make others with{kind.make('NEW_FOLDER')}"
        )


def start(path: pathlib.Path, identity: Identity, kind: Kind) -> None:
    """Create the column in a folder if it is missing, else compare its identity.

    Raises:
        ValueError: it has another identity, or another version wrote it.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not (path / CARD).exists() and not (path / INDEX).exists():
        card = {"version": _VERSION, "identity": identity}
        files.write_whole(path / CARD, json.dumps(card, indent=1))
    check_identity(path, read_identity(path, kind), identity, kind)


def fill(path: pathlib.Path, items: Shaped[np.ndarray, "N"], work: Work) -> Filled:
    """Compute the items that a column lacks, and write its index.

    Several workers may do this at once, if they are given the same items.

    Args:
        path: the folder of the column.
        items: all items, of the type ITEM, in the order in which they are stored. Of several with
            one key, the first is computed.
        work: how to compute them.
    """
    listed, present = _listed(path), _present(path)
    with ThreadPoolExecutor(_THREADS) as threads:
        whole = threads.map(lambda name: is_whole(path / name, work.verify), present)
        present = {name for name, sound in zip(present, whole, strict=True) if sound}
    kept = [name for name in listed if name in present]
    if len(kept) < len(listed):
        lost = progress.counted(len(listed) - len(kept), "chunk")
        logging.warning("missing or damaged: %s of %s, computed again", lost, path)
    _, first = np.unique(items["key"], return_index=True)
    new = items[np.sort(first)]
    new = new[~np.isin(new["key"], joined(open_safetensors(path / name) for name in kept))]
    names = [_name(new["key"][i : i + work.size]) for i in range(0, len(new), work.size)]
    # Beam's workers read from a file which items a chunk has.
    plan = path / f"items-{hashlib.blake2b(new.tobytes(), digest_size=_DIGEST).hexdigest()}.tmp"
    files.write_whole(plan, new.tobytes())
    stage = _Stage(path, plan, work._replace(engine=ALONE))
    work.engine.fill(
        range(len(names)),
        lambda chunk: path / names[chunk],
        stage.write,
        noun=work.noun,
        name=work.doing,
        size=lambda chunk: min(work.size, len(new) - chunk * work.size),
        read=stage.read,
    )
    return _finish(path, list(dict.fromkeys([*kept, *names])))


def joined(chunks: Iterable[Mapping[str, np.ndarray]], name: str = "keys") -> Shaped[np.ndarray, "N"]:
    """Return the keys of all chunks, one after another, or another array of 16-byte rows."""
    arrays = (np.asarray(chunk[name]).reshape(-1) for chunk in chunks)
    return np.concatenate([np.zeros(0, np.uint8), *arrays]).view(KEY)


def places_of(keys: Shaped[np.ndarray, "N"], chunks: Sequence[Mapping[str, np.ndarray]]) -> Int[np.ndarray, "N"]:
    """Return the place of each key in `joined(chunks)`, which has all of them."""
    stored = joined(chunks)
    order = np.argsort(stored, kind="stable")
    return order[np.searchsorted(stored, keys, sorter=order)]


def checksum(key: np.ndarray, rows: Mapping[str, np.ndarray]) -> int:
    """Return the CRC-32 of an item's key and rows."""
    check = zlib.crc32(np.ascontiguousarray(key).data)
    for name in sorted(rows):
        check = zlib.crc32(np.ascontiguousarray(rows[name]).view(np.uint8).data, check)
    return check


def write_chunk(path: pathlib.Path, keys: Shaped[np.ndarray, "N"], values: Computed) -> None:
    """Write a chunk of a column, unless it exists.

    Raises ValueError if there is not one value for each key.
    """
    if len(values.lengths) != len(keys):
        raise ValueError(f"the data changed while {path} was filled: run the command again")
    target = path / _name(keys)
    raw = np.ascontiguousarray(keys).view(np.uint8).reshape(-1, KEY_SIZE)
    first = np.concatenate([[0], np.cumsum(values.lengths)]).astype(np.int64)
    check = _checks(raw, first, values.rows)
    arrays = {"keys": raw, "first": first, "check": check, "errors": values.errors, **values.rows}
    try:
        files.write_new(target, _saved(arrays))
    except FileNotFoundError:  # Another worker has written it, and deleted temporary files.
        if not target.exists():
            raise


def is_whole(file: pathlib.Path, verify: bool) -> bool:
    """Return whether a chunk is undamaged. A damaged chunk is deleted.

    With `verify`, the checksum of every item is compared. Otherwise, only the header and the file
    size are checked.
    """
    try:
        chunk = open_safetensors(file)
        if not verify:
            return True
        rows = {name: chunk[name] for name in chunk.keys() - _NO_ROWS}
        if np.array_equal(_checks(chunk["keys"], chunk["first"], rows), chunk["check"]):
            return True
    except (ValueError, KeyError):
        pass  # The file is truncated, or its header is damaged.
    file.unlink(missing_ok=True)
    return False


class _Stage(NamedTuple):
    """What the engine calls for each chunk."""

    path: pathlib.Path
    plan: pathlib.Path
    work: Work

    def read(self, chunk: int) -> Any:
        return self.work.read(self._items(chunk))

    def write(self, chunk: int, argument: Any) -> None:
        write_chunk(self.path, self._items(chunk)["key"], self.work.compute(argument))

    def _items(self, chunk: int) -> np.ndarray:
        return _read_plan(self.plan)[chunk * self.work.size :][: self.work.size]


@functools.lru_cache(1)
def _read_plan(path: pathlib.Path) -> np.ndarray:
    return sorted_tables.read(path, ITEM)


def _finish(path: pathlib.Path, names: Sequence[str]) -> Filled:
    """Write the index of a column with these chunks, and delete all other files of it."""
    chunks = [open_safetensors(path / name) for name in names]
    lengths = np.array([len(chunk["first"]) - 1 for chunk in chunks], np.int64)
    keys, first = np.unique(joined(chunks), return_index=True)
    chunk_of = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)
    starts = np.cumsum(lengths) - lengths
    sizes = np.array([(path / name).stat().st_size for name in names], np.int64)
    index = _saved(
        {
            "keys": keys.view(np.uint8).reshape(-1, KEY_SIZE),
            "chunk": (number := chunk_of[first]),
            "at": (first - starts[number]).astype(np.int32),
            "names": np.frombuffer(bytes.fromhex("".join(map(_stem, names))), np.uint8),
            "bytes": sizes,
        }
    )
    files.write_whole(path / INDEX, index)
    used = set(names)
    for file in path.iterdir():
        is_other = _CHUNK.fullmatch(file.name) and file.name not in used
        if is_other or _TEMPORARY.fullmatch(file.name):
            file.unlink(missing_ok=True)
    return Filled(len(keys), int(sizes.sum()) + len(index), names, chunks)


def _present(path: pathlib.Path) -> list[str]:
    """Return the names of all chunks in a folder."""
    return sorted(file.name for file in path.iterdir() if _CHUNK.fullmatch(file.name))


def _listed(path: pathlib.Path) -> list[str]:
    """Return the names of the chunks in the index; [] if there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return _names(open_safetensors(path / INDEX))
    return []


def _names(index: Mapping[str, np.ndarray]) -> list[str]:
    digests = index["names"].reshape(-1, _DIGEST)
    return [f"{digest.tobytes().hex()}.safetensors" for digest in digests]


def _name(keys: np.ndarray) -> str:
    """Return the name of the chunk with these keys."""
    return f"{hashlib.blake2b(keys.tobytes(), digest_size=_DIGEST).hexdigest()}.safetensors"


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _checks(keys: np.ndarray, first: np.ndarray, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    spans = itertools.starmap(slice, itertools.pairwise(first.tolist()))
    cut = ({name: array[span] for name, array in rows.items()} for span in spans)
    return np.array([checksum(*pair) for pair in zip(keys, cut, strict=True)], np.int64)


def _saved(arrays: Mapping[str, np.ndarray]) -> bytes:
    return safetensors.numpy.save({n: np.ascontiguousarray(a) for n, a in arrays.items()})
