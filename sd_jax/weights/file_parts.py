"""Split the arrays of a Stable Diffusion checkpoint file into UNet, VAE and text encoder.

Such a file may also hold averages of the UNet's weights, arrays that are not parameters, such as
those of the noise schedule, and arrays of other networks, such as a safety checker.
"""

import collections
import re
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from diffusion_jax.files import untrusted
from diffusion_jax.weights import torch_weights
from diffusion_jax.weights.torch_weights import StateDict
from sd_jax.weights import other_networks

PREFIXES = {
    "unet": ("model.model.diffusion_model.", "model.diffusion_model.", "diffusion_model."),
    "vae": ("model.first_stage_model.", "first_stage_model."),
    "text": ("model.cond_stage_model.", "cond_stage_model."),
}
"""The prefixes of each part's array names: in NeMo's files, in LDM's files, and for the UNet also
in files that hold only a UNet."""
V_PREDICTION, ZERO_SNR = "v_pred", "ztsnr"
"""Names of empty arrays that mark a model which predicts v, or was trained with zero terminal SNR,
as in ComfyUI."""
_EMA = "model_ema."
# Arrays that are not parameters: the noise schedule, the loss, and the counters of the averages.
_NO_WEIGHTS = re.compile(
    r"(model\.)?(betas|\w*alphas_cumprod(_prev)?|posterior_\w+|lvlb_weights|logvar|scale_factor)"
    r"|model_ema\.(decay|num_updates)|loss\..*"
)
# In CompVis's files, the name of an average is that of its raw weight without dots.
_WORDS = re.compile(
    r"(?:input|output)_blocks|\d+(?=\d(?:in_|emb_|out_|skip|norm|proj|trans|op|conv|weight|bias))|\d+"
    r"|time_embed|middle_block|(?:in|emb|out)_layers|skip_connection|transformer_blocks|attn\d"
    r"|proj_in|proj_out|proj|to_[qkv]|to_out|norm[123]?|ff|net|op|conv|out|weight|bias"
)


class SortedArrays(NamedTuple):
    """The arrays of a checkpoint file, sorted."""

    networks: dict[str, dict[str, np.ndarray]]
    """The arrays of the networks "unet", "vae" and "text", by name without prefix."""
    averaged: bool
    """Whether the UNet's arrays are averages."""
    marks: Sequence[str]
    """The marks in the file, V_PREDICTION and ZERO_SNR."""
    ignored: dict[str, int]
    """Numbers of arrays that belong to none of the networks, by the first part of their names."""


def split(state: StateDict, ema: str = "ema", wanted: Set[str] = PREFIXES.keys()) -> SortedArrays:
    """Sort the arrays of a file into networks, marks, and arrays to ignore.

    Arrays that are not parameters are left out. If no name has a prefix, all arrays belong to one
    network. With ema="ema", the averages of the UNet's weights replace its raw weights, if the file
    has averages. Raises ValueError if raw weights and averages do not match, if only the raw
    weights are wanted but the file has none, if two arrays of a network have the same name, or if
    one of the networks `wanted` is of another kind.
    """
    pairs: dict[str, list[tuple[str, np.ndarray]]] = {}
    averages, others, marks = {}, {}, []
    for name, array in state.items():
        name = name.replace("_orig_mod.", "")  # Added by torch.compile.
        part, bare_name = _part(name)
        if name in (V_PREDICTION, ZERO_SNR):
            marks.append(name)
        elif _NO_WEIGHTS.fullmatch(name) or bare_name.startswith("loss."):
            continue
        elif name.startswith(f"{_EMA}diffusion_model"):
            averages[_dotted(name.removeprefix(f"{_EMA}diffusion_model"))] = array
        elif part:
            pairs.setdefault(part, []).append((bare_name, array))
        else:
            others[name] = array
    parts = {part: untrusted.once(arrays) for part, arrays in pairs.items()}
    if averages:
        raw = parts.get("unet", {})
        if ema == "ema":
            # A file may have no raw weights at all.
            missing, stray = raw.keys() - averages.keys(), averages.keys() - raw.keys()
            if missing or (raw and stray):
                raise ValueError(
                    "the averages do not match the weights: missing "
                    f"{torch_weights.some(missing)}; unknown {torch_weights.some(stray)}. Read the "
                    "raw weights with --ema=raw"
                )
            parts["unet"] = averages
        elif not raw:
            raise ValueError("the file holds only averages of the UNet: leave --ema=raw out")
    if not parts:
        _check_kind(others, state)
        is_vae = any(name.startswith(("encoder.", "decoder.")) for name in others)
        parts, others = {"vae" if is_vae else "unet": others}, {}
    for part in (wanted & parts.keys() or parts.keys()) - {"text"}:
        _check_kind(parts[part], state)
    ignored = collections.Counter(name.partition(".")[0] for name in others)
    return SortedArrays(parts, bool(averages) and ema == "ema", marks, dict(ignored))


def _check_kind(arrays: StateDict, state: StateDict) -> None:
    """Raise ValueError if `arrays` is a network of another kind, which the message names.

    `state` holds all arrays of the file. Networks of unknown kinds pass.
    """
    if not arrays or other_networks.kind_of(arrays):
        kind = other_networks.kind_of(state) or "no arrays"
        raise ValueError(f"it holds {kind} instead of Stable Diffusion 1 or 2: choose another file")


def _part(name: str) -> tuple[str, str]:
    for part, prefixes in PREFIXES.items():
        for prefix in prefixes:
            if name.startswith(prefix):
                return part, name.removeprefix(prefix)
    return "", name


def _dotted(name: str) -> str:
    """Return the name of a UNet's raw weight in LDM, given the name of its average."""
    words = _WORDS.findall(name)
    return ".".join(words) if "".join(words) == name else name
