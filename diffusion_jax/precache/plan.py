"""Find the captions that a store does not hold yet, and divide them into shards."""

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from diffusion_jax.data.pictures import Pictures
from diffusion_jax.machine import files, tables
from diffusion_jax.precache import index, store

_CHUNK = 2**16  # Captions per file of keys.
_NUMBER = np.dtype(np.int64)
_ROW = np.dtype([("key", tables.KEY), ("number", np.int64)])
_READ = 256  # Captions that a thread reads at a time.


class Captions(NamedTuple):
    """A list of captions: first `prompts`, then the first `num_data` captions of `data`."""

    prompts: Sequence[str]
    """The config's prompts, followed by the lines of a file of captions, if one is used."""
    data: Pictures | None
    num_data: int
    threads: int
    """Number of threads that read captions from `data`."""

    def __len__(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the number of captions, including repeated ones."""
        return len(self.prompts) + self.num_data

    def read(self, numbers: Int[np.ndarray, "N"]) -> list[Any]:
        """Return the captions with these sorted indices. Several threads read them."""
        with ThreadPoolExecutor(max(1, self.threads)) as threads:
            parts = [numbers[i : i + _READ] for i in range(0, len(numbers), _READ)]
            return [text for part in threads.map(self._read, parts) for text in part]

    def _read(self, numbers: Int[np.ndarray, "N"]) -> list[Any]:
        first = len(self.prompts)  # Index of the data set's first caption.
        texts = [self.prompts[i] for i in numbers[numbers < first].tolist()]
        if self.data is None or (numbers < first).all():
            return texts
        return texts + list(self.data.texts(numbers[numbers >= first] - first))


class Plan(NamedTuple):
    """The temporary files that divide the captions to encode into shards.

    Captions that repeat an earlier caption or are already in the store are not encoded. To find
    them without loading all captions, each chunk of captions first becomes a table of keys (hashes
    of captions). Then each range of keys is compared across all tables (see machine/tables.py).
    Each `size` remaining captions, in order, become a shard of the store.
    """

    folder: pathlib.Path
    captions: int
    """The number of all captions."""
    size: int
    """The number of captions per shard."""

    @property
    def chunks(self) -> range:
        """Return the indices of all chunks; a chunk is 65,536 consecutive captions."""
        return range(-(-self.captions // _CHUNK))

    @property
    def ranges(self) -> range:
        """Return the indices of all ranges of keys; keys are hashes of captions."""
        return range(tables.num_ranges(self.captions))

    @property
    def counts(self) -> Int[np.ndarray, "_"]:
        """Return, for each chunk, how many captions to encode are in earlier chunks.

        One more item at the end holds the total number of captions to encode.
        """
        return tables.read(self.folder / "counts", _NUMBER)

    def numbers(self, chunk: int) -> Int[np.ndarray, "N"]:
        """Return the indices of the captions of a chunk."""
        return np.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, self.captions))

    def keys(self, chunk: int) -> pathlib.Path:
        """Return the path of the table of keys (hashes) of the captions in a chunk."""
        return self.folder / f"keys-{chunk:08}"

    def new_captions(self, part: int) -> pathlib.Path:
        """Return the path of the file that lists the captions to encode in key range `part`.

        The file holds sorted int64 indices of the captions whose keys are in this range.
        """
        return self.folder / f"new-{part:08}"

    def name(self, shard: int) -> pathlib.Path:
        """Return the path of a file that holds the file name of a shard in the store.

        The file exists once the shard is encoded.
        """
        return self.folder / f"name-{shard:08}"


def write_keys(plan: Plan, keys: Shaped[np.ndarray, "N"], chunk: int) -> None:
    """Write the table of the distinct keys in a chunk.

    `keys` holds the key of each caption in the chunk, in order. A row of the table holds a key, and
    the index of the chunk's first caption with this key.
    """
    rows = np.zeros(len(keys), _ROW)
    rows["key"], rows["number"] = keys, plan.numbers(chunk)
    tables.write(plan.keys(chunk), tables.first_of_each(rows))


def write_new_captions(plan: Plan, held: index.Listed, part: int) -> None:
    """Write the file `plan.new_captions(part)`, which lists the captions to encode in a key range.

    For each key in the range that is not in the shards `held`, the file lists the first caption
    with this key. Only one range of keys, about 300 MB, is in memory.
    """
    ranged = lambda paths, dtype: tables.read_range(paths, dtype, part, len(plan.ranges))
    first = tables.first_of_each(ranged(map(plan.keys, plan.chunks), _ROW))
    held_keys = ranged(sorted(files.present(held.tables)), index.ROW)["key"]
    numbers = np.sort(first["number"][~np.isin(first["key"], held_keys)])
    files.write_whole(plan.new_captions(part), numbers.tobytes())


def write_counts(plan: Plan) -> int:
    """Write the file that Plan.counts reads, and return the total number of captions to encode."""
    counts = np.zeros(len(plan.chunks), np.int64)
    for part in plan.ranges:
        numbers = tables.read(plan.new_captions(part), _NUMBER)
        counts += np.bincount(numbers // _CHUNK, minlength=len(counts))
    files.write_whole(plan.folder / "counts", np.cumsum([0, *counts.tolist()]).tobytes())
    return int(counts.sum())


def to_encode(plan: Plan, shard: int) -> Int[np.ndarray, "M"]:
    """Return the sorted indices of the captions that a shard will hold."""
    counts, first = plan.counts, shard * plan.size
    chunk = int(np.searchsorted(counts, first, side="right")) - 1
    end = int(np.searchsorted(counts, first + plan.size))
    parts = [tables.read(plan.new_captions(part), _NUMBER) for part in plan.ranges]
    cut = [rows[slice(*np.searchsorted(rows, [chunk * _CHUNK, end * _CHUNK]))] for rows in parts]
    return np.sort(np.concatenate(cut))[first - counts[chunk] :][: plan.size]


def open_plan(
    path: pathlib.Path, source: Mapping[str, Any], identity: store.Identity, *more: Any
) -> pathlib.Path:
    """Create and return the folder of a plan's temporary files.

    The folder is path/plan/HASH, where `path` is the folder of the store. HASH is a hash of the
    other arguments: `source` describes the captions, `identity` describes the text encoder, and
    `more` are further values that determine the plan.
    """
    text = json.dumps([source, identity, *more], sort_keys=True, default=str)
    folder = path / "plan" / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def remove(path: pathlib.Path) -> None:
    """Delete all temporary files of the store at `path`."""
    files.remove_tree(path / "plan")
    for file in path.glob(".shard-*.tmp"):  # Left by workers that were killed.
        file.unlink(missing_ok=True)


def free_bytes(path: pathlib.Path) -> int | None:
    """Return the number of free bytes on the disk of a folder, or None for a bucket.

    If the folder does not exist, its nearest existing parent counts.
    """
    if files.remote(path):
        return None
    path = path.absolute()
    while not path.exists():
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize
