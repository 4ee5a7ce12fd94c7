"""Columns of values in Arrow files that are mapped into memory, of which tables consist.

A file holds one record batch, uncompressed, so that numpy reads its buffers without a copy. Its
name contains a hash of its values.
"""

import array
import hashlib
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from diffusion_jax import files


class Lists:
    """A mapped column of lists."""

    def __init__(self, firsts: Int[np.ndarray, "L"], values: np.ndarray):
        self.firsts, self.values = firsts, values

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def __getitem__(self, row: int) -> Any:
        return self.values[self.firsts[row] : self.firsts[row + 1]].tolist()


class Bytes(Lists):
    """A mapped column of large_binary."""

    def __getitem__(self, row: int) -> bytes:
        return self.values[self.firsts[row] : self.firsts[row + 1]].tobytes()


class Buffer:
    """Collects the values of a column of bytes."""

    def __init__(self):
        self._ends, self._data = array.array("q", [0]), bytearray()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, value: bytes) -> None:
        """Add a value."""
        self._data += value
        self._ends.append(len(self._data))

    def column(self) -> Any:
        """Return the values as a column of Arrow."""
        import pyarrow  # Slow to import, and not needed to draw.

        buffers = [None, pyarrow.py_buffer(self._ends), pyarrow.py_buffer(bytes(self._data))]
        return pyarrow.Array.from_buffers(pyarrow.large_binary(), len(self), buffers)


_ARROW = {"B": "uint8", "i": "int32", "q": "int64", "Q": "uint64", "d": "float64"}
"""Arrow's names of the types of array.array."""


def flat(columns: Mapping[str, array.array]) -> dict[str, Any]:
    """Return arrays of numbers as columns of Arrow."""
    return {name: _numbers(column) for name, column in columns.items()}


def _numbers(values: array.array) -> Any:
    import pyarrow

    kind = getattr(pyarrow, _ARROW[values.typecode])()
    return pyarrow.Array.from_buffers(kind, len(values), [None, pyarrow.py_buffer(values)])


def lists(ends: array.array, values: array.array) -> Any:
    """Return a column of lists of numbers. `ends` holds 0 and the end of each list in `values`."""
    import pyarrow

    inner, buffers = _numbers(values), [None, pyarrow.py_buffer(ends)]
    kind = pyarrow.list_(inner.type)
    return pyarrow.Array.from_buffers(kind, len(ends) - 1, buffers, children=[inner])


def store(home: Any, kind: str, columns: Mapping[str, Any]) -> tuple[str, int, int]:
    """Write the columns of a file, and return its name, size and CRC-32.

    Args:
        home: the folder of the file, or a dictionary that gets its content.
        kind: the kind of the file, a part of its name.
        columns: the columns of Arrow, keyed by name.
    """
    import pyarrow

    batch = pyarrow.record_batch(list(columns.values()), names=list(columns))
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = sink.getvalue()
    digest = hashlib.blake2b(digest_size=12)  # Of the values: versions of Arrow write other bytes.
    for name, column in columns.items():
        digest.update(f"{name} {column.type}\n".encode())
        for buffer in filter(None, column.buffers()):
            digest.update(buffer)
    of = f"{digest.hexdigest()}.{kind}.arrow", content.size, zlib.crc32(content)
    try:
        open_columns(home, of)
    except (OSError, ValueError, KeyError):  # It is missing or damaged.
        if isinstance(home, dict):
            home[of[0]] = content.to_pybytes()
        else:
            files.write_whole(home / of[0], content.to_pybytes())
    return of


def open_columns(home: Any, of: Sequence[Any]) -> Mapping[str, Any]:
    """Map the columns of the Arrow file whose name, size and CRC-32 are `of`.

    `home` is its folder, or a dictionary with its content. Raises ValueError if the size or CRC-32
    is another one, and OSError or KeyError if there is no such file.
    """
    import pyarrow

    name, size, crc = of
    if isinstance(home, Mapping):
        mapped = pyarrow.py_buffer(home[name])
    else:
        path = files.cached(files.path(home) / name)
        mapped = pyarrow.memory_map(os.fspath(path)).read_buffer()
    if (mapped.size, zlib.crc32(mapped)) != (size, crc):
        raise ValueError(f"{home}/{name} has changed since it was written: import the data again")
    with pyarrow.ipc.open_file(mapped) as reader:
        batch = reader.get_batch(0)
    return {name: _view(batch.column(name)) for name in batch.schema.names}


def _view(column: Any) -> Any:
    """Return a column of Arrow as an object that numpy indexes, without a copy."""
    import pyarrow

    _, *buffers = column.buffers()
    view = lambda buffer, kind: np.frombuffer(buffer or b"", kind)
    if pyarrow.types.is_large_binary(column.type):
        return Bytes(view(buffers[0], np.int64), view(buffers[1], np.uint8))
    if pyarrow.types.is_list(column.type):
        values = view(buffers[2], column.type.value_type.to_pandas_dtype())
        return Lists(view(buffers[0], np.int32), values)
    return view(buffers[0], column.type.to_pandas_dtype())
