"""Split the arrays of a Stable Diffusion checkpoint file into UNet, VAE and text encoder.

Such a file may also hold averages of the UNet's weights, and arrays that are not parameters, such
as those of the noise schedule.
"""

import re

import numpy as np

from diffusion_jax.weights import torch_weights
from diffusion_jax.weights.torch_weights import StateDict

PREFIXES = {
    "unet": ("model.model.diffusion_model.", "model.diffusion_model.", "diffusion_model."),
    "vae": ("model.first_stage_model.", "first_stage_model."),
    "text": ("model.cond_stage_model.", "cond_stage_model."),
}
"""The prefixes of each part's array names: in NeMo's files, in LDM's files, and for the UNet also
in files that hold only a UNet."""
_EMA = "model_ema."
# Arrays that are not parameters: the noise schedule, the loss, and the counters of the averages.
_NO_WEIGHTS = re.compile(
    r"(model\.)?(betas|\w*alphas_cumprod(_prev)?|posterior_\w+|lvlb_weights|logvar|scale_factor)"
    r"|model_ema\.(decay|num_updates)|loss\..*"
)


def split(state: StateDict, ema: str = "ema") -> dict[str, dict[str, np.ndarray]]:
    """Return {part: {name: array}} for the parts "unet", "vae" and "text" that a file holds.

    Prefixes are removed from the names. Arrays that are not parameters are left out. If no name has
    a prefix, all arrays belong to one network. With ema="ema", the averages of the UNet's weights
    replace its raw weights, if the file has averages. Raises ValueError if arrays belong to no
    part; the message lists their names.
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
        raise ValueError(
            f"{len(strays)} arrays belong neither to the UNet nor to the VAE nor to the text "
            f"encoder, so the model is not supported: {torch_weights.some(strays)}"
        )
    if averages and ema == "ema":
        parts["unet"] = _averaged(parts.get("unet", {}), averages)
    return parts


def has_averages(state: StateDict) -> bool:
    """Return whether the arrays of a checkpoint file include averages of the UNet's weights."""
    return any(name.startswith(f"{_EMA}diffusion_model") for name in state)


def _part(name: str) -> tuple[str, str]:
    for part, prefixes in PREFIXES.items():
        for prefix in prefixes:
            if name.startswith(prefix):
                return part, name.removeprefix(prefix)
    return "", name


def _averaged(raw: StateDict, averages: StateDict) -> dict[str, np.ndarray]:
    """Return the averages under the names of the raw weights.

    In CompVis's files, the name of an average is that of its raw weight without dots. Raises
    ValueError unless each raw weight has an average and each average has a raw weight.
    """
    names_of = {f"diffusion_model{name.replace('.', '')}": name for name in raw}
    if names_of.keys() != averages.keys():
        missing = [name for flat, name in names_of.items() if flat not in averages]
        stray = averages.keys() - names_of.keys()
        raise ValueError(
            f"the averages do not match the weights: missing {torch_weights.some(missing)}; "
            f"unknown {torch_weights.some(stray)}. Read the raw weights with --ema=raw"
        )
    return {name: averages[flat] for flat, name in names_of.items()}
