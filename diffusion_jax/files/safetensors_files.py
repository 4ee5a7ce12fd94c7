"""Map the arrays of safetensors files into memory, without reading them, in files and buckets.

The library safetensors cannot return arrays of bfloat16 and float8 as NumPy arrays.
"""

import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusion_jax import files
from diffusion_jax.files import untrusted
from diffusion_jax.files.remote import Remote

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
}


def map_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Map a safetensors file into memory, and return its arrays, keyed by name.

    Raises:
        ValueError: The file is damaged.
    """
    start, entries, _ = _read_header(pathlib.Path(path))
    data = np.memmap(path, np.uint8, mode="r")[start:] if entries else np.empty(0)
    part = lambda entry: data[slice(*entry["data_offsets"])]
    return {name: _view(part(e), e, f"{name} in {path}") for name, e in entries.items()}


def open_safetensors(path: pathlib.Path) -> Mapping[str, np.ndarray]:
    """Open a safetensors file, and return its arrays, keyed by name.

    A local file is mapped into memory. An array in a bucket is read each time it is accessed.

    Raises:
        ValueError: The file is damaged.
    """
    remote_path = files.store_path(path)
    return _Ranges(remote_path) if remote_path else map_safetensors(path)


class _Ranges(Mapping[str, np.ndarray]):
    def __init__(self, path: Remote) -> None:
        self._path = path
        self._start, self._entries, _ = _read_header(path)

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        first, last = (self._start + offset for offset in entry["data_offsets"])
        data = np.frombuffer(self._path.read_range(first, last), np.uint8)
        return _view(data, entry, f"{name} in {self._path}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises ValueError if the file is damaged."""
    return _read_header(pathlib.Path(path))[2]


def offset_of(path: pathlib.Path, name: str) -> int:
    """Return where the values of an array begin in a safetensors file, in bytes."""
    start, entries, _ = _read_header(path)
    return start + entries[name]["data_offsets"][0]


def _read_header(path: pathlib.Path) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return the offset of the data in a safetensors file, the entry of each array, and metadata.

    The entries are keyed by the arrays' names.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if 8 + length <= size else b""
    try:
        entries = untrusted.parse_json(header)
        metadata = entries.pop("__metadata__", None) or {}
        ends = [8 + length + entry["data_offsets"][1] for entry in entries.values()]
        unsound = [name for name, entry in entries.items() if not _is_sound(entry)]
    except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: download it again") from error
    if unsound:
        raise ValueError(
            f"{path} is damaged, because the size and the shape of its array "
            f"{unsound[0]} do not match: download the file again"
        )
    if max(ends, default=0) > size:
        raise ValueError(f"{path} ends after {size} of {max(ends)} bytes: download it again")
    return 8 + length, entries, metadata


def _is_sound(entry: Mapping[str, Any]) -> bool:
    """Return whether an array's byte range in a file matches its shape.

    For unknown types, it only checks that the offsets are in order and no number is negative.
    """
    (start, end), shape = entry["data_offsets"], entry["shape"]
    width = np.dtype(_DTYPES.get(entry["dtype"], np.void)).itemsize
    smallest = min((start, *shape)) if shape else start
    has_size = not width or math.prod(shape) * width == end - start
    return smallest >= 0 and start <= end and has_size


def _view(data: np.ndarray, entry: Mapping[str, Any], name: str) -> np.ndarray:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the unknown type {entry['dtype']}: convert it to one of {', '.join(_DTYPES)}")
    return data.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
