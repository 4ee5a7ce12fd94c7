"""Finish a store of embeddings: write its manifest, and its index, which locates each key.

The keys of each shard are written to a sorted table. Then each range of keys is read from all
tables and becomes a part of the index. Finally, the parts are joined (see files/sorted_tables.py).
"""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from diffusion_jax import files
from diffusion_jax.data.engines import ALONE, Engine
from diffusion_jax.files import safetensors_files, sorted_tables
from diffusion_jax.precache import shards, store

_PLACE = [("first", np.int64), ("tokens", np.int32), ("check", np.int64)]
ROW = np.dtype([("key", sorted_tables.KEY), *_PLACE])
_ENTRY = np.dtype([("key", sorted_tables.KEY), ("shard", np.int32), *_PLACE])
_TYPES = {"i8": "I64", "i4": "I32"}  # From numpy's names of types to those of safetensors.


class Listed(NamedTuple):
    """A list of shards of the store at `path`. The file folder/file holds one shard name per line.

    Workers receive the path of this file instead of the names, because there may be tens of
    thousands of shards.
    """

    path: pathlib.Path
    folder: pathlib.Path
    file: str

    @property
    def names(self) -> list[str]:
        """Return the names of the shards, in order."""
        return files.cached(self.folder / self.file).read_text().split()

    @property
    def tables(self) -> list[pathlib.Path]:
        """Return the path of each shard's table of keys. The tables may not exist yet."""
        return [self.folder / f"table-{name}" for name in self.names]

    def part(self, number: int) -> pathlib.Path:
        """Return the path of the part of the index that holds key range `number`."""
        return self.folder / f"{self.file}-{number:08}"


def finish(
    path: pathlib.Path,
    names: Sequence[str],
    folder: pathlib.Path | None = None,
    engine: Engine = ALONE,
) -> dict[str, Any]:
    """Write a store's index and manifest for the shards `names`, and delete its other shards.

    Only one range of keys, about 300 MB, is in memory at once.

    Args:
        path: The folder of the store.
        names: The file names of the shards.
        folder: A folder for temporary files; None means path/plan.
        engine: Distributes the work.

    Returns:
        The manifest.
    """
    folder = folder or path / "plan"
    folder.mkdir(exist_ok=True)
    shard_list = listed(path, folder, names)
    write_tables(shard_list, engine)
    size, digest, texts, tokens = write_index(shard_list, engine)
    sizes = [(path / name).stat().st_size for name in names]
    manifest = store.read_manifest(path) | {
        "captions": texts,
        "tokens": tokens,
        "bytes_per_caption": (sum(sizes) + size) / texts,
        **_errors(path, names),
        "index": {"file": store.INDEX, "bytes": size, "sha256": digest},
        "shards": [{"file": n, "bytes": size} for n, size in zip(names, sizes, strict=True)],
    }
    files.write_whole(path / store.MANIFEST, json.dumps(manifest, indent=1))
    for stray in {file.name for file in path.glob("shard-*.safetensors")} - set(names):
        (path / stray).unlink(missing_ok=True)
    return manifest


def listed(path: pathlib.Path, folder: pathlib.Path, names: Sequence[str]) -> Listed:
    """Write the list `names` of shards to a file in `folder`, and return the list as Listed.

    `path` is the folder of the store. The file's name contains a hash of the shards' names.
    """
    text = "\n".join(names)
    name = f"listed-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    files.write_whole(folder / name, text)
    return Listed(path, folder, name)


def whole(before: Listed, engine: Engine, *, verify: bool) -> list[str]:
    """Return the names of the undamaged shards in `before`, and write these shards' tables of keys.

    Damaged shards are deleted. With `verify`, the checksum of every text is compared. Otherwise,
    only the header and the file size are checked.
    """
    pairs = list(zip(before.names, before.tables, strict=True))
    present = files.present(before.tables)
    for name, table in pairs:
        if table in present and not shards.usable(before.path / name, False):
            table.unlink(missing_ok=True)  # The shard was lost after its table was written.
    write_tables(before, engine, verify=verify)
    present = files.present(before.tables)
    return [name for name, table in pairs if table in present]


def write_tables(shard_list: Listed, engine: Engine, *, verify: bool = False) -> None:
    """Write a table of keys for each undamaged shard, and delete damaged shards.

    With `verify`, the checksum of every text is compared. Otherwise, only the header and the file
    size are checked. Shards that have a table already are not checked at all.
    """
    paths = shard_list.tables
    write = _Tables(shard_list, verify)
    engine.fill(range(len(paths)), paths.__getitem__, write, name="listing")


class _Tables(NamedTuple):
    listed: Listed
    verify: bool

    def __call__(self, number: int) -> None:
        file = self.listed.path / self.listed.names[number]
        if not shards.usable(file, self.verify):
            return
        shard = safetensors_files.open_safetensors(file)
        rows = np.zeros(len(shard["keys"]), ROW)
        rows["key"] = np.array(shard["keys"]).view(sorted_tables.KEY)[:, 0]
        rows["first"], rows["tokens"] = shard["first"][:-1], np.diff(shard["first"])
        rows["check"] = shard["check"]
        sorted_tables.write(self.listed.tables[number], rows)


def write_index(shard_list: Listed, engine: Engine) -> tuple[int, str, int, int]:
    """Write the index file from the tables of keys.

    Returns:
        The size of the file in bytes, its SHA-256 in hexadecimal, and the numbers of texts and of
        tokens in the store.
    """
    total = sum(path.stat().st_size for path in shard_list.tables) // ROW.itemsize
    ranges = range(sorted_tables.num_ranges(total))
    engine.fill(ranges, shard_list.part, _Parts(shard_list, len(ranges)), name="index")
    parts = [sorted_tables.read(shard_list.part(number), _ENTRY) for number in ranges]
    texts = sum(map(len, parts))
    head = _header(texts)
    digest, size = hashlib.sha256(head), len(head)
    with files.whole(shard_list.path / store.INDEX) as temporary, temporary.open("wb") as file:
        file.write(head)
        for name in _columns():
            for part in parts:
                content = np.ascontiguousarray(part[name]).tobytes()
                digest.update(content)
                size += file.write(content)
    return size, digest.hexdigest(), texts, sum(int(part["tokens"].sum()) for part in parts)


class _Parts(NamedTuple):
    listed: Listed
    ranges: int

    def __call__(self, number: int) -> None:
        """Write the index entries of one key range, sorted by key.

        If several shards hold a key, the entry names the first of these shards.
        """
        cut = lambda path: sorted_tables.read_range([path], ROW, number, self.ranges)
        parts = []
        for shard, path in enumerate(self.listed.tables):
            rows = cut(path)
            entries = np.zeros(len(rows), _ENTRY)
            for field in ROW.names or ():
                entries[field] = rows[field]
            entries["shard"] = shard
            parts.append(entries)
        rows = sorted_tables.first_of_each(np.concatenate(parts))
        files.write_whole(self.listed.part(number), rows.tobytes())


def _errors(path: pathlib.Path, names: Sequence[str]) -> dict[str, float]:
    """Return the quantisation errors of the shards `names`, combined into entries of the manifest.

    The mean error is weighted by the number of tokens in each shard.
    """
    errors, weights = [], []
    for name in names:
        shard = safetensors_files.open_safetensors(path / name)
        errors.append(np.array(shard["errors"]))
        weights.append(max(1, int(shard["first"][-1])))
    errors = np.array(errors)
    return {
        "mean_relative_error": float(np.average(errors[:, 0], weights=weights)),
        "largest_relative_error": float(errors[:, 1].max()),
        "least_cosine": float(errors[:, 2].min()),
    }


def _columns() -> list[str]:
    """Return the index's field names in safetensors' order: widest type first, then by name."""
    width = lambda name: 1 if name == "key" else _ENTRY[name].itemsize
    return sorted(_ENTRY.names or (), key=lambda name: (-width(name), name))


def _header(texts: int) -> bytes:
    """Return the safetensors header of an index file with `texts` entries."""
    entries, end = {}, 0
    for name in _columns():
        start, end = end, end + texts * _ENTRY[name].itemsize
        kind = {"dtype": "U8", "shape": [texts, store.KEY_SIZE]}
        if name != "key":
            kind = {"dtype": _TYPES[_ENTRY[name].str[1:]], "shape": [texts]}
        entries["keys" if name == "key" else name] = {**kind, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
