"""Pretrained weights: found in a folder or on the Hugging Face Hub, read only where they are used.

A file is mapped into memory, not read. Its arrays become `Stored`: a device that needs a part of
one gets that part from the file, so that a host holds no model beside its devices' own.
"""

import hashlib
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from diffusion_jax.machine import files, untrusted
from diffusion_jax.machine.remote import Remote
from diffusion_jax.weights import torch_files

INDEX = "model.safetensors.index.json"
_LAYOUT = re.compile(
    r"(?:model|(?:diffusion_|open_clip_)?pytorch_model|open_clip_model)(?:\.(?P<variant>\w+))?"
    r"\.(?P<kind>safetensors|bin)(?P<index>\.index(?:\.(?P<of_shards>\w+))?\.json)?"
)
"""The names under which transformers, diffusers and OpenCLIP save a model, or the index of its
shards: "model.fp16.safetensors", "diffusion_pytorch_model.bin.index.fp16.json" ..."""
_ADAPTER = re.compile(r"(adapter_model|pytorch_lora_weights)\b.*")
_OTHERS = (".flashpack", ".msgpack", ".h5", ".onnx", ".gguf", ".xml")
_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_, "F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2,
}  # fmt: skip
_HUB = ("*.json", "*.txt", "*.model", "*.txt.gz")
_HUB_KINDS = {
    kind: tuple(
        f"{name}{rest}.{kind}" for name in ("model", "pytorch_model", "open_clip*model")
        for rest in ("", "-*")
    )
    for kind in ("safetensors", "bin")
}  # fmt: skip


def locate(name: str | os.PathLike[str]) -> pathlib.Path:
    """The folder of a model: a local one, or what the Hub holds under "owner/model", downloaded.

    FileNotFoundError that says what to do if it is neither.
    """
    if not str(name):
        raise ValueError(
            "text.weights is empty: this encoder needs a folder with safetensors, or the name of a "
            "model on the Hugging Face Hub such as google-t5/t5-small"
        )
    folder = files.local(name).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)) or str(name).startswith("."):
        raise FileNotFoundError(
            f"no folder {name}: give a folder that holds config.json and safetensors, or a name on "
            "the Hugging Face Hub such as google-t5/t5-small"
        )
    import huggingface_hub  # Imports a hundred modules, and only a download needs it.

    try:
        for kind in _HUB_KINDS.values():  # Pickles only where there is nothing else.
            patterns = [*_HUB, *kind]
            folder = huggingface_hub.snapshot_download(str(name), allow_patterns=patterns)
            if _layouts(pathlib.Path(folder)):
                break
        return pathlib.Path(folder)
    except Exception as error:  # Networks fail in many ways.
        raise FileNotFoundError(
            f"{name!r} is no folder here, and the Hugging Face Hub did not give it "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'})"
            ": check the name, or download it elsewhere and give the folder"
        ) from error


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON object from a file; FileNotFoundError, or ValueError if it is something else."""
    path = files.path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: it comes with the weights")
    try:
        value = untrusted.parse_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def open_weights(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Name -> array of the weights in a model's folder, mapped into memory, not read.

    Takes all that `save_pretrained` of transformers and diffusers writes: safetensors, or pickles
    (.bin), of which nothing is run; whole, or in the shards that an index names; and a variant such
    as fp16 where it lies there alone. FileNotFoundError or ValueError that says what is missing,
    damaged or of another kind.
    """
    folder = pathlib.Path(folder)
    _check_unquantised(folder)
    # An index may outlive its shards where a model was saved again in one file.
    layouts = _layouts(folder)
    layouts = [row for row in layouts if not _is_stale(row[-1])] or layouts
    variants = sorted({variant for variant, *_ in layouts})
    if variants and variants[0]:
        if len(variants) > 1:
            raise ValueError(
                f"{folder} holds the variants {', '.join(variants)} and no weights without one: "
                "leave the files of one of them there"
            )
        logging.info("%s: the weights are of the variant %s", folder, variants[0])
    if layouts:
        *_, path = layouts[0]
        return _open_shards(path) if path.suffix == ".json" else _map(path)
    return map_safetensors(_only_safetensors(folder))


def map_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Name -> array of one safetensors file, mapped into memory. ValueError if it is damaged."""
    start, entries = _read_header(pathlib.Path(path))
    data = np.memmap(path, np.uint8, mode="r")[start:] if entries else np.empty(0)
    part = lambda entry: data[slice(*entry["data_offsets"])]
    return {name: _view(part(e), e, f"{name} in {path}") for name, e in entries.items()}


def open_safetensors(path: pathlib.Path) -> Mapping[str, np.ndarray]:
    """`map_safetensors`, but of a file in a bucket each array is read whenever it is looked up."""
    there = files.remote(path)
    return _Ranges(there) if there else map_safetensors(path)


class _Ranges(Mapping[str, np.ndarray]):
    def __init__(self, path: Remote) -> None:
        self._path = path
        self._start, self._entries = _read_header(path)

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        first, last = (self._start + at for at in entry["data_offsets"])
        data = np.frombuffer(self._path.read_range(first, last), np.uint8)
        return _view(data, entry, f"{name} in {self._path}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _read_header(path: pathlib.Path) -> tuple[int, dict[str, Any]]:
    """Where the arrays of a safetensors file begin, and what it says of each."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if 8 + length <= size else b""
    try:
        entries = untrusted.parse_json(header)
        entries.pop("__metadata__", None)
        ends = [8 + length + entry["data_offsets"][1] for entry in entries.values()]
        lies = [name for name, entry in entries.items() if not _is_sound(entry)]
    except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is no safetensors file, or damaged: download it again") from error
    if lies:
        raise ValueError(f"{path} is damaged: {lies[0]} has other bytes than its shape says")
    if max(ends, default=0) > size:
        raise ValueError(f"{path} ends after {size} of {max(ends)} bytes: download it again")
    return 8 + length, entries


def check_config(config: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """ValueError where a config states another size than the weights have."""
    for name, size in sizes.items():
        if config.get(name, size) != size:
            raise ValueError(
                f"the config says {name} {config[name]}, and the weights have {size}: the two are "
                "of different models, or the weights are not whole"
            )


def digest(params: Any) -> str:
    """A name for weights, in milliseconds, the same however their files are split.

    Of each array its name, shape, type and 64 values spread over it: enough to tell any two models
    apart.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree.leaves_with_path(params):
        hashed.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        at = np.linspace(0, leaf.size - 1, 64).astype(np.int64)
        hashed.update(np.asarray(leaf[np.unravel_index(at, leaf.shape)]).tobytes())
    return hashed.hexdigest()


def _layouts(folder: pathlib.Path) -> list[tuple[str, bool, bool, str, pathlib.Path]]:
    """The files that hold, or index, a whole model, by variant; what is to be taken comes first."""
    matches = ((path, _LAYOUT.fullmatch(path.name)) for path in folder.glob("*"))
    return sorted(
        (m["variant"] or m["of_shards"] or "", m["kind"] == "bin", not m["index"], path.name, path)
        for path, m in matches
        if m
    )


def _is_stale(path: pathlib.Path) -> bool:
    """Whether it is an index, and none of its shards are there."""
    shards = read_json(path).get("weight_map", {}) if path.suffix == ".json" else None
    return shards is not None and not any((path.parent / n).is_file() for n in shards.values())


def _map(path: pathlib.Path) -> dict[str, np.ndarray]:
    of = map_safetensors if path.suffix == ".safetensors" else torch_files.map_state_dict
    return of(path)


def _open_shards(index: pathlib.Path) -> dict[str, np.ndarray]:
    where: Mapping[str, str] = read_json(index).get("weight_map", {})
    shards = sorted(set(where.values()))
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing or not where:
        names = ", ".join(missing[:3]) or "a weight_map"
        raise FileNotFoundError(
            f"{index.parent} lacks {names}, of {len(shards)} shards that {index.name} names: "
            "download the rest"
        )
    arrays = {}
    for name in shards:
        arrays |= _map(index.parent / name)
    lost = sorted(set(where) - set(arrays))
    if lost:
        raise ValueError(f"{index} names {lost[0]}, which is in none of its shards")
    return arrays


def _only_safetensors(folder: pathlib.Path) -> pathlib.Path:
    """The one safetensors file of another name; else an error that says what lies there."""
    files = sorted(path for path in folder.glob("*") if path.is_file())
    adapters = [path.name for path in files if _ADAPTER.fullmatch(path.name)]
    if adapters:
        raise ValueError(
            f"{folder} holds an adapter, {adapters[0]}, and not the model that it changes: merge "
            "the two (merge_and_unload or fuse_lora), and save what that gives"
        )
    found = [path for path in files if path.suffix == ".safetensors"]
    if len(found) == 1:
        return found[0]
    if found:
        raise FileNotFoundError(
            f"{folder} holds {len(found)} safetensors files, none called model.safetensors, and no "
            f"{INDEX} that says which of them belong together: add it, or remove what is not wanted"
        )
    others = [path.name for path in files if path.suffix in _OTHERS]
    beside = f"; {others[0]} is of a kind that is not read here" if others else ""
    raise FileNotFoundError(
        f"{folder} holds no weights: it needs model.safetensors or pytorch_model.bin (diffusers' "
        f"diffusion_pytorch_model of either), or shards and their index{beside}"
    )


def _check_unquantised(folder: pathlib.Path) -> None:
    """ValueError for a folder whose config says that the weights are quantised."""
    path = folder / "config.json"
    config = read_json(path).get("quantization_config") if path.is_file() else None
    if config:
        kind = config.get("quant_method", "an unknown method")
        raise ValueError(
            f"the weights in {folder} are quantised by {kind}, which is not read here: save the "
            "model from before, or dequantised"
        )


def _is_sound(entry: Mapping[str, Any]) -> bool:
    """Whether an array's place has the bytes of its shape; a type that is not known has any."""
    (start, end), shape = entry["data_offsets"], entry["shape"]
    width = np.dtype(_DTYPES.get(entry["dtype"], np.void)).itemsize
    least = min((start, *shape)) if shape else start
    return least >= 0 and start <= end and (not width or math.prod(shape) * width == end - start)


def _view(data: np.ndarray, entry: Mapping[str, Any], name: str) -> np.ndarray:
    """An array of its bytes."""
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is of type {entry['dtype']}: known are {', '.join(_DTYPES)}")
    return data.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
