"""Store tables of rows sorted by a key, one file per table, and read ranges of keys from them.

With tables, rows with equal keys in different shards of a large data set are found without loading
the whole data set: each shard has a table, and a worker reads one range of keys from all tables. A
key is 16 bytes of a hash, so ranges of equal width hold about the same number of rows. A file holds
the bytes of a structured numpy array, without a header. The array's field "key" has the type KEY. A
table in a bucket is copied as a whole, once per process.
"""

import bisect
import pathlib
from collections.abc import Iterable

import numpy as np

from diffusion_jax import files

KEY_SIZE = 16
KEY = np.dtype(f"S{KEY_SIZE}")
_ROWS = 2**21  # Average number of rows per range.


def write(path: pathlib.Path, rows: np.ndarray) -> None:
    """Write a table of rows, sorted by key. Rows with equal keys keep their order."""
    files.write_whole(path, rows[np.argsort(rows["key"], kind="stable")].tobytes())


def read(path: pathlib.Path, dtype: np.dtype) -> np.ndarray:
    """Return the rows of a table as a memory-mapped array of type `dtype`, sorted by key."""
    path = files.cached(path)
    if not path.stat().st_size:  # An empty file cannot be mapped.
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r")


def num_ranges(rows: int) -> int:
    """Return the number of key ranges to use for tables with `rows` rows in total."""
    return max(1, -(-rows // _ROWS))


def read_range(paths: Iterable[pathlib.Path], dtype: np.dtype, number: int, count: int) -> np.ndarray:
    """Return the rows of key range `number` (from 0 to count - 1), concatenated over all tables."""
    bounds = [_bound(number, count), _bound(number + 1, count)]
    parts = [np.zeros(0, dtype)]
    for path in paths:
        keys = (rows := read(path, dtype))["key"]
        at = [bisect.bisect_left(keys, bound) if bound else len(keys) for bound in bounds]
        parts.append(np.array(rows[0 if number == 0 else at[0] : at[1]]))
    return np.concatenate(parts)


def first_of_each(rows: np.ndarray) -> np.ndarray:
    """Return one row for each distinct key: the first in `rows`. The result is sorted by key."""
    ordered = rows[np.argsort(rows["key"], kind="stable")]
    keys = ordered["key"]
    return ordered[np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)]]


def _bound(number: int, count: int) -> bytes:
    """Return the lowest key of range `number`, or b"" if `number` is 0 or `count`."""
    least = -(-number * 2**64 // count)
    return b"" if number == count else least.to_bytes(8, "big").rstrip(b"\0")
