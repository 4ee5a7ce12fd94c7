"""CLIP weights of every origin under one set of names and settings.

The names are those of a whole Hugging Face CLIPModel ("text_model. ...", "vision_model. ...",
"text_projection.weight", "visual_projection.weight"), to which OpenCLIP's and OpenAI's own, and a
single tower's, are brought.
"""

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diffusion_jax.weights import pretrained, torch_weights
from diffusion_jax.weights.torch_weights import CONV, Entry, StateDict

TEXT, VISION = "text_model", "vision_model"
PROJECTIONS = {TEXT: "text_projection", VISION: "visual_projection"}


class Tower(NamedTuple):
    """The settings of a tower that its arrays do not show."""

    num_heads: int
    activation: str
    eps: float
    end_id: int | None


class Clip(NamedTuple):
    """Opened weights: arrays by Hugging Face's names, and the settings of the towers they have."""

    state: dict[str, np.ndarray]
    towers: dict[str, Tower]
    pads_with_0: bool
    """Whether texts are padded with 0, as by OpenCLIP, or with the end token."""


def open_clip(folder: pathlib.Path) -> Clip:
    """The CLIP in a folder: config.json beside Hugging Face's names, or open_clip_config.json.

    ValueError or FileNotFoundError if it holds none, or config and weights differ.
    """
    state = pretrained.open_weights(folder)
    own = folder / "open_clip_config.json"
    path = own if is_open_clip(state) and own.is_file() else folder / "config.json"
    return from_state(state, pretrained.read_json(path))


def from_state(state: StateDict, config: Mapping[str, Any]) -> Clip:
    """A CLIP, or one tower of it, from a state dict of any origin and its config.

    ValueError where they differ, or where this is no CLIP.
    """
    of_open_clip = is_open_clip(state)
    arrays = _from_open_clip(state) if of_open_clip else _from_hugging_face(state)
    config = config.get("model_cfg", config)
    groups = {
        TEXT: config.get("text_config", config.get("text_cfg", config)),
        VISION: config.get("vision_config", config.get("vision_cfg", config.get("vision", config))),
    }
    towers = {
        name: _tower(name, arrays, {**_shared(config), **group}, of_open_clip)
        for name, group in groups.items()
        if any(key.startswith(f"{name}.") for key in arrays)
    }
    if not towers:
        raise ValueError(
            f"the weights are no CLIP: among {len(state)} arrays such as {sorted(state)[:3]} there "
            "is neither a text nor an image tower"
        )
    pad = config.get("pad_token_id", groups[TEXT].get("pad_token_id"))
    # Stable Diffusion 2's text encoder is OpenCLIP's under Hugging Face's names, with its padding.
    exact = TEXT in towers and towers[TEXT].activation == "gelu"
    return Clip(arrays, towers, of_open_clip or pad == 0 or (exact and pad in (None, 1)))


def is_open_clip(state: StateDict) -> bool:
    """Whether the names are OpenCLIP's and OpenAI's own."""
    return any(re.search(r"(^|\.)transformer\.resblocks\.0\.", name) for name in state)


def table(params: Any, tower: str) -> list[Entry]:
    """The name of every parameter of a TextTower or ImageTower, whose params may be abstract."""
    rules = [(path, name.replace("TOWER", tower)) for path, name in _RULES]
    rules.append(("final_norm", f"{tower}.{_FINAL_NORMS[tower]}"))
    rules.append(("projection", PROJECTIONS[tower]))
    name_of = lambda path: torch_weights.rename(path, rules)
    return torch_weights.table(params, name_of, [("patch_kernel", CONV)])


def num_layers(names: Iterable[str], tower: str) -> int:
    """The number of layers that a tower has in these names of arrays."""
    matches = (re.match(rf"{tower}\.encoder\.layers\.(\d+)\.", name) for name in names)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def tower_state(clip: Clip, table: Sequence[Entry]) -> dict[str, np.ndarray]:
    """A tower's arrays, also any that its table lacks; not the other tower's, nor layers beyond."""
    names = {e.torch for e in table}
    tower = next(tower for tower in (TEXT, VISION) if any(n.startswith(tower) for n in names))
    depth = num_layers(names, tower)

    def wanted(name: str) -> bool:
        layer = re.match(rf"{tower}\.encoder\.layers\.(\d+)\.", name)
        own = name.startswith(f"{tower}.") and (layer is None or int(layer[1]) < depth)
        return own or name in names

    return {name: array for name, array in clip.state.items() if wanted(name)}


def to_open_clip(state: StateDict) -> dict[str, np.ndarray]:
    """A text tower's arrays under OpenCLIP's names; q, k and v in one."""
    arrays, thirds = {}, {}
    for name, array in state.items():
        for theirs, here in _OPEN_CLIP:
            name = name.replace(f".{here}", f".{theirs}")
        name = name.removeprefix(f"{TEXT}.")
        fused = re.match(r"(.*\.attn\.)([qkv])_proj\.(weight|bias)$", name)
        if fused:
            thirds.setdefault(f"{fused[1]}in_proj_{fused[3]}", {})[fused[2]] = array
        else:
            arrays[name] = array
    return arrays | {
        name: np.concatenate([parts[n] for n in "qkv"]) for name, parts in thirds.items()
    }


_RULES = (
    ("(token|position)_embedding", r"TOWER.embeddings.\1_embedding.weight"),
    ("class_embedding", "TOWER.embeddings.class_embedding"),
    ("patch_kernel", "TOWER.embeddings.patch_embedding.weight"),
    ("first_norm", "TOWER.pre_layrnorm"),  # Sic.
    (r"layer_(\d+)_attention/(q|k|v|out)", r"TOWER.encoder.layers.\1.self_attn.\2_proj"),
    (r"layer_(\d+)_attention_norm", r"TOWER.encoder.layers.\1.layer_norm1"),
    (r"layer_(\d+)_mlp_norm", r"TOWER.encoder.layers.\1.layer_norm2"),
    (r"layer_(\d+)_mlp/(\w+)", r"TOWER.encoder.layers.\1.mlp.\2"),
)
_FINAL_NORMS = {TEXT: "final_layer_norm", VISION: "post_layernorm"}


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that OpenCLIP states once for both towers."""
    return {k: v for k, v in config.items() if k in ("quick_gelu", "act", "hidden_act", "eps")}


def _tower(name: str, state: StateDict, config: Mapping[str, Any], of_open_clip: bool) -> Tower:
    width = state[_need(state, f"{name}.encoder.layers.0.layer_norm1.weight")].shape[0]
    depth = num_layers(state, name)
    sizes = {"hidden_size": width, "width": width, "num_hidden_layers": depth, "layers": depth}
    if name == TEXT:
        vocab = state[_need(state, f"{TEXT}.embeddings.token_embedding.weight")].shape[0]
        context = state[_need(state, f"{TEXT}.embeddings.position_embedding.weight")].shape[0]
        sizes |= {"vocab_size": vocab, "vocab": vocab}
        sizes |= {"max_position_embeddings": context, "context_length": context, "ctx": context}
    pretrained.check_config(config, sizes)
    first = lambda *names: next((config[n] for n in names if config.get(n) is not None), None)
    heads = first("num_attention_heads", "num_heads", "heads")
    if heads is None or (name == VISION and of_open_clip):
        heads = width // (first("head_width", "head_dim") or 64)
    if width % heads:
        raise ValueError(f"{heads} attention heads do not divide the width {width} of the {name}")
    default = "gelu" if of_open_clip else "quick_gelu"
    activation = first("hidden_act", "act", "activation") or default
    if config.get("quick_gelu"):
        activation = "quick_gelu"
    end_id = None if of_open_clip else first("eos_token_id", "eos")
    # Hugging Face's configs once said 2, which is wrong, and means the largest id there too.
    end_id = None if end_id == 2 else end_id
    return Tower(heads, activation, first("layer_norm_eps", "eps") or 1e-5, end_id)


def _need(state: StateDict, name: str) -> str:
    if name not in state:
        raise ValueError(f"the CLIP weights lack {name}: they are not whole, or of another kind")
    return name


def _from_hugging_face(state: StateDict) -> dict[str, np.ndarray]:
    arrays = {}
    for name, array in state.items():
        name = re.sub(r"^(cond_stage_model\.transformer|model|clip)\.(?=\w)", "", name)
        if name.endswith(("position_ids", "logit_scale", "logit_bias")):
            continue
        if re.match(
            r"(embeddings|encoder\.layers|final_layer_norm|pre_layrnorm|post_layernorm)\.", name
        ):
            visual = "embeddings.class_embedding" in " ".join(state)
            name = f"{VISION if visual else TEXT}.{name}"
        arrays[name] = array
    return arrays


_OPEN_CLIP = (  # After a tower's name: OpenCLIP's, then Hugging Face's.
    ("token_embedding.", "embeddings.token_embedding."),
    ("positional_embedding", "embeddings.position_embedding.weight"),
    ("class_embedding", "embeddings.class_embedding"),
    ("conv1.", "embeddings.patch_embedding."),
    ("ln_pre.", "pre_layrnorm."),
    ("ln_post.", "post_layernorm."),
    ("ln_final.", "final_layer_norm."),
    ("transformer.resblocks.", "encoder.layers."),
    ("ln_1.", "layer_norm1."),
    ("ln_2.", "layer_norm2."),
    ("attn.", "self_attn."),
    ("mlp.c_fc.", "mlp.fc1."),
    ("mlp.c_proj.", "mlp.fc2."),
)
_OPEN_CLIP_TEXT = ("token_embedding", "positional_embedding", "transformer", "ln_final")
_NO_WEIGHTS = ("logit_scale", "logit_bias", "attn_mask", "input_resolution", "context_length",
               "vocab_size")  # fmt: skip


def _from_open_clip(state: StateDict) -> dict[str, np.ndarray]:
    """Renamed; the projections turned, and q, k and v taken apart."""
    arrays = {}
    for name, array in state.items():
        name = re.sub(r"^(cond_stage_model\.)?(model|module|text)\.(?=\w)", "", name)
        if name in _NO_WEIGHTS:
            continue
        if name in ("text_projection", "visual.proj"):
            arrays[f"{'text' if name[0] == 't' else 'visual'}_projection.weight"] = array.T
            continue
        name = re.sub(r"^visual\.", f"{VISION}.", name)
        name = f"{TEXT}.{name}" if name.startswith(_OPEN_CLIP_TEXT) else name
        for theirs, here in _OPEN_CLIP:
            name = name.replace(f".{theirs}", f".{here}")
        fused = re.match(r"(.*\.self_attn\.)in_proj_(weight|bias)$", name)
        if fused:
            third = len(array) // 3
            for i, part in enumerate("qkv"):
                arrays[f"{fused[1]}{part}_proj.{fused[2]}"] = array[i * third : (i + 1) * third]
        else:
            arrays[name] = array
    return arrays
