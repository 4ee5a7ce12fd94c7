"""LoRA files of others, merged into a model's weights, and a run's factors as such a file.

Read are the names of diffusers, with peft and before it, and of kohya's scripts; written those of
either. What a file holds of the text encoder is merged into that: runs here train the UNet alone.
LoHa, LoKr and DoRA, which are no product of two factors, are refused.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from diffusion_jax import lora
from diffusion_jax.config.settings import Lora
from diffusion_jax.machine import files
from diffusion_jax.task import Params
from diffusion_jax.text import clip_weights
from diffusion_jax.weights import torch_files, torch_weights
from diffusion_jax.weights.torch_weights import CONV2D_1, LINEAR, Entry
from sd_jax.unet import UNet
from sd_jax.weights import names
from sd_jax.weights.checkpoints import Checkpoint

DIALECTS = ("diffusers", "kohya")
FILE = "pytorch_lora_weights.safetensors"
"""The file's name in a folder of diffusers."""
_METADATA = "lora_adapter_metadata"
_PARTS = (
    (r"(?:base_model\.model\.)?unet\.|lora_unet_|base_model\.model\.(?!text)", "unet"),
    (r"(?:base_model\.model\.)?text_encoder\.|lora_te1?_", "text"),
)
_FACTORS = (
    (r"(.+)\.lora_(A|B)(?:\.default)?\.weight", {"A": "down", "B": "up"}),
    (r"(.+)\.lora[_.](down|up)\.weight", {}),
    (r"(.+)\.lora_linear_layer\.(down|up)\.weight", {}),
    (r"(.+)\.(alpha)", {}),
)


class Layer(NamedTuple):
    """What a file adds to a layer's weight [out, in, ...]: scale * up @ down, in torch's axes."""

    down: np.ndarray
    up: np.ndarray
    scale: float
    name: str
    """As the file calls it."""


def apply(files: Sequence[str], opened: Checkpoint) -> Checkpoint:
    """The checkpoint with each of FILE, FILE:STRENGTH or a folder of diffusers' merged into it.

    ValueError for what is no LoRA, or another model's.
    """
    for text in files:
        path, strength = _parse(text)
        layers = read(path)
        for part, changed in layers.items():
            there = getattr(opened, part)
            if there is None:
                raise ValueError(f"{path} changes the {part} part, which the model lacks")
            table = _tables(opened)[part]
            params = _merged(there.params, table, changed, strength, path)
            opened = opened._replace(**{part: there._replace(params=params)})
    return opened


def read(path: pathlib.Path) -> dict[str, dict[str, Layer]]:
    """The layers that a file changes by "unet" or "text" and their names, without dots."""
    parts: dict[str, dict[str, dict[str, Any]]] = {}
    state, strays = torch_files.read_state_dict(path), []
    for name, array in state.items():
        if (found := _place(name)) is None:
            strays.append(name)
            continue
        part, layer, kind = found
        of = parts.setdefault(part, {}).setdefault(layer.replace(".", "_"), {"name": layer})
        of[kind] = np.asarray(array, np.float32)
    said = _read_said(path)
    all_layers = [of for some in parts.values() for of in some.values()]
    halves = [of["name"] for of in all_layers if not {"down", "up"} <= of.keys()]
    if strays or halves or not parts:
        wrong = torch_weights.some(strays or halves)
        raise ValueError(
            f"{path} is no LoRA of two factors a layer: {len(strays or halves)} of {len(state)} "
            f"names are others, {wrong}. LoHa, LoKr and DoRA are not read: merge them elsewhere"
        )
    return {
        part: {key: _layer(of, said.get(part, {})) for key, of in some.items()}
        for part, some in parts.items()
    }


def write(
    path: str | os.PathLike[str], params: Params, s: Lora, unet: UNet, dialect: str = "diffusers"
) -> None:
    """Writes the factors of a run as a file that `dialect`'s programs read.

    diffusers' files have the scale in `up`, since some of its versions know no alpha.
    """
    table = {
        e.path.removeprefix("params/").removesuffix("/kernel"): e
        for e in names.unet_table(names.abstract_unet(unet, _TEXT_WIDTH), unet, "diffusers")
    }
    state = {}
    for layer, pair in lora.flat(params).items():
        entry = table[layer]
        name = entry.torch.removesuffix(".weight")
        down = entry.layout.to_torch(np.asarray(pair["down"], np.float32))  # [r, in, ...]
        up = (LINEAR if down.ndim == 2 else CONV2D_1).to_torch(np.asarray(pair["up"], np.float32))
        if dialect == "kohya":
            name = f"lora_unet_{name.replace('.', '_')}"
            state |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
            state[f"{name}.alpha"] = np.float32(s.alpha)
        else:
            state[f"unet.{name}.lora_A.weight"] = down
            state[f"unet.{name}.lora_B.weight"] = up * np.float32(s.alpha_by_rank)
    torch_weights.write(path, {name: np.asarray(x, order="C") for name, x in state.items()})


_TEXT_WIDTH = 8  # Names do not depend on it.


def _parse(text: str) -> tuple[pathlib.Path, float]:
    """FILE and STRENGTH, 1 unless it is given."""
    path, colon, strength = text.rpartition(":")
    try:
        path, strength = (path, float(strength)) if colon else (text, 1.0)
    except ValueError:
        path, strength = text, 1.0
    if not math.isfinite(strength):
        raise ValueError(f"--lora={text}: the strength is a finite number")
    found = files.local(path)
    found = found / FILE if found.is_dir() else found
    if not found.is_file():
        raise FileNotFoundError(f"--lora={text}: there is no file {found}")
    return found, strength


def _place(name: str) -> tuple[str, str, str] | None:
    """(part, layer, "down", "up" or "alpha") of an array's name; None for another kind's."""
    # diffusers before peft had the factors in processors of attention.
    name = re.sub(r"\.processor\.to_(\w)_lora\.", r".to_\1.lora.", name)
    name = re.sub(r"\.processor\.to_out_lora\.", ".to_out.0.lora.", name)
    part = "unet"  # Of names without a prefix: a UNet's own.
    for pattern, of in _PARTS:
        if found := re.match(pattern, name):
            part, name = of, name[found.end() :]
            break
    for pattern, kinds in _FACTORS:
        if found := re.fullmatch(pattern, name):
            return part, found[1], kinds.get(found[2], found[2])
    return None


def _read_said(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """What diffusers writes of each part beside the arrays: lora_alpha, alpha_pattern ..."""
    said: dict[str, dict[str, Any]] = {}
    text = torch_weights.read_metadata(path).get(_METADATA)
    for name, value in (json.loads(text) if text else {}).items():
        prefix, _, field = name.partition(".")
        said.setdefault({"unet": "unet", "text_encoder": "text"}.get(prefix, ""), {})[field] = value
    return said


def _layer(of: Mapping[str, Any], said: Mapping[str, Any]) -> Layer:
    """Its scale is alpha / rank, alpha being the layer's own, the metadata's, or the rank."""
    name, rank = of["name"], len(of["down"])
    patterns: Mapping[str, float] = said.get("alpha_pattern") or {}
    own = [alpha for end, alpha in patterns.items() if f".{name}".endswith(f".{end}")]
    alpha = (own or [said.get("lora_alpha", rank)])[0]
    alpha = float(of["alpha"].ravel()[0]) if "alpha" in of else alpha
    scale = alpha / (rank**0.5 if said.get("use_rslora") else rank)
    return Layer(of["down"], of["up"], scale, name)


def _tables(opened: Checkpoint) -> dict[str, dict[str, Entry]]:
    """Where the weights of each part lie, by torch's names without dots, in all dialects."""
    tables: dict[str, dict[str, Entry]] = {}
    if opened.unet:
        unet, _, params = opened.unet
        entries = [e for d in ("ldm", "diffusers") for e in names.unet_table(params, unet, d)]
        tables["unet"] = _by_name(entries)
    if opened.text:
        tables["text"] = _by_name(clip_weights.table(opened.text.params, clip_weights.TEXT))
        bare = f"{clip_weights.TEXT}_"  # Which newer versions of transformers leave out.
        tables["text"] |= {k.removeprefix(bare): e for k, e in tables["text"].items()}
    return tables


def _by_name(entries: Sequence[Entry]) -> dict[str, Entry]:
    of_weights = [e for e in entries if e.path.endswith("kernel")]
    return {e.torch.removesuffix(".weight").replace(".", "_"): e for e in of_weights}


def _merged(
    params: Params,
    table: Mapping[str, Entry],
    layers: Mapping[str, Layer],
    strength: float,
    path: pathlib.Path,
) -> Params:
    """The parameters with strength * scale * up @ down added to each layer."""
    unknown = [layer.name for key, layer in layers.items() if key not in table]
    if unknown:
        raise ValueError(
            f"{path} is of another model: this one has none of {len(unknown)} of its "
            f"{len(layers)} layers, {torch_weights.some(unknown)}"
        )
    added = {table[key].path: (table[key], layer) for key, layer in layers.items()}

    def merge(place: Any, weight: np.ndarray) -> np.ndarray:
        name = jax.tree_util.keystr(place, simple=True, separator="/")
        if name not in added:
            return weight
        entry, layer = added[name]
        return weight + strength * entry.layout.to_jax(_product(entry, layer, weight, path))

    return jax.tree.map_with_path(merge, params)


def _product(entry: Entry, layer: Layer, weight: np.ndarray, path: pathlib.Path) -> np.ndarray:
    """scale * up @ down in torch's axes; ValueError for factors of another shape."""
    shape = entry.layout.to_torch(np.broadcast_to(np.float32(0), weight.shape)).shape
    up, down = layer.up, layer.down
    bare = lambda shape: shape[:2] if shape[2:] == (1, 1) else shape  # Of a 1x1 convolution.
    changed = (up.shape[0], *down.shape[1:])
    if up.size != up.shape[0] * len(down) or bare(changed) != bare(shape):
        raise ValueError(
            f"{path} is of another model: {layer.name} has factors {list(down.shape)} and "
            f"{list(up.shape)}, and the weight there is {list(shape)}"
        )
    product = up.reshape(len(up), -1) @ down.reshape(len(down), -1)
    return (np.float32(layer.scale) * product).reshape(shape)
