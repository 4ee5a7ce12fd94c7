"""Arrays from the files of torch and NeMo: read without torch, and without running what they hold.

A torch checkpoint is a zip of a pickle and of raw arrays, or, before torch 1.6, some pickles before
the raw arrays. A pickle can name any function to be called when it is opened. Here it is given
none: names stand for arrays and dictionaries, or for nothing at all, so that settings and
optimizers that lie beside the weights cannot hurt.
"""

import collections
import contextlib
import functools
import os
import pathlib
import pickle
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from diffusion_jax.machine import files
from diffusion_jax.weights import torch_weights

TORCH = (".ckpt", ".pt", ".pth", ".bin")
SUFFIXES = (*TORCH, ".nemo", ".safetensors", ".npz")
_NEMO_WEIGHTS, _NEMO_CONFIG = "model_weights.ckpt", "model_config.yaml"


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint of torch or Lightning, a .nemo, a .safetensors or an .npz file.

    Of a checkpoint's contents those under "state_dict" are read, if it has these.
    FileNotFoundError, or ValueError for another or damaged format.
    """
    path = files.local(path)
    if path.suffix not in SUFFIXES:
        if not path.exists():
            raise FileNotFoundError(f"no file {path}, and no folder")
        raise ValueError(f"cannot read {path}: its name must end in {', '.join(SUFFIXES)}")
    if path.suffix in (".safetensors", ".npz"):
        return torch_weights.read(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    if path.suffix != ".nemo":
        return map_state_dict(path, check=True)
    with _readable(path), _nemo_member(path, _NEMO_WEIGHTS) as file:
        return _map_torch(file, check=True)


def map_state_dict(path: str | os.PathLike[str], check: bool = False) -> dict[str, np.ndarray]:
    """The arrays of a torch checkpoint, mapped into memory: read only where they are used.

    `check` reads all of them once and compares their checksums, which older files lack.
    FileNotFoundError, or ValueError for another or damaged format.
    """
    with _readable(path), open(path, "rb") as file:
        return _map_torch(file, check)


def read_nemo_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The model's config that lies in a .nemo file; ValueError if there is none."""
    import yaml  # Only where such a file is read.

    with _readable(path), _nemo_member(files.local(path), _NEMO_CONFIG) as file:
        config = yaml.safe_load(file)
        if not isinstance(config, dict):
            raise ValueError(f"{_NEMO_CONFIG} holds no mapping")
        return config


class _Storage(NamedTuple):
    """A flat array of the zip."""

    name: str
    dtype: np.dtype


class _Tensor(NamedTuple):
    """A view of a storage, in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Nothing:
    """Stands for every class and function that a pickle names; takes all, does nothing."""

    def __new__(cls, *_, **__):
        return super().__new__(cls)

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, _):
        pass

    def __setitem__(self, *_):
        pass

    def append(self, _):
        pass

    def extend(self, _):
        pass


def _rebuild_tensor(storage, offset, shape, strides, *_) -> _Tensor:
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


_KNOWN: Mapping[tuple[str, str], Callable] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
}
_STORAGES = {
    "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16,
    "BFloat16Storage": jnp.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32,
    "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Makes arrays, dictionaries and what pickles make of themselves; calls nothing of the file."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return np.dtype(_STORAGES[name])
        return _KNOWN.get((module, name), _Nothing)

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, name, *_ = pid
        if not isinstance(dtype, np.dtype):
            raise ValueError(f"storage {name} is of a type that is not known here")
        return self.storages.setdefault(str(name), _Storage(str(name), dtype))


def _map_torch(file: IO[bytes], check: bool) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(file):
        return _map_old(file)
    with zipfile.ZipFile(file) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"it holds {len(pickles)} data.pkl, where torch writes one")
        root = pickles[0].removesuffix("data.pkl")
        order = f"{root}byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise ValueError("it is from a big-endian machine, which is not read here")
        with archive.open(pickles[0]) as pickled:
            content = _Unpickler(pickled).load()
        data = np.memmap(file, np.uint8, mode="r")
        member = functools.cache(lambda name: _member(archive, f"{root}data/{name}", data, check))
        return _arrays(content, member)


def _member(archive: zipfile.ZipFile, name: str, data: np.ndarray, check: bool) -> np.ndarray:
    """The bytes of a file in a zip, whose whole is mapped in `data`."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED:  # Not by torch.
        return np.frombuffer(archive.read(name), np.uint8)
    at = info.header_offset
    lengths = data[at + 26 : at + 30].view(np.uint16)  # Of the name and what pads it.
    start = at + 30 + int(lengths.sum())
    content = data[start : start + info.file_size]
    if check and zlib.crc32(content.data) != info.CRC:
        raise ValueError(f"{name} in it is damaged: download it again")
    return content


_OLD_MAGIC = 0x1950A86A20F9469CFC6C


def _map_old(file: IO[bytes]) -> dict[str, np.ndarray]:
    """Before 1.6: magic, version, machine, content, keys of storages, then counts and values."""
    try:
        file.seek(0)
        magic = _Unpickler(file).load()
    except Exception:
        magic = None
    if magic != _OLD_MAGIC:
        raise ValueError("it is neither a zip nor an older file of torch's, or it is damaged")
    _, machine = _Unpickler(file).load(), _Unpickler(file).load()
    if not machine.get("little_endian"):
        raise ValueError("it is from a big-endian machine, which is not read here")
    pickled = _Unpickler(file)
    content, keys = pickled.load(), _Unpickler(file).load()
    where, at, data = {}, file.tell(), np.memmap(file, np.uint8, mode="r")
    for key in keys:
        (count,) = data[at : at + 8].view(np.int64)
        where[key] = slice(at + 8, at + 8 + int(count) * pickled.storages[key].dtype.itemsize)
        at = where[key].stop
    if at > len(data):
        raise ValueError("it ends amid its arrays: download it again")
    return _arrays(content, lambda name: data[where[name]])


def _arrays(content: Any, member: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name: _array(tensor, member(tensor.storage.name))
        for name, tensor in _state_dict(content).items()
    }


def _state_dict(content: Any) -> Mapping[str, _Tensor]:
    """The names and arrays of a checkpoint; other values beside the arrays are left out."""
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    values = content.items() if isinstance(content, Mapping) else ()
    tensors = {name: value for name, value in values if isinstance(value, _Tensor)}
    if not tensors:
        keys = sorted(map(str, content))[:8] if isinstance(content, Mapping) else type(content)
        raise ValueError(f"it holds no state dict of arrays, but {keys}")
    return tensors


def _array(tensor: _Tensor, content: np.ndarray) -> np.ndarray:
    """What the tensor sees of its storage's bytes; ValueError if it would see more."""
    storage, offset, shape, strides = tensor
    size = storage.dtype.itemsize
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if min((offset, *shape, *strides)) < 0 or (0 not in shape and (last + 1) * size > len(content)):
        raise ValueError(f"an array of shape {shape} reaches beyond its storage {storage.name}")
    byte_strides = [stride * size for stride in strides]
    return np.ndarray(shape, storage.dtype, content, offset * size, byte_strides)


@contextlib.contextmanager
def _nemo_member(path: pathlib.Path, name: str) -> Iterator[IO[bytes]]:
    """A file of a .nemo, which is a tar, perhaps compressed; seekable."""
    with tarfile.open(path, "r:*") as tar, tempfile.TemporaryFile() as copy:
        members = [m for m in tar.getmembers() if pathlib.PurePosixPath(m.name).name == name]
        content = tar.extractfile(members[0]) if len(members) == 1 else None
        if content is None:
            raise ValueError(
                f"it holds {len(members)} files {name}, where one is expected: models that NeMo "
                "split over several devices must be merged first"
            )
        shutil.copyfileobj(content, copy)
        copy.seek(0)
        yield copy


@contextlib.contextmanager
def _readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever goes wrong with a file is a ValueError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # Damaged files fail in many ways of their own.
        raise ValueError(f"cannot read {path}: {type(error).__name__}: {error}") from error
