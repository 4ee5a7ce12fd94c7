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

from diffusion_jax import files
from diffusion_jax.data import captions
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.files import sorted_tables
from diffusion_jax.precache import index, store

_CHUNK = 2**16  # Captions per file of keys.
_NUMBER = np.dtype(np.int64)
_ROW = np.dtype([("key", sorted_tables.KEY), ("number", np.int64)])
_READ = 256  # Items that a thread reads at a time.
_SLOTS = 2**10  # The largest number of captions of a picture.


class CaptionList(NamedTuple):
    """A list of items that have captions: `prompts`, then the first `num_data` records of `data`.

    Caption j of item i has the number 1024 i + j.
    """

    prompts: Sequence[str]
    """The config's prompts, followed by the lines of a file of captions, if one is used."""
    data: Pictures | None
    num_data: int
    threads: int
    """Number of threads that read captions from `data`."""

    def __len__(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the number of items."""
        return len(self.prompts) + self.num_data

    def of_items(self, items: Int[np.ndarray, "N"]) -> tuple[Int[np.ndarray, "M"], list[Any]]:
        """Return (numbers, captions) of all captions of the items with these sorted indices.

        Several threads read them. Raises ValueError if a picture has more than 1,024 captions.
        """
        with ThreadPoolExecutor(max(1, self.threads)) as threads:
            parts = [items[i : i + _READ] for i in range(0, len(items), _READ)]
            texts = [text for part in threads.map(self._read, parts) for text in part]
        several = [captions.every(text) for text in texts]
        if (most := max(map(len, several), default=0)) > _SLOTS:
            raise ValueError(f"a picture has {most} captions: a store takes up to {_SLOTS}")
        numbers = [i * _SLOTS + j for i, t in zip(items.tolist(), several, strict=True)
                   for j in range(len(t))]  # fmt: skip
        return np.array(numbers, np.int64), [text for texts in several for text in texts]

    def read(self, numbers: Int[np.ndarray, "N"]) -> list[Any]:
        """Return the captions with these numbers."""
        texts = dict(zip(*self.of_items(np.unique(numbers // _SLOTS)), strict=True))
        return [texts[number] for number in numbers.tolist()]

    def _read(self, items: Int[np.ndarray, "N"]) -> list[Any]:
        first = len(self.prompts)  # Index of the data set's first record.
        texts = [self.prompts[i] for i in items[items < first].tolist()]
        if self.data is None or (items < first).all():
            return texts
        return texts + list(self.data.texts(items[items >= first] - first))


class Plan(NamedTuple):
    """The temporary files that divide the captions to encode into shards.

    Captions that repeat an earlier caption or are already in the store are not encoded. To find
    them without loading all captions, each chunk of captions first becomes a table of keys (hashes
    of captions). Then each range of keys is compared across all tables (files/sorted_tables.py).
    Every `size` consecutive captions that remain become a shard of the store.
    """

    folder: pathlib.Path
    items: int
    """The number of items that have captions; see Captions."""
    size: int
    """The number of captions per shard."""

    @property
    def chunks(self) -> range:
        """Return the indices of all chunks; a chunk is 65,536 consecutive items."""
        return range(-(-self.items // _CHUNK))

    @property
    def ranges(self) -> range:
        """Return the indices of all ranges of keys; keys are hashes of captions."""
        return range(sorted_tables.num_ranges(self.items))

    @property
    def counts(self) -> Int[np.ndarray, "_"]:
        """Return, for each chunk, how many captions to encode are in earlier chunks.

        One more item at the end holds the total number of captions to encode.
        """
        return sorted_tables.read(self.folder / "counts", _NUMBER)

    def chunk(self, chunk: int) -> Int[np.ndarray, "N"]:
        """Return the indices of the items of a chunk."""
        return np.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, self.items))

    def keys(self, chunk: int) -> pathlib.Path:
        """Return the path of the table of keys (hashes) of the captions in a chunk."""
        return self.folder / f"keys-{chunk:08}"

    def new_captions(self, part: int) -> pathlib.Path:
        """Return the path of the file that lists the captions to encode in key range `part`.

        The file holds the sorted int64 numbers of the captions whose keys are in this range.
        """
        return self.folder / f"new-{part:08}"

    def name(self, shard: int) -> pathlib.Path:
        """Return the path of a file that holds the file name of a shard in the store.

        The file exists once the shard is encoded.
        """
        return self.folder / f"name-{shard:08}"


def write_keys(
    plan: Plan, numbers: Int[np.ndarray, "N"], keys: Shaped[np.ndarray, "N"], chunk: int
) -> None:
    """Write the table of the distinct keys in a chunk.

    `numbers` and `keys` hold the number and the key of each caption in the chunk, in order. A row
    of the table holds a key, and the number of the chunk's first caption with this key.
    """
    rows = np.zeros(len(keys), _ROW)
    rows["key"], rows["number"] = keys, numbers
    sorted_tables.write(plan.keys(chunk), sorted_tables.first_of_each(rows))


def write_new_captions(plan: Plan, held: index.Listed, part: int) -> None:
    """Write the file `plan.new_captions(part)`, which lists the captions to encode in a key range.

    For each key in the range that is not in the shards `held`, the file lists the first caption
    with this key. Only one range of keys, about 300 MB, is in memory.
    """
    ranged = lambda paths, dtype: sorted_tables.read_range(paths, dtype, part, len(plan.ranges))
    first = sorted_tables.first_of_each(ranged(map(plan.keys, plan.chunks), _ROW))
    held_keys = ranged(sorted(files.present(held.tables)), index.ROW)["key"]
    numbers = np.sort(first["number"][~np.isin(first["key"], held_keys)])
    files.write_whole(plan.new_captions(part), numbers.tobytes())


def write_counts(plan: Plan) -> int:
    """Write the file that Plan.counts reads, and return the total number of captions to encode."""
    counts = np.zeros(len(plan.chunks), np.int64)
    for part in plan.ranges:
        numbers = sorted_tables.read(plan.new_captions(part), _NUMBER)
        counts += np.bincount(numbers // (_CHUNK * _SLOTS), minlength=len(counts))
    files.write_whole(plan.folder / "counts", np.cumsum([0, *counts.tolist()]).tobytes())
    return int(counts.sum())


def to_encode(plan: Plan, shard: int) -> Int[np.ndarray, "M"]:
    """Return the sorted numbers of the captions that a shard will hold."""
    counts, first = plan.counts, shard * plan.size
    chunk = int(np.searchsorted(counts, first, side="right")) - 1
    end = int(np.searchsorted(counts, first + plan.size))
    parts = [sorted_tables.read(plan.new_captions(part), _NUMBER) for part in plan.ranges]
    ends = np.array([chunk, end]) * _CHUNK * _SLOTS
    cut = [rows[slice(*np.searchsorted(rows, ends))] for rows in parts]
    return np.sort(np.concatenate(cut))[first - counts[chunk] :][: plan.size]


def open_plan(
    path: pathlib.Path, source: Mapping[str, Any], identity: store.Identity, *more: Any
) -> pathlib.Path:
    """Create and return the folder of a plan's temporary files.

    The folder is path/plan/HASH, where `path` is the folder of the store. HASH is a hash of the
    other arguments: `source` describes the captions, `identity` describes the text encoder, and
    `more` are further values that determine the plan.
    """
    text = json.dumps([_SLOTS, source, identity, *more], sort_keys=True, default=str)
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
    if files.store_path(path):
        return None
    path = path.absolute()
    while not path.exists():
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize
