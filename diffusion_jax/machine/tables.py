"""Tables of rows sorted by a key, a file each, read by ranges of keys.

By them the shards of a large set meet without anybody who holds all of it: each shard writes a
table, and whoever works on a range of keys reads that range of all tables. Keys are 16 bytes of a
hash, so that ranges of one width hold about as many rows each. Files are plain rows of a numpy
type whose field "key" is KEY. In a bucket each process reads a table once, whole.
"""

import bisect
import pathlib
from collections.abc import Iterable

import numpy as np

from diffusion_jax.machine import files

KEY_SIZE = 16
KEY = np.dtype(f"S{KEY_SIZE}")
_ROWS = 2**21  # Of a range, on average.


def write(path: pathlib.Path, rows: np.ndarray) -> None:
    """A table of rows in any order; those of one key keep theirs."""
    files.write_whole(path, rows[np.argsort(rows["key"], kind="stable")].tobytes())


def read(path: pathlib.Path, dtype: np.dtype) -> np.ndarray:
    """The rows of a file, mapped into memory."""
    path = files.kept(path)
    if not path.stat().st_size:  # Nothing cannot be mapped.
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r")


def num_ranges(rows: int) -> int:
    """How many ranges tables of so many rows in all are read by."""
    return max(1, -(-rows // _ROWS))


def read_range(
    paths: Iterable[pathlib.Path], dtype: np.dtype, number: int, count: int
) -> np.ndarray:
    """The rows of range `number` of `count`, of one table after the other."""
    bounds = [_bound(number, count), _bound(number + 1, count)]
    parts = [np.zeros(0, dtype)]
    for path in paths:
        keys = (rows := read(path, dtype))["key"]
        at = [bisect.bisect_left(keys, bound) if bound else len(keys) for bound in bounds]
        parts.append(np.array(rows[0 if number == 0 else at[0] : at[1]]))
    return np.concatenate(parts)


def range_of(key: bytes, count: int) -> int:
    """The number of the range, of `count`, that a key is in."""
    return int.from_bytes(key[:8].ljust(8, b"\0"), "big") * count // 2**64


def first_of_each(rows: np.ndarray) -> np.ndarray:
    """The first row of each key, sorted by the keys."""
    ordered = rows[np.argsort(rows["key"], kind="stable")]
    keys = ordered["key"]
    return ordered[np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)]]


def _bound(number: int, count: int) -> bytes:
    """The least key of a range, as numpy shows it; empty for the first and past the last."""
    least = -(-number * 2**64 // count)
    return b"" if number == count else least.to_bytes(8, "big").rstrip(b"\0")
