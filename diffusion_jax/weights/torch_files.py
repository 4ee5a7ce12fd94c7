"""Read arrays from files of torch and NeMo, without torch and without executing code in them.

A torch checkpoint is a zip of a pickle and raw arrays. Before torch 1.6 it was several pickles
followed by the raw arrays. A pickle can name any function, which is called when the pickle is read.
This module resolves only the names of arrays and dictionaries. It replaces every other function or
class by a class that does nothing, so settings and optimizers in the file are harmless.
"""

import collections
import contextlib
import functools
import gzip
import io
import mmap
import os
import pathlib
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from diffusion_jax import files
from diffusion_jax.files import untrusted
from diffusion_jax.weights import file_kinds, flax_files, torch_weights

_NEMO_WEIGHTS, _NEMO_CONFIG = "model_weights.ckpt", "model_config.yaml"


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read the arrays of a torch checkpoint, or of a .nemo, .safetensors, .npz or Flax file.

    The file's content, not its name, shows its format, except for .nemo files. If a checkpoint has
    the key "state_dict", only the arrays under this key are read.

    Returns:
        The arrays, keyed by name.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged or has another format.
    """
    path = files.local(path)
    kind = file_kinds.kind_of(path)
    if kind in (file_kinds.SAFETENSORS, file_kinds.NPZ):
        return torch_weights.read(path)
    if kind == file_kinds.FLAX:
        return flax_files.read(path)
    if kind == file_kinds.TORCH:
        return map_state_dict(path, check=True)
    with untrusted.readable(path), _nemo_member(path, _NEMO_WEIGHTS) as file:
        return _map_torch(file, check=True)


def map_state_dict(path: str | os.PathLike[str], check: bool = False) -> dict[str, np.ndarray]:
    """Map the arrays of a torch checkpoint into memory, and return them, keyed by name.

    An array is read from the disk when it is used.

    Args:
        path: The file.
        check: Whether to read all arrays once and verify their checksums. Files written before
            torch 1.6 have no checksums.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged or has another format.
    """
    with untrusted.readable(path), open(path, "rb") as file:
        return _map_torch(file, check)


def read_nemo_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the model's config in a .nemo file. Raises ValueError if there is none."""
    import yaml  # Only needed for such files.

    with untrusted.readable(path), _nemo_member(files.local(path), _NEMO_CONFIG) as file:
        config = yaml.safe_load(file)
        if not isinstance(config, dict):
            raise ValueError(f"{_NEMO_CONFIG} does not hold a mapping")
        return config


class _Storage(NamedTuple):
    """A flat array in a torch file. Several tensors may share it."""

    name: str
    dtype: np.dtype


class _Tensor(NamedTuple):
    """A torch tensor: a view of a storage. The offset and the strides are numbers of elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Nothing:
    """A class that does nothing. It replaces all unknown classes and functions in a pickle."""

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


class _ParameterDict(dict):
    """torch.nn.ParameterDict: a module whose state holds its arrays under "_parameters"."""

    def __setstate__(self, state):
        self.update(state["_parameters"])


def _rebuild_tensor(storage, offset, shape, strides, *_) -> _Tensor:
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _rebuild_typed(storage, offset, shape, strides, requires_grad, hooks, dtype, *_) -> _Tensor:
    """Rebuild a tensor of a type that torch stores as bytes, such as float8."""
    if not isinstance(dtype, np.dtype):
        raise ValueError(f"the type of storage {storage.name} is not supported")
    return _rebuild_tensor(storage._replace(dtype=dtype), offset, shape, strides)


_FUNCTIONS: Mapping[tuple[str, str], Callable] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch.nn.modules.container", "ParameterDict"): _ParameterDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_typed,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
}
_STORAGES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": jnp.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
    "UntypedStorage": np.uint8,
    "float8_e4m3fn": jnp.float8_e4m3fn,
    "float8_e5m2": jnp.float8_e5m2,
}


class _Unpickler(untrusted.Unpickler):
    """An unpickler of arrays, dictionaries and plain values that calls only safe functions."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return np.dtype(_STORAGES[name])
        return _FUNCTIONS.get((module, name), _Nothing)

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, name, *_ = pid
        if not isinstance(dtype, np.dtype):
            raise ValueError(f"the type of storage {name} is not supported")
        return self.storages.setdefault(str(name), _Storage(str(name), dtype))


def _map_torch(file: IO[bytes], check: bool) -> dict[str, np.ndarray]:
    if not file.seek(0, os.SEEK_END):
        raise ValueError("the file is not a torch checkpoint: it is empty")
    if not zipfile.is_zipfile(file):
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _map_old(mapped, np.memmap(file, np.uint8, mode="r"))
    untrusted.check_archive(file)
    with zipfile.ZipFile(file) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(
                f"the zip holds {len(pickles)} files named data.pkl instead of one: save the "
                "weights again with torch.save"
            )
        root = pickles[0].removesuffix("data.pkl")
        order = f"{root}byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise ValueError("the file was written on a big-endian machine, which is not supported")
        content = _Unpickler(io.BytesIO(archive.read(pickles[0]))).load()
        data = np.memmap(file, np.uint8, mode="r")
        member = functools.cache(lambda name: _member(archive, f"{root}data/{name}", data, check))
        return _arrays(content, member)


def _member(archive: zipfile.ZipFile, name: str, data: np.ndarray, check: bool) -> np.ndarray:
    """Return the bytes of member `name` of a zip. `data` is the memory-mapped zip file.

    If `check` is True, raise ValueError unless the bytes match their checksum.
    """
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED:  # torch does not compress.
        return np.frombuffer(archive.read(name), np.uint8)
    header = info.header_offset
    lengths = data[header + 26 : header + 30].view(np.uint16)  # Lengths of the name and padding.
    start = header + 30 + int(lengths.sum())
    content = data[start : start + info.file_size]
    if check and zlib.crc32(content.data) != info.CRC:
        raise ValueError(f"{name} in the zip is damaged: download the file again")
    return content


_OLD_MAGIC = 0x1950A86A20F9469CFC6C


def _map_old(file: mmap.mmap, data: np.ndarray) -> dict[str, np.ndarray]:
    """Map a checkpoint from before torch 1.6, and return its arrays, keyed by name.

    The file holds five pickles: a magic number, the version, the machine, the content, and the keys
    of the arrays. The arrays follow. `data` is the memory-mapped file.
    """
    try:
        magic = _Unpickler(file).load()
    except Exception:
        magic = None
    if magic != _OLD_MAGIC:
        raise ValueError("the file is not a torch checkpoint, neither in zip format nor in the older format")
    _, machine = _Unpickler(file).load(), _Unpickler(file).load()
    if not machine.get("little_endian"):
        raise ValueError("the file was written on a big-endian machine, which is not supported")
    pickled = _Unpickler(file)
    content, keys = pickled.load(), _Unpickler(file).load()
    spans, start = {}, file.tell()
    for key in keys:
        (count,) = data[start : start + 8].view(np.int64)
        size = int(count) * pickled.storages[key].dtype.itemsize
        spans[key] = slice(start + 8, start + 8 + size)
        start = spans[key].stop
    if start > len(data):
        raise ValueError("the file is truncated: download it again")
    return _arrays(content, lambda name: data[spans[name]])


def _arrays(content: Any, member: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    return {name: _array(tensor, member(tensor.storage.name)) for name, tensor in _state_dict(content).items()}


def _state_dict(content: Any) -> Mapping[str, _Tensor]:
    """Return the tensors in a checkpoint's state dict, keyed by name. Leave out other values."""
    for key in ("state_dict", "string_to_param"):  # The second is textual inversion's.
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    values = content.items() if isinstance(content, Mapping) else ()
    values = enumerate(content) if isinstance(content, list | tuple) else values
    tensors = untrusted.once([(str(name), x) for name, x in values if isinstance(x, _Tensor)])
    if not tensors:
        keys = sorted(map(str, content))[:8] if isinstance(content, Mapping) else type(content)
        raise ValueError(f"the file holds {keys} instead of a state dict of arrays")
    return tensors


def _array(tensor: _Tensor, content: np.ndarray) -> np.ndarray:
    """Return a tensor as an array that is a view of `content`, the bytes of its storage.

    Raises ValueError if the tensor does not fit in the storage.
    """
    storage, offset, shape, strides = tensor
    size = storage.dtype.itemsize
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if min((offset, *shape, *strides)) < 0 or (0 not in shape and (last + 1) * size > len(content)):
        raise ValueError(
            f"the file is damaged: an array of shape {shape} does not fit in its storage "
            f"{storage.name}; download the file again"
        )
    byte_strides = [stride * size for stride in strides]
    return np.ndarray(shape, storage.dtype, content, offset * size, byte_strides)


@contextlib.contextmanager
def _nemo_member(path: pathlib.Path, name: str) -> Iterator[IO[bytes]]:
    """Open the file called `name` in a .nemo file, which is a tar that may be gzipped.

    The opened file is a temporary copy, which can seek.
    """
    with open(path, "rb") as file:
        packed, is_gzip = path.stat().st_size, file.read(2) == b"\x1f\x8b"
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context((gzip.open if is_gzip else open)(path, "rb"))
        unpacked: Any = untrusted.Unpacked(opened, packed)
        tar = stack.enter_context(tarfile.open(fileobj=unpacked, mode="r:"))
        copy = stack.enter_context(tempfile.TemporaryFile())
        files_in_tar = (m for m in tar if m.isreg() and not m.issparse())
        members = [m for m in files_in_tar if pathlib.PurePosixPath(m.name).name == name]
        content = tar.extractfile(members[0]) if len(members) == 1 else None
        if content is None:
            raise ValueError(
                f"the .nemo file holds {len(members)} files named {name}, not one: if NeMo "
                "split the model over several devices, merge the parts first"
            )
        shutil.copyfileobj(content, copy)
        copy.seek(0)
        yield copy
