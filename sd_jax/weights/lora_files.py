"""Merge LoRA files into a model's weights, and write the factors of a LoRA run to a LoRA file.

LoRA files have the parameter names of diffusers, of peft itself, of kohya's scripts, of LyCORIS or
of ComfyUI. Names of diffusers and kohya can also be written. A file may also change the text
encoder, although LoRA runs of this project train only the UNet, and hold embeddings of words. The
layers of a file are LoRAs, LoHas or LoKrs, and each of them may be a DoRA (see lora_kinds.py).
Other adapters are rejected.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from diffusion_jax import files
from diffusion_jax.config.settings import Lora
from diffusion_jax.files import untrusted
from diffusion_jax.task import Params
from diffusion_jax.text import TextEncoder, clip_weights
from diffusion_jax.weights import lora, pretrained, torch_files, torch_weights
from diffusion_jax.weights.torch_weights import CONV2D_1, LINEAR, Entry
from sd_jax.unet import UNet
from sd_jax.weights import embedding_files, lora_kinds, names, other_networks
from sd_jax.weights.checkpoints import Checkpoint
from sd_jax.weights.lora_kinds import Layer

DIALECTS = ("diffusers", "kohya")
FILE = "pytorch_lora_weights.safetensors"
"""Name of the LoRA file in a diffusers folder."""
_STEMS = ("pytorch_lora_weights", "adapter_model")  # The second is peft's.
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_METADATA = "lora_adapter_metadata"
_PEFT = "base_model.model."  # Prefix of the names that peft itself writes.
_CONFIG = "adapter_config.json"
_PREFIX = re.compile(
    r"(base_model\.model\.)?(unet\.|text_encoder\.|(model\.)?diffusion_model\."
    r"|(lora|lycoris)_(unet|te1?)_|lycoris_|((text_encoders\.)?clip_l|cond_stage_model)\.transformer\.)?"
)
_BUNDLED = re.compile(r"bundle_emb\.([^.]+)\.(?:string_to_param\..+|emb_params|clip_l)")
"""The name of a word's embedding in a LoRA file, as the web UI of AUTOMATIC1111 reads it."""
_OF_TEXT = re.compile(r"(^|[._])(self_attn[._](q|k|v|out)_proj|mlp[._]fc[12])$")
_PART_NAMES = {"unet": "UNet", "text": "text encoder"}  # For messages.
_FACTORS = (
    (r"(.+)\.lora_(A|B)(?:\.[^.]+)?\.weight", {"A": "down", "B": "up"}),
    (r"(.+)\.lora[_.](down|mid|up)\.weight", {}),
    (r"(.+)\.lora_linear_layer\.(down|up)\.weight", {}),
    (r"(.+)\.(hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2))", {}),
    (r"(.+)\.(dora_scale|lora_magnitude_vector)(?:\.[^.]+)*", {}),
    (r"(.+)\.(alpha)", {}),
)
_FAMILIES = (
    (r"\.b?oft_|\.oft_blocks", "OFT"),
    (r"\.vera_", "VeRA"),
    (r"\.lora_E\b|\.ranknum", "AdaLoRA"),
    (r"\.ia3_|\.on_input", "IA3"),
    (r"\.[ab][12]\.weight", "GLoRA"),
    (r"\.lora_embedding_[AB]", "a LoRA of token embeddings"),
    (r"\.diff(_b)?$|\.[wb]_norm$|\.set_weight$", "a set of weight differences"),
    (r"\.lora_\w+(\.[^.]+)?\.bias$", "a LoRA with biases"),
    (r"emb_params|string_to_param|^clip_[lg]$", "a textual inversion embedding"),
    (r"^((unet|text_encoder):)?\d+(:up|:down)?$", "a LoRA of lora_diffusion, which numbers layers"),
)
"""Patterns of array names, and the kinds of adapters that have them, which are not supported."""
_HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""The values of peft's init_lora_weights that leave the base weights unchanged. Others, such as
PiSSA, OLoRA, CorDA and LoftQ, change them, so their factors fit only the changed weights."""
_KINDS, _MAGNITUDES = ("LORA", "LOHA", "LOKR"), "lora_magnitude_vector"  # peft's names.
_UNSUPPORTED = (
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "lora_bias",
    "use_qalora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
)
"""Options of peft that must be off, because they change more than the weights of layers."""


def apply(files: Sequence[str], opened: Checkpoint) -> Checkpoint:
    """Return the checkpoint with LoRA files merged into it.

    Each entry of `files` is PATH or PATH:STRENGTH. PATH is a LoRA file, or a folder that holds one
    or, in its folders unet and text_encoder, two. STRENGTH defaults to 1. Raises ValueError if a
    file is not a LoRA, or belongs to another model.
    """
    for path, strength in (pair for text in files for pair in _parse(text)):
        for part_name, changes in read(path).items():
            part = getattr(opened, part_name)
            if part is None:
                raise ValueError(
                    f"the LoRA {path} changes the {_PART_NAMES[part_name]}, but the model has "
                    "none: choose another model"
                )
            table = _tables(opened)[part_name]
            params = _merged(part.params, table, changes, strength, path)
            opened = opened._replace(**{part_name: part._replace(params=params)})
    return opened


def add_words(files: Sequence[str], encoder: TextEncoder, frozen: Any) -> tuple[TextEncoder, Any]:
    """Return a text encoder that also knows the words of embeddings in LoRA files, and its weights.

    `files` are those of `apply`, and `frozen` holds the weights of `encoder`. Raises ValueError if
    an embedding does not fit the text encoder, or a word is in it already.
    """
    for path, _ in (pair for text in files for pair in _parse(text)):
        state = torch_files.read_state_dict(path)
        matches = ((_BUNDLED.fullmatch(name), array) for name, array in state.items())
        rows = ((m[1], np.atleast_2d(np.asarray(w, np.float32))) for m, w in matches if m)
        for word, vectors in (words := untrusted.once(list(rows))).items():
            embedding_files.check(f"--lora={path}", word, vectors, encoder)
        if words and encoder.add_words:
            larger, frozen = encoder.add_words(frozen, words)
            encoder = larger._replace(added=encoder.added)
    return encoder, frozen


def read(path: pathlib.Path) -> dict[str, dict[str, Layer]]:
    """Read a LoRA file as {part: {name: Layer}}, where the part is "unet" or "text".

    The names are those of the layers in the file, with underscores instead of dots. Raises
    ValueError if an array of the file is unknown, a factor is missing, or a value is not finite.
    """
    parts: dict[str, dict[str, dict[str, Any]]] = {}
    state, strays = torch_files.read_state_dict(path), []
    factors = {name: array for name, array in state.items() if not _BUNDLED.fullmatch(name)}
    for pattern, family in _FAMILIES:
        if found := [name for name in factors if re.search(pattern, name)]:
            raise ValueError(
                f"{path} is {family}, not a LoRA, LoHa or LoKr of named layers, because of "
                f"{len(found)} of its {len(state)} arrays, such as {found[0]}: merge it with "
                "another program"
            )
    for name, array in factors.items():
        if (place := _place(name)) is None:
            strays.append(name)
            continue
        part, layer, kind = place
        arrays = parts.setdefault(part, {}).setdefault(layer.replace(".", "_"), {"name": layer})
        if kind in arrays:
            raise ValueError(f"{path} holds the factor {kind} of {layer} twice: keep one of them")
        arrays[kind] = np.asarray(array, np.float32)
    of_peft = any(name.startswith(_PEFT) for name in state)
    metadata = _read_config(path) if of_peft else _read_metadata(path)
    for part, config in metadata.items():
        _check_config(path, config, parts.get(part, {}))
    all_layers = [arrays for layers in parts.values() for arrays in layers.values()]
    halves = [arrays["name"] for arrays in all_layers if not lora_kinds.product_of(arrays)]
    if strays or halves or not parts:
        misfits = (
            f"{len(strays)} of {len(state)} arrays have unknown names, such as "
            if strays
            else f"{len(halves)} of {len(all_layers)} layers lack factors or mix kinds, such as "
        ) + torch_weights.some(strays or halves)
        kind = other_networks.kind_of(strays)
        holds = f"holds {kind} and " if kind else ""
        raise ValueError(f"{path} {holds}is not a LoRA, LoHa or LoKr: {misfits}. Choose another file")
    with untrusted.naming(str(path)):
        torch_weights.check_finite(state)
    return {
        part: {key: _layer(arrays, metadata.get(part, {})) for key, arrays in layers.items()}
        for part, layers in parts.items()
    }


def write(path: str | os.PathLike[str], params: Params, s: Lora, unet: UNet, dialect: str = "diffusers") -> None:
    """Write the factors of a LoRA run to a file with diffusers' or kohya's parameter names.

    With diffusers' names, the factor `up` is multiplied by alpha / rank, because some versions of
    diffusers ignore alpha.

    Args:
        path: The file.
        params: The factors of each layer.
        s: The settings of the LoRA.
        unet: The UNet that the factors change.
        dialect: "diffusers" or "kohya".
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


_TEXT_WIDTH = 8  # Any number: the names of layers do not depend on it.


def _parse(text: str) -> list[tuple[pathlib.Path, float]]:
    """Return the files and the strength of PATH or PATH:STRENGTH (see `apply`)."""
    path, colon, strength = text.rpartition(":")
    try:
        path, strength = (path, float(strength)) if colon else (text, 1.0)
    except ValueError:
        if files.local(path).exists() and not files.local(text).exists():
            raise ValueError(
                f"--lora={text}: the strength {strength!r} is not a number: write {path} or, for half of it, {path}:0.5"
            ) from None
        path, strength = text, 1.0
    if not math.isfinite(strength):
        raise ValueError(f"--lora={text}: the strength must be a finite number")
    file = files.local(path)
    if not file.exists():
        raise FileNotFoundError(f"--lora={text}: the file {file} does not exist")
    found = _in_folder(file) if file.is_dir() else [file]
    if not found:
        raise FileNotFoundError(f"--lora={text}: the folder holds no file such as {FILE}")
    return [(path, strength) for path in found]


def _in_folder(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the LoRA files of a folder: one, or those in its folders unet and text_encoder.

    Raises ValueError if it is unclear which file is meant.
    """
    found = sorted(f for f in folder.iterdir() if f.suffix in _SUFFIXES and f.is_file())
    found = [file for file in found if file.stem in _STEMS] or found
    if len({file.stem for file in found}) > 1:
        names = torch_weights.some(file.name for file in found)
        raise ValueError(f"--lora={folder} holds {len(found)} files: name one of {names}")
    if found:
        return found[-1:]  # Of two formats, safetensors.
    parts = [folder / part for part in ("unet", "text_encoder") if (folder / part).is_dir()]
    return [file for part in parts for file in _in_folder(part)]


def _place(name: str) -> tuple[str, str, str] | None:
    """Split the name of an array in a LoRA file into (part, layer, kind).

    The part is "unet" or "text", and the kind is "alpha" or the name of a factor in `lora_kinds`.
    Return None if the name is in none of the formats of LoRA files.
    """
    # Before it used peft, diffusers stored the factors in attention processors.
    name = re.sub(r"\.processor\.to_(\w)_lora\.", r".to_\1.lora.", name)
    name = re.sub(r"\.processor\.to_out_lora\.", ".to_out.0.lora.", name)
    name = re.sub(r"\.self_attn\.to_(\w+)_lora\.", r".self_attn.\1_proj.lora.", name)
    name = _PREFIX.sub("", name, count=1)
    for pattern, kinds in _FACTORS:
        if match := re.fullmatch(pattern, name):
            part = "text" if _OF_TEXT.search(match[1]) else "unet"
            return part, match[1], kinds.get(match[2], match[2])
    return None


def _check_config(path: pathlib.Path, config: Mapping[str, Any], layers: Mapping[str, Mapping[str, Any]]) -> None:
    kind, init = config.get("peft_type") or "LORA", config.get("init_lora_weights", True)
    if kind not in _KINDS:
        raise ValueError(f"{path} is an adapter of the type {kind}, not {', '.join(_KINDS)}")
    if config.get("use_dora") and not all(_MAGNITUDES in arrays for arrays in layers.values()):
        raise ValueError(
            f"{path} was trained with use_dora=True, but has layers without magnitudes: the file is cut, "
            "so download it again"
        )
    if init not in _HARMLESS_INITS:
        raise ValueError(
            f"{path} was trained with init_lora_weights={init!r}, which changes the base weights: "
            "convert it to a plain LoRA with peft (path_initial_model_for_weight_conversion)"
        )
    others = [name for name in _UNSUPPORTED if config.get(name)]
    others += ["bias"] if config.get("bias", "none") != "none" else []
    if others:
        raise ValueError(
            f"{path} was trained with {others[0]}={config[others[0]]!r}, which is more than a "
            "plain LoRA: merge it into the model with peft (merge_and_unload)"
        )


def _read_metadata(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return the metadata that diffusers writes, as {part: {field: value}}.

    Some of the fields are lora_alpha and alpha_pattern.
    """
    metadata: dict[str, dict[str, Any]] = {}
    text = torch_weights.read_metadata(path).get(_METADATA)
    for name, value in (json.loads(text) if text else {}).items():
        prefix, _, field = name.partition(".")
        part = {"unet": "unet", "text_encoder": "text"}.get(prefix, "")
        metadata.setdefault(part, {})[field] = value
    return metadata


def _read_config(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return the content of peft's file adapter_config.json, as {part: {field: value}}.

    The file is next to the weights and holds alpha. All parts have the same fields. Raises
    ValueError if there is no such file, or if it holds no JSON object.
    """
    file = path.parent / _CONFIG
    if not file.is_file():
        raise ValueError(
            f"{path} has peft's names ({_PEFT}...), so {file}, which holds alpha, is also needed: "
            "copy it from the folder that peft wrote"
        )
    return dict.fromkeys(("unet", "text"), pretrained.read_json(file))


def _layer(arrays: dict[str, Any], metadata: Mapping[str, Any]) -> Layer:
    """Build a Layer with scale alpha / rank, or alpha / sqrt(rank) for rsLoRA.

    Alpha is read from the layer's arrays, or if they lack it, from the metadata. If both lack it,
    alpha is the rank.
    """
    name, alpha = arrays.pop("name"), arrays.pop("alpha", None)
    by_pattern = lambda field, default: _by_pattern(metadata.get(f"{field}_pattern"), name, default)
    rank = lora_kinds.rank(arrays) or by_pattern("rank", metadata.get("r"))
    if not rank:
        return Layer(name, arrays, 1.0)  # LyCORIS ignores the alpha of two whole matrices.
    if alpha is None:  # LoRA's field is lora_alpha, and that of the other kinds alpha.
        alpha = by_pattern("alpha", metadata.get("lora_alpha", metadata.get("alpha", rank)))
    scale = float(np.ravel(alpha)[0]) / (rank**0.5 if metadata.get("use_rslora") else rank)
    return Layer(name, arrays, scale)


def _by_pattern(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a layer's name, as in peft."""
    values = (patterns or {}).items()
    return next((x for end, x in values if re.fullmatch(rf"(.*\.)?({end})", name)), default)


def _tables(opened: Checkpoint) -> dict[str, dict[str, Entry]]:
    """Return {part: {name: Entry}}: the location of each layer's weight by its names in LoRA files.

    The names have underscores instead of dots. A UNet layer has two names, LDM's and diffusers'.
    """
    tables: dict[str, dict[str, Entry]] = {}
    if opened.unet:
        unet, _, params = opened.unet
        entries = [e for d in ("ldm", "diffusers") for e in names.unet_table(params, unet, d)]
        tables["unet"] = _by_name(entries)
    if opened.text:
        tables["text"] = _by_name(clip_weights.table(opened.text.params, clip_weights.TEXT))
        prefix = f"{clip_weights.TEXT}_"  # Newer versions of transformers omit it.
        tables["text"] |= {k.removeprefix(prefix): e for k, e in tables["text"].items()}
    return tables


def _by_name(entries: Sequence[Entry]) -> dict[str, Entry]:
    weights = [e for e in entries if e.path.endswith("kernel")]
    return {e.torch.removesuffix(".weight").replace(".", "_"): e for e in weights}


def _merged(
    params: Params, table: Mapping[str, Entry], layers: Mapping[str, Layer], strength: float, path: pathlib.Path
) -> Params:
    """Return the parameters with `strength` times its change added to each changed layer.

    `layers` holds the changes by layer name, and `table` locates each layer (see `_tables`).
    Raises ValueError if the model lacks a layer of the file `path`.
    """
    unknown = [layer.name for key, layer in layers.items() if key not in table]
    if unknown:
        kind = other_networks.kind_of(layers) or "another model"
        raise ValueError(
            f"{path} belongs to {kind}, because {len(unknown)} of its {len(layers)} layers "
            f"do not exist in this model, such as {torch_weights.some(unknown)}: choose a LoRA for "
            "this model"
        )
    changes = {table[key].path: (table[key], layer) for key, layer in layers.items()}
    if len(changes) < len(layers):
        raise ValueError(f"{path} names a layer twice, by LDM's and diffusers' names: keep one")

    def merge(place: Any, weight: np.ndarray) -> np.ndarray:
        name = jax.tree_util.keystr(place, simple=True, separator="/")
        if name not in changes:
            return weight
        entry, layer = changes[name]
        torch_weight = entry.layout.to_torch(np.asarray(weight))
        try:
            return entry.layout.to_jax(lora_kinds.changed(layer, torch_weight, strength))
        except ValueError as error:
            raise ValueError(
                f"{path} belongs to another model, because {error}: choose a LoRA for this model"
            ) from error

    return jax.tree.map_with_path(merge, params)
