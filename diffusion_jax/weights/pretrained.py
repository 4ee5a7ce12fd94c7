"""Find pretrained weights in a folder or on the Hugging Face Hub, and open them.

Files are mapped into memory, and arrays stay in their files until they are used. Each device reads
only the parts that it needs (devices/lazy_arrays.py), so a host never holds a
second copy of a model.
"""

import hashlib
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.typing import DTypeLike

from diffusion_jax import files
from diffusion_jax.files import untrusted
from diffusion_jax.files.safetensors_files import map_safetensors
from diffusion_jax.weights import file_kinds, flax_files, torch_files

INDEX = "model.safetensors.index.json"
_LAYOUT = re.compile(
    r"(?:model|(?:diffusion_|open_clip_)?pytorch_model|open_clip_model|(?:diffusion_)?flax_model)"
    r"(?:\.(?P<variant>\w+))?\.(?P<kind>safetensors|bin|msgpack)"
    r"(?P<index>\.index(?:\.(?P<of_shards>\w+))?\.json)?"
)
"""The file names under which transformers, diffusers and OpenCLIP save models or shard indices.

Examples are "model.fp16.safetensors" and "diffusion_pytorch_model.bin.index.fp16.json".
"""
_ADAPTER = re.compile(r"(adapter_model|pytorch_lora_weights)\b.*")
_OTHERS = (".flashpack", ".h5", ".onnx", ".gguf", ".xml")
_KINDS = ("safetensors", "bin", "msgpack")  # The preferred kinds of files first.
_HUB = ("*.json", "*.txt", "*.model", "*.txt.gz")
_HUB_KINDS = {
    kind: tuple(
        f"{name}{ending}.{kind}"
        for name in ("model", "pytorch_model", "open_clip*model", "flax_model")
        for ending in ("", "-*")
    )
    for kind in _KINDS
}


def locate(name: str | os.PathLike[str]) -> pathlib.Path:
    """Return the local folder of a model, given the folder or a Hugging Face name.

    A model with a name such as "owner/model" is downloaded from the Hugging Face Hub, unless the
    folder exists or the model was downloaded before.

    Raises:
        FileNotFoundError: There is no such folder, and the model cannot be downloaded.
        ValueError: The name is empty.
    """
    if not str(name):
        raise ValueError(
            "text.weights is empty: set it to a folder with safetensors, or to the name of a model "
            "on the Hugging Face Hub such as google-t5/t5-small"
        )
    folder = pathlib.Path(os.path.expanduser(files.local(name)))
    if folder.is_dir():
        return snapshot(folder)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)) or str(name).startswith("."):
        raise FileNotFoundError(
            f"no folder {name}: choose a folder with config.json and safetensors, or a name on the "
            "Hugging Face Hub such as google-t5/t5-small"
        )
    import huggingface_hub  # Slow to import, and only needed for downloads.

    try:
        for kind in _HUB_KINDS.values():  # The next kind is downloaded only if one is missing.
            patterns = [*_HUB, *kind]
            folder = huggingface_hub.snapshot_download(str(name), allow_patterns=patterns)
            if _layouts(pathlib.Path(folder)):
                break
        return pathlib.Path(folder)
    except Exception as error:  # Network failures raise many types.
        reason = str(error).splitlines()[0] if str(error) else "no reason"
        raise FileNotFoundError(
            f"{name!r} is not a local folder, and downloading it from the Hugging Face Hub failed "
            f"({type(error).__name__}: {reason}): check the name, or download the model on "
            "another machine, copy it to this one, and give the path of the folder"
        ) from error


def snapshot(folder: pathlib.Path) -> pathlib.Path:
    """Return the model's folder in a folder of the hub's cache, such as models--owner--model.

    A path that is no such folder is returned unchanged. Raises ValueError if the cache holds
    several versions of the model, none of which is the main one.
    """
    if not (folder / "snapshots").is_dir():
        return folder
    main = folder / "refs" / "main"
    versions = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
    chosen = [v for v in versions if main.is_file() and v.name == main.read_text().strip()]
    if len(found := chosen or versions) != 1:
        raise ValueError(
            f"{folder} is a cache of the Hugging Face Hub with {len(versions)} versions: name one, "
            f"such as {versions[0] if versions else folder / 'snapshots' / 'VERSION'}"
        )
    return found[0]


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file does not hold a JSON object.
    """
    path = files.path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: download it together with the weights")
    try:
        value = untrusted.parse_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"cannot read {path} as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, but holds {type(value).__name__}")
    return value


def open_weights(folder: str | os.PathLike[str], variant: str = "") -> dict[str, np.ndarray]:
    """Map the weights in a model's folder into memory, and return the arrays, keyed by name.

    All files that `save_pretrained` of transformers and diffusers writes are supported:
    safetensors, pickles (.bin) and Flax models (.msgpack), in one file or in shards with an index.
    The first of these kinds that the folder holds is read. Flax models are not mapped but loaded,
    and their arrays get the names and layouts of the torch model. Code in a pickle is never
    executed. A variant such as fp16 is read only if the folder has no other weights, or if
    `variant` names it.

    Raises:
        FileNotFoundError: The folder has no weights, or shards are missing.
        ValueError: A file is damaged, or the weights are quantised, an adapter, or ambiguous.
    """
    folder = pathlib.Path(folder)
    path = folder / "config.json"
    config = read_json(path).get("quantization_config") if path.is_file() else None
    if config:
        kind = config.get("quant_method", "an unknown method")
        raise ValueError(
            f"the weights in {folder} are quantised by {kind}, which is not supported: use the "
            "original model, or dequantise it"
        )
    # If a model is saved again in one file, a stale index of its former shards may remain.
    layouts = _layouts(folder)
    layouts = [row for row in layouts if not _is_stale(row[-1])] or layouts
    layouts = [row for row in layouts if row[0] == variant] or layouts
    variants = sorted({variant for variant, *_ in layouts})
    if variants and variants[0]:
        if len(variants) > 1:
            raise ValueError(f"{folder} holds only the variants {', '.join(variants)}: remove the files of all but one")
        logging.info("%s: reading the variant %s", folder, variants[0])
    if layouts:
        *_, path = layouts[0]
        return _open_shards(path) if path.suffix == ".json" else _map(path)
    return _map(_only_safetensors(folder))


def check_config(config: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Raise ValueError if the sizes in a model's config differ from the sizes of its weights.

    `sizes` maps the names of config fields to sizes of the weights. Fields that `config` omits are
    not checked.
    """
    for name, size in sizes.items():
        if config.get(name, size) != size:
            raise ValueError(
                f"{name} is {config[name]} in the config, but {size} in the weights: the config "
                "and the weights belong to different models, or the weights are incomplete"
            )


def digest(params: Any, dtype: DTypeLike | None = None) -> str:
    """Return a hash that identifies weights, independently of how they are split into files.

    The hash covers the name, shape and type of each array, and 64 evenly spaced values of it. This
    suffices to distinguish models, and takes only milliseconds. With `dtype`, the values are first
    converted to this type.
    """
    result = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree.leaves_with_path(params):
        kind = leaf.dtype if dtype is None else np.dtype(dtype)
        result.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {kind}".encode())
        index = np.linspace(0, leaf.size - 1, 64).astype(np.int64)
        result.update(np.asarray(leaf[np.unravel_index(index, leaf.shape)]).astype(kind).tobytes())
    return result.hexdigest()


def _layouts(folder: pathlib.Path) -> list[tuple[str, int, bool, str, pathlib.Path]]:
    """Return a row for each file that holds or indexes weights, the preferred files first.

    A row is (variant, number of the kind, is no index, file name, path). The rows are sorted by
    these values.
    """
    matches = ((path, _LAYOUT.fullmatch(path.name)) for path in folder.glob("*"))
    return sorted(
        (m["variant"] or m["of_shards"] or "", _KINDS.index(m["kind"]), not m["index"], path.name, path)
        for path, m in matches
        if m
    )


def _is_stale(path: pathlib.Path) -> bool:
    shards = read_json(path).get("weight_map", {}) if path.suffix == ".json" else None
    return shards is not None and not any((path.parent / str(n)).is_file() for n in shards.values())


def _map(path: pathlib.Path) -> dict[str, np.ndarray]:
    kind = file_kinds.kind_of(path)
    if kind == file_kinds.FLAX:
        return flax_files.read(path)
    is_safe = kind == file_kinds.SAFETENSORS
    return map_safetensors(path) if is_safe else torch_files.map_state_dict(path)


def _open_shards(index: pathlib.Path) -> dict[str, np.ndarray]:
    weight_map: Mapping[str, str] = read_json(index).get("weight_map", {})
    shards = sorted(set(map(str, weight_map.values())))
    for name in shards:
        untrusted.check_inside(name, index)
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing or not weight_map:
        names = ", ".join(missing[:3]) or "a weight_map"
        raise FileNotFoundError(
            f"{index.parent} lacks {names} ({index.name} lists {len(shards)} shards): download the missing files"
        )
    arrays = {}
    for name in shards:
        arrays |= _map(index.parent / name)
    flax = index.name.startswith(("flax", "diffusion_flax"))
    listed = map(flax_files.torch_name, weight_map) if flax else weight_map
    unresolved = sorted(set(listed) - set(arrays))
    if unresolved:
        raise ValueError(
            f"{index} lists the array {unresolved[0]}, but none of its shards holds this array: "
            "download the files again"
        )
    return arrays


def _only_safetensors(folder: pathlib.Path) -> pathlib.Path:
    """Return the only safetensors file in a folder.

    Raises:
        ValueError: The folder holds an adapter without its base model.
        FileNotFoundError: There is no safetensors file, or more than one.
    """
    files = sorted(path for path in folder.glob("*") if path.is_file())
    adapters = [path.name for path in files if _ADAPTER.fullmatch(path.name)]
    if adapters:
        raise ValueError(
            f"{folder} holds an adapter, {adapters[0]}, without its base model: merge it into the "
            "base model (merge_and_unload in peft, fuse_lora in diffusers), and save the result"
        )
    safetensors = [path for path in files if path.suffix == ".safetensors"]
    if len(safetensors) == 1:
        return safetensors[0]
    if safetensors:
        raise FileNotFoundError(
            f"{folder} holds {len(safetensors)} safetensors files, but none is called "
            f"model.safetensors, and there is no {INDEX}: add the index, or keep only one file"
        )
    others = [path.name for path in files if path.suffix in _OTHERS]
    unsupported = f"; the format of {others[0]} is not supported" if others else ""
    raise FileNotFoundError(
        f"{folder} holds no weights: it needs model.safetensors or pytorch_model.bin (in diffusers "
        f"diffusion_pytorch_model.*), or shards and their index{unsupported}"
    )
