"""Read CLIP weights from Hugging Face, OpenCLIP or OpenAI, under one set of names and settings.

The names are those of a complete Hugging Face CLIPModel ("text_model. ...", "vision_model. ...",
"text_projection.weight", "visual_projection.weight"). Names from OpenCLIP, OpenAI's original files
and files with a single tower are converted to them.
"""

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diffusion_jax.files import untrusted
from diffusion_jax.weights import pretrained, torch_files, torch_weights
from diffusion_jax.weights.torch_weights import CONV, Entry, StateDict

TEXT, VISION = "text_model", "vision_model"
PROJECTIONS = {TEXT: "text_projection", VISION: "visual_projection"}


class Tower(NamedTuple):
    """The settings of CLIP's text or image tower that the shapes of its arrays do not determine."""

    num_heads: int
    activation: str
    eps: float
    end_id: int | None
    """Id of the end token, as in TextTower. The image tower does not use it."""


class ClipWeights(NamedTuple):
    """CLIP weights: arrays under Hugging Face's names, and the settings of each tower."""

    state: dict[str, np.ndarray]
    towers: dict[str, Tower]
    """The settings of each tower in the weights, keyed by TEXT and VISION."""
    pads_with_0: bool
    """True if texts are padded with id 0, as in OpenCLIP; False if they are padded with the end
    token."""


def open_clip(folder: pathlib.Path, file: pathlib.Path | None = None) -> ClipWeights:
    """Open the CLIP weights in a folder, or in `file`, to which the folder's config applies.

    The config is config.json, or open_clip_config.json if the weights have OpenCLIP's names.

    Raises:
        FileNotFoundError: the folder has no weights or no config.
        ValueError: the weights are not CLIP's, or disagree with the config.
    """
    state = torch_files.read_state_dict(file) if file else pretrained.open_weights(folder)
    open_clip_config = folder / "open_clip_config.json"
    has_open_clip_config = is_open_clip(state) and open_clip_config.is_file()
    path = open_clip_config if has_open_clip_config else folder / "config.json"
    config = pretrained.read_json(path)
    with untrusted.naming(f"the model in {folder}"):
        return from_state(state, config)


def from_state(state: StateDict, config: Mapping[str, Any]) -> ClipWeights:
    """Build a `ClipWeights` from the state dict and the config of a CLIP model or of one tower.

    The names in `state` are those of Hugging Face, OpenCLIP or OpenAI.

    Raises:
        ValueError: the weights are not CLIP's, or disagree with the config.
    """
    from_open_clip = is_open_clip(state)
    arrays = _from_open_clip(state) if from_open_clip else _from_hugging_face(state)
    config = config.get("model_cfg", config)
    groups = {
        TEXT: config.get("text_config", config.get("text_cfg", config)),
        VISION: config.get("vision_config", config.get("vision_cfg", config.get("vision", config))),
    }
    # At the top level of OpenCLIP's config, these settings apply to both towers.
    shared = {k: v for k, v in config.items() if k in ("quick_gelu", "act", "hidden_act", "eps")}
    towers = {
        name: _tower(name, arrays, {**shared, **group}, from_open_clip)
        for name, group in groups.items()
        if any(key.startswith(f"{name}.") for key in arrays)
    }
    if not towers:
        raise ValueError(
            f"the weights are not CLIP's: their {len(state)} arrays ({sorted(state)[:3]}, ...) "
            "contain neither a text nor an image tower"
        )
    pad = config.get("pad_token_id", groups[TEXT].get("pad_token_id"))
    # The text encoder of Stable Diffusion 2 is OpenCLIP's. Its files have Hugging Face's names, but
    # texts are padded with 0.
    exact_gelu = TEXT in towers and towers[TEXT].activation == "gelu"
    return ClipWeights(arrays, towers, from_open_clip or pad == 0 or (exact_gelu and pad in (None, 1)))


def is_open_clip(state: StateDict) -> bool:
    """Return whether the arrays have the names used by OpenCLIP and by OpenAI's original files."""
    return any(re.search(r"(^|\.)transformer\.resblocks\.0\.", name) for name in state)


def table(params: Any, tower: str) -> list[Entry]:
    """Return a tower's conversion table, which pairs its parameters with the arrays of ClipWeights.

    Args:
        params: the parameters of a TextTower or an ImageTower, which may be abstract.
        tower: TEXT or VISION.
    """
    rules = [(path, name.replace("TOWER", tower)) for path, name in _RULES]
    rules.append(("final_norm", f"{tower}.{_FINAL_NORMS[tower]}"))
    rules.append(("projection", PROJECTIONS[tower]))
    name_of = lambda path: torch_weights.rename(path, rules)
    return torch_weights.table(params, name_of, [("patch_kernel", CONV)])


def num_layers(names: Iterable[str], tower: str) -> int:
    """Return the number of layers of a tower, given the names of all arrays."""
    matches = (re.match(rf"{tower}\.encoder\.layers\.(\d+)\.", name) for name in names)
    return 1 + max(int(match[1]) for match in matches if match)


def tower_state(clip: ClipWeights, table: Sequence[Entry]) -> dict[str, np.ndarray]:
    """Return the arrays of the tower that `table` converts, up to the last layer in `table`.

    Arrays that are not in `table` are included if they belong to these layers or to no layer, so
    that loading reports them as superfluous.
    """
    names = {e.torch for e in table}
    tower = next(tower for tower in (TEXT, VISION) if any(n.startswith(tower) for n in names))
    depth = num_layers(names, tower)

    def belongs(name: str) -> bool:
        layer = re.match(rf"{tower}\.encoder\.layers\.(\d+)\.", name)
        in_tower = name.startswith(f"{tower}.") and (layer is None or int(layer[1]) < depth)
        return in_tower or name in names

    return {name: array for name, array in clip.state.items() if belongs(name)}


def to_open_clip(state: StateDict) -> dict[str, np.ndarray]:
    """Rename a text tower's arrays from Hugging Face's names to OpenCLIP's names.

    The arrays of q, k and v are joined into one array.
    """
    arrays, thirds = {}, {}
    for name, array in state.items():
        for open_clip_name, hugging_face_name in _OPEN_CLIP:
            name = name.replace(f".{hugging_face_name}", f".{open_clip_name}")
        name = name.removeprefix(f"{TEXT}.")
        fused = re.match(r"(.*\.attn\.)([qkv])_proj\.(weight|bias)$", name)
        if fused:
            thirds.setdefault(f"{fused[1]}in_proj_{fused[3]}", {})[fused[2]] = array
        else:
            arrays[name] = array
    return arrays | {name: np.concatenate([parts[n] for n in "qkv"]) for name, parts in thirds.items()}


_RULES = (
    ("(token|position)_embedding", r"TOWER.embeddings.\1_embedding.weight"),
    ("class_embedding", "TOWER.embeddings.class_embedding"),
    ("patch_kernel", "TOWER.embeddings.patch_embedding.weight"),
    ("first_norm", "TOWER.pre_layrnorm"),  # Misspelt in transformers.
    (r"layer_(\d+)_attention/(q|k|v|out)", r"TOWER.encoder.layers.\1.self_attn.\2_proj"),
    (r"layer_(\d+)_attention_norm", r"TOWER.encoder.layers.\1.layer_norm1"),
    (r"layer_(\d+)_mlp_norm", r"TOWER.encoder.layers.\1.layer_norm2"),
    (r"layer_(\d+)_mlp/(\w+)", r"TOWER.encoder.layers.\1.mlp.\2"),
)
_FINAL_NORMS = {TEXT: "final_layer_norm", VISION: "post_layernorm"}


def _tower(name: str, state: StateDict, config: Mapping[str, Any], from_open_clip: bool) -> Tower:
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
    if heads is None or (name == VISION and from_open_clip):
        heads = width // (first("head_width", "head_dim") or 64)
    if width % heads:
        raise ValueError(
            f"the {name}'s {heads} attention heads do not divide its width {width}: use the "
            "config.json of these weights"
        )
    default = "gelu" if from_open_clip else "quick_gelu"
    activation = first("hidden_act", "act", "activation") or default
    if config.get("quick_gelu"):
        activation = "quick_gelu"
    end_id = None if from_open_clip else first("eos_token_id", "eos")
    # Older Hugging Face configs have the wrong end id 2; transformers then uses the largest id.
    end_id = None if end_id == 2 else end_id
    return Tower(heads, activation, first("layer_norm_eps", "eps") or 1e-5, end_id)


def _need(state: StateDict, name: str) -> str:
    if name not in state:
        raise ValueError(f"the CLIP weights lack {name}: use complete weights of a CLIP model")
    return name


def _from_hugging_face(state: StateDict) -> dict[str, np.ndarray]:
    arrays = []
    for name, array in state.items():
        name = re.sub(r"^(cond_stage_model\.transformer|model|clip)\.(?=\w)", "", name)
        if name.endswith(("position_ids", "logit_scale", "logit_bias")):
            continue
        if re.match(r"(embeddings|encoder\.layers|final_layer_norm|pre_layrnorm|post_layernorm)\.", name):
            visual = "embeddings.class_embedding" in " ".join(state)
            name = f"{VISION if visual else TEXT}.{name}"
        arrays.append((name, array))
    return untrusted.once(arrays)


_OPEN_CLIP = (  # Pairs of OpenCLIP's and Hugging Face's names. A dot precedes each in array names.
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
_NO_WEIGHTS = ("logit_scale", "logit_bias", "attn_mask", "input_resolution", "context_length", "vocab_size")


def _from_open_clip(state: StateDict) -> dict[str, np.ndarray]:
    """Rename arrays from OpenCLIP's names to Hugging Face's names.

    Projections are transposed, and arrays that hold q, k and v together are split.
    """
    arrays = []
    for name, array in state.items():
        name = re.sub(r"^(cond_stage_model\.)?(model|module|text)\.(?=\w)", "", name)
        if name in _NO_WEIGHTS:
            continue
        if name in ("text_projection", "visual.proj"):
            tower = "text" if name[0] == "t" else "visual"
            arrays.append((f"{tower}_projection.weight", array.T))
            continue
        name = re.sub(r"^visual\.", f"{VISION}.", name)
        name = f"{TEXT}.{name}" if name.startswith(_OPEN_CLIP_TEXT) else name
        for open_clip_name, hugging_face_name in _OPEN_CLIP:
            name = name.replace(f".{open_clip_name}", f".{hugging_face_name}")
        fused = re.match(r"(.*\.self_attn\.)in_proj_(weight|bias)$", name)
        if fused:
            thirds = zip("qkv", np.split(array, 3), strict=True)
            arrays += [(f"{fused[1]}{part}_proj.{fused[2]}", third) for part, third in thirds]
        else:
            arrays.append((name, array))
    return untrusted.once(arrays)
