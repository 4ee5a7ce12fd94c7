"""A single file's arrays by what they are of: UNet, VAE, text encoder, averages, buffers."""

import re

import numpy as np

from diffusion_jax.weights import torch_weights
from diffusion_jax.weights.torch_weights import StateDict

PREFIXES = {
    "unet": ("model.model.diffusion_model.", "model.diffusion_model.", "diffusion_model."),
    "vae": ("model.first_stage_model.", "first_stage_model."),
    "text": ("model.cond_stage_model.", "cond_stage_model."),
}
"""How the names of each part begin: NeMo's, LDM's, and a bare UNet's."""
_EMA = "model_ema."
# What the schedule, the loss and the averages' counters leave beside the weights.
_NO_WEIGHTS = re.compile(
    r"(model\.)?(betas|\w*alphas_cumprod(_prev)?|posterior_\w+|lvlb_weights|logvar|scale_factor)"
    r"|model_ema\.(decay|num_updates)|loss\..*"
)


def split(state: StateDict, ema: str = "ema") -> dict[str, dict[str, np.ndarray]]:
    """The "unet", "vae" and "text" of a file's arrays, without prefixes; buffers left out.

    Arrays without any prefix are one network's. ValueError that lists strays.
    """
    parts: dict[str, dict[str, np.ndarray]] = {}
    averages, strays = {}, {}
    for name, array in state.items():
        name = name.replace("_orig_mod.", "")  # torch.compile's.
        part, rest = _part(name)
        if _NO_WEIGHTS.fullmatch(name) or rest.startswith("loss."):
            continue
        if name.startswith(_EMA):
            averages[name.removeprefix(_EMA)] = array
        elif part:
            parts.setdefault(part, {})[rest] = array
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
    """Whether the UNet lies there averaged, beside itself."""
    return any(name.startswith(f"{_EMA}diffusion_model") for name in state)


def _part(name: str) -> tuple[str, str]:
    for part, prefixes in PREFIXES.items():
        for prefix in prefixes:
            if name.startswith(prefix):
                return part, name.removeprefix(prefix)
    return "", name


def _averaged(raw: StateDict, averages: StateDict) -> dict[str, np.ndarray]:
    """The averages under the raw weights' names, of which CompVis takes out the dots."""
    names_of = {f"diffusion_model{name.replace('.', '')}": name for name in raw}
    if names_of.keys() != averages.keys():
        missing = [name for flat, name in names_of.items() if flat not in averages]
        stray = averages.keys() - names_of.keys()
        raise ValueError(
            f"the averages do not fit the weights: missing {torch_weights.some(missing)}; left "
            f"over {torch_weights.some(stray)}. Take the weights themselves with --ema=raw"
        )
    return {name: averages[flat] for flat, name in names_of.items()}
