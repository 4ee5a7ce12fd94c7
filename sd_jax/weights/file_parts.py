"""Splitting the arrays of a single file into UNet, VAE, text encoder, averages and buffers."""

import re

import numpy as np

from diffusion_jax.weights import torch_weights
from diffusion_jax.weights.torch_weights import StateDict

PREFIXES = {
    "unet": ("model.model.diffusion_model.", "model.diffusion_model.", "diffusion_model."),
    "vae": ("model.first_stage_model.", "first_stage_model."),
    "text": ("model.cond_stage_model.", "cond_stage_model."),
}
"""Prefixes of the names of each part: NeMo's, LDM's, and those of a file with only a UNet."""
_EMA = "model_ema."
# Arrays of the noise schedule, the loss and the averages' counters.
_NO_WEIGHTS = re.compile(
    r"(model\.)?(betas|\w*alphas_cumprod(_prev)?|posterior_\w+|lvlb_weights|logvar|scale_factor)"
    r"|model_ema\.(decay|num_updates)|loss\..*"
)


def split(state: StateDict, ema: str = "ema") -> dict[str, dict[str, np.ndarray]]:
    """Split a file's arrays into "unet", "vae" and "text", without prefixes and without buffers.

    If no name has a prefix, all arrays belong to one network. With ema="ema", the UNet's averages
    replace its raw weights if the file has both. Raises ValueError that lists unknown names.
    """
    parts: dict[str, dict[str, np.ndarray]] = {}
    averages, strays = {}, {}
    for name, array in state.items():
        name = name.replace("_orig_mod.", "")  # Added by torch.compile.
        part, bare_name = _part(name)
        if _NO_WEIGHTS.fullmatch(name) or bare_name.startswith("loss."):
            continue
        if name.startswith(_EMA):
            averages[name.removeprefix(_EMA)] = array
        elif part:
            parts.setdefault(part, {})[bare_name] = array
        else:
            strays[name] = array
    if not parts and strays:
        is_vae = any(name.startswith(("encoder.", "decoder.")) for name in strays)
        return {"vae" if is_vae else "unet": strays}
    if strays:
        raise ValueError(f"{len(strays)} keys belong to no part: {torch_weights.some(strays)}")
    if averages and ema == "ema":
        parts["unet"] = _averaged(parts.get("unet", {}), averages)
    return parts


def has_averages(state: StateDict) -> bool:
    """Return whether a file also holds averages of the UNet."""
    return any(name.startswith(f"{_EMA}diffusion_model") for name in state)


def _part(name: str) -> tuple[str, str]:
    for part, prefixes in PREFIXES.items():
        for prefix in prefixes:
            if name.startswith(prefix):
                return part, name.removeprefix(prefix)
    return "", name


def _averaged(raw: StateDict, averages: StateDict) -> dict[str, np.ndarray]:
    """Return the averages by the names of the raw weights, whose dots CompVis leaves out."""
    names_of = {f"diffusion_model{name.replace('.', '')}": name for name in raw}
    if names_of.keys() != averages.keys():
        missing = [name for flat, name in names_of.items() if flat not in averages]
        stray = averages.keys() - names_of.keys()
        raise ValueError(
            f"the averages do not match the weights: missing {torch_weights.some(missing)}; "
            f"unknown {torch_weights.some(stray)}. Read the raw weights with --ema=raw"
        )
    return {name: averages[flat] for flat, name in names_of.items()}
