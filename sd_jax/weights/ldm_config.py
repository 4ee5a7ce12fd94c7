"""LDM's config of a whole model: what a single file's arrays do not show, said beside them.

Arrays show neither heads nor groups, nor what a UNet predicts. LDM has that in a yaml beside its
checkpoints (v1-inference.yaml), NeMo inside of a .nemo, and the files written here in their
metadata, in LDM's form.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from diffusion_jax.machine import files
from diffusion_jax.weights import torch_files, torch_weights
from sd_jax.unet import UNet
from sd_jax.vae import SCALE
from sd_jax.weights import formats

Config = Mapping[str, Any]
METADATA = "ldm_config"
"""The key of the config in a file's metadata."""
_TEXT = ("num_attention_heads", "hidden_act", "layer_norm_eps")
_ONLY = {"linear_start": 0.00085, "linear_end": 0.012, "timesteps": 1000, "beta_schedule": "linear"}
_PREDICTS = ("eps", "v")


class Facts(NamedTuple):
    """What a config says of a model; None, or what most have, where it does not."""

    unet: UNet | None
    predicts: str | None
    latent_size: int
    scale: float
    text: Config
    """The text tower's heads, activation and eps, by transformers' names; written here alone."""


def find(path: pathlib.Path, config: str | os.PathLike[str] | None = None) -> Config:
    """The config in a yaml or JSON file `config`, or else that in the weights' own file, or {}.

    FileNotFoundError or ValueError if a file is none of such a config.
    """
    if config is None and path.suffix == ".nemo":
        return torch_files.read_nemo_config(path)
    if config is None:
        said = torch_weights.read_metadata(path).get(METADATA)
        return json.loads(said) if said else {}
    import yaml  # Only where such a file is read.

    config = files.local(config)
    if not config.is_file():
        raise FileNotFoundError(f"no file {config}: --config is LDM's yaml of the model")
    try:
        content = yaml.safe_load(config.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{config} is no yaml: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or "unet_config" not in _fields(content.get("model", content)):
        raise ValueError(f"{config} is no config of LDM's: it has no model.params.unet_config")
    return content


def read(config: Config, norm_groups: int | None = None) -> Facts:
    """What a config of LDM's or NeMo's says; ValueError if it is of a model that is not here."""
    model = _fields(config.get("model", config))
    formats.check_only(model, _ONLY)
    predicts = model.get("parameterization")
    if predicts not in (None, *_PREDICTS):
        raise ValueError(f"parameterization is {predicts!r}: known are {', '.join(_PREDICTS)}")
    unet = _fields(model.get("unet_config"))
    text = _fields(model.get("cond_stage_config"))
    return Facts(
        formats.unet_from_ldm(unet, norm_groups) if unet else None,
        predicts,
        model.get("image_size") or 64,
        model.get("scale_factor") or SCALE,
        {name: text[name] for name in _TEXT if name in text},
    )


def write(facts: Facts, text_width: int) -> str:
    """The facts as a config in JSON, of which `read` gives the same again."""
    model = {"image_size": facts.latent_size, "scale_factor": facts.scale}
    model |= {"parameterization": facts.predicts} if facts.predicts else {}
    if facts.unet:
        model["unet_config"] = {"params": formats.unet_to_ldm(facts.unet, text_width)}
    model["cond_stage_config"] = {"params": {n: facts.text[n] for n in _TEXT if n in facts.text}}
    return json.dumps({"model": {"params": model}})


def _fields(group: Any) -> Config:
    """The fields of a part, which LDM holds in its `params` and NeMo in the part itself."""
    group = group if isinstance(group, Mapping) else {}
    return group.get("params") or {name: v for name, v in group.items() if name != "params"}
