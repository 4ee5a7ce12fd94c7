"""Read and write the text encoder of a Stable Diffusion checkpoint, CLIP's text tower.

The UNet of Stable Diffusion 1.x attends to the output of the last layer of OpenAI's CLIP. The UNet
of 2.x attends to the output of the second-to-last layer of OpenCLIP. Therefore OpenCLIP's last
layer is not read, and diffusers directories do not contain it.
"""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from diffusion_jax.files import untrusted
from diffusion_jax.text import clip, clip_weights
from diffusion_jax.text.clip import TextTower
from diffusion_jax.text.tokenize import TextTokenizer
from diffusion_jax.weights import torch_weights
from diffusion_jax.weights.torch_weights import StateDict

_WIDTHS = (512, 640, 768, 1024, 1280)
_CLIP_TOKENS = 49408  # Number of tokens of CLIP's tokenizer. Added words follow.


class TextPart(NamedTuple):
    """A text tower and its float32 params. The UNet attends to its layer-normalised output."""

    tower: TextTower
    params: Any
    pads_with_0: bool
    """Whether texts are padded with the token 0, as in OpenCLIP, or with the end token (False)."""


def from_folder(folder: str | os.PathLike[str]) -> TextPart:
    """Read the text encoder from a folder that transformers or OpenCLIP wrote.

    Raises FileNotFoundError if the folder has no weights or no config, and ValueError if the
    weights are not CLIP's or disagree with the config.
    """
    opened = clip_weights.open_clip(pathlib.Path(folder))
    return _part(opened, clip_weights.is_open_clip(opened.state))


def from_ldm(state: StateDict, config: Mapping[str, Any]) -> TextPart:
    """Convert arrays with LDM's names, without the prefix "cond_stage_model.", to a text encoder.

    `config` holds settings under transformers' names. Without num_attention_heads, heads have width
    64, as in the models of OpenAI and OpenCLIP. Raises LookupError if the arrays are not CLIP's, or
    if the number of heads is unknown because no model of OpenAI or OpenCLIP has this width.
    """
    start = r"^transformer\.(?=(text_model|embeddings|encoder|final_layer_norm)\.)"
    state = untrusted.once([(re.sub(start, "", name), array) for name, array in state.items()])
    of_open_clip = clip_weights.is_open_clip(state)
    embedding = next((w for n, w in state.items() if n.endswith("token_embedding.weight")), None)
    if embedding is None:
        raise LookupError("they are not CLIP's")
    width = embedding.shape[1]
    if "num_attention_heads" not in config and width not in _WIDTHS:
        raise LookupError(f"it is unknown how many attention heads a CLIP of width {width} has")
    defaults = {"hidden_act": "gelu" if of_open_clip else "quick_gelu"}
    defaults |= {"num_attention_heads": width // 64}
    return _part(clip_weights.from_state(state, defaults | dict(config)), of_open_clip)


def to_ldm(part: TextPart) -> dict[str, np.ndarray]:
    """Convert a text encoder to arrays with LDM's names, without the prefix "cond_stage_model.".

    For Stable Diffusion 2.x, the missing last layer is written as zeros, so that it returns its
    input unchanged.
    """
    state = _state(part)
    if not part.pads_with_0:
        return {f"transformer.{name}": array for name, array in state.items()}
    first, last = (f"{clip_weights.TEXT}.encoder.layers.{i}." for i in (0, part.tower.num_layers))
    state |= {
        last + name.removeprefix(first): np.zeros_like(array) for name, array in state.items() if name.startswith(first)
    }
    return {f"model.{name}": w for name, w in clip_weights.to_open_clip(state).items()}


def to_transformers(
    part: TextPart, tokenizer: TextTokenizer | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Convert a text encoder to the config.json and the arrays of transformers' CLIPTextModel.

    Without a tokenizer, the config has the ids of CLIP's tokenizer, whose last token is the end.
    """
    tower = part.tower
    end = tokenizer.end if tokenizer else min(tower.vocab_size, _CLIP_TOKENS) - 1
    config = {
        "architectures": ["CLIPTextModel"],
        "bos_token_id": tokenizer.begin if tokenizer else end - 1,
        "eos_token_id": end,
        "hidden_act": tower.activation,
        "hidden_size": tower.width,
        "intermediate_size": tower.mlp_width,
        "layer_norm_eps": tower.eps,
        "max_position_embeddings": tower.max_tokens,
        "model_type": "clip_text_model",
        "num_attention_heads": tower.num_heads,
        "num_hidden_layers": tower.num_layers,
        "pad_token_id": tokenizer.pad if tokenizer else 0 if part.pads_with_0 else end,
        "projection_dim": tower.width,
        "vocab_size": tower.vocab_size,
    }
    return config, _state(part)


def _part(opened: clip_weights.ClipWeights, skip_last: bool) -> TextPart:
    tower, _ = clip.text_tower(opened, skip=int(skip_last))
    tower = tower.clone(projection=None, end_id=None)  # The UNet does not see the pooled text.
    abstract = clip.abstract_params(tower)
    table = clip_weights.table(abstract, clip_weights.TEXT)
    params = torch_weights.to_params(clip_weights.tower_state(opened, table), table, abstract)
    return TextPart(tower, params, opened.pads_with_0)


def _state(part: TextPart) -> dict[str, np.ndarray]:
    table = clip_weights.table(part.params, clip_weights.TEXT)
    return torch_weights.to_state_dict(part.params, table)
