"""Pretrained weights: found in a folder or on the Hugging Face Hub, read only where they are used.

A safetensors file is mapped into memory, not read. Its arrays become `Stored`: a device that needs
a part of one gets that part from the file, so that a host holds no model beside its devices' own.
"""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INDEX = "model.safetensors.index.json"
FILES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.safetensors")
_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_,
}  # fmt: skip
_HUB = ("*.json", "*.txt", "*.model", "*.txt.gz", *FILES, "model-*.safetensors")


def locate(name: str | os.PathLike[str]) -> pathlib.Path:
    """The folder of a model: a local one, or what the Hub holds under "owner/model", downloaded.

    FileNotFoundError that says what to do if it is neither.
    """
    if not str(name):
        raise ValueError(
            "text.weights is empty: this encoder needs a folder with safetensors, or the name of a "
            "model on the Hugging Face Hub such as google-t5/t5-small"
        )
    folder = pathlib.Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)) or str(name).startswith("."):
        raise FileNotFoundError(
            f"no folder {name}: give a folder that holds config.json and safetensors, or a name on "
            "the Hugging Face Hub such as google-t5/t5-small"
        )
    import huggingface_hub  # Imports a hundred modules, and only a download needs it.

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(str(name), allow_patterns=list(_HUB)))
    except Exception as error:  # Networks fail in many ways.
        raise FileNotFoundError(
            f"{name!r} is no folder here, and the Hugging Face Hub did not give it "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'})"
            ": check the name, or download it elsewhere and give the folder"
        ) from error


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON object from a file; FileNotFoundError, or ValueError if it is something else."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no file {path}: it comes with the weights")
    try:
        value = json.loads(pathlib.Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def open_weights(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Name -> array of all safetensors of a model's folder, mapped into memory, not read.

    Shards are those that model.safetensors.index.json names. FileNotFoundError or ValueError that
    says what is missing or damaged.
    """
    folder = pathlib.Path(folder)
    if (folder / INDEX).is_file():
        return _open_shards(folder)
    for name in FILES:
        if (folder / name).is_file():
            return map_safetensors(folder / name)
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return map_safetensors(others[0])
    if others:
        raise FileNotFoundError(
            f"{folder} holds {len(others)} safetensors files, none called {FILES[0]}, and no "
            f"{INDEX} that says which of them belong together: add it, or remove what is not wanted"
        )
    raise FileNotFoundError(
        f"{folder} holds no safetensors: it needs {FILES[0]}, or shards and {INDEX}. Of a model "
        "that is published as a pickle (pytorch_model.bin), make them once:\n"
        "  python -m diffusion_jax.text convert FOLDER OUT"
    )


def map_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Name -> array of one safetensors file, mapped into memory. ValueError if it is damaged."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if 8 + length <= size else b""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        ends = [8 + length + entry["data_offsets"][1] for entry in entries.values()]
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no safetensors file, or damaged: download it again") from error
    if max(ends, default=0) > size:
        raise ValueError(f"{path} ends after {size} of {max(ends)} bytes: download it again")
    data = np.memmap(path, np.uint8, mode="r")[8 + length :] if entries else np.empty(0)
    return {name: _view(data, entry, f"{name} in {path}") for name, entry in entries.items()}


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


def _open_shards(folder: pathlib.Path) -> dict[str, np.ndarray]:
    index = read_json(folder / INDEX)
    where: Mapping[str, str] = index.get("weight_map", {})
    missing = [name for name in sorted(set(where.values())) if not (folder / name).is_file()]
    if missing or not where:
        names = ", ".join(missing[:3]) or "a weight_map"
        raise FileNotFoundError(
            f"{folder} lacks {names}, of {len(set(where.values()))} shards that {INDEX} names: "
            "download the rest"
        )
    arrays = {}
    for name in sorted(set(where.values())):
        arrays |= map_safetensors(folder / name)
    lost = sorted(set(where) - set(arrays))
    if lost:
        raise ValueError(f"{folder / INDEX} names {lost[0]}, which is in none of its shards")
    return arrays


def _view(data: np.ndarray, entry: Mapping[str, Any], name: str) -> np.ndarray:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is of type {entry['dtype']}: known are {', '.join(_DTYPES)}")
    start, end = entry["data_offsets"]
    return data[start:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
