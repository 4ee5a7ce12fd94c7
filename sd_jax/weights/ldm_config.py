"""Read and write LDM configs, which hold the settings of a model that its arrays do not show.

A model's arrays show neither the number of attention heads and norm groups nor whether the UNet
predicts eps or v. LDM's authors publish these settings as yaml files (v1-inference.yaml), and NeMo
stores them inside a .nemo file. Files written by this project have an LDM config in their metadata.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from diffusion_jax import files
from diffusion_jax.weights import torch_files, torch_weights
from sd_jax.unet import UNet
from sd_jax.weights import formats

Config = Mapping[str, Any]
METADATA = "ldm_config"
"""Key of the LDM config in the metadata of a checkpoint file."""
_TEXT = ("num_attention_heads", "hidden_act", "layer_norm_eps")
_ONLY = {"linear_start": 0.00085, "linear_end": 0.012, "timesteps": 1000, "beta_schedule": "linear"}
_PREDICTS = ("eps", "v")


class LdmSettings(NamedTuple):
    """Settings of a model that its arrays do not show, read from an LDM config.

    If the config lacks a setting, the value is None or that of Stable Diffusion 1.x.
    """

    unet: UNet | None
    predicts: str | None
    latent_size: int
    scale: float | None
    text: Config
    """The text encoder's number of heads, activation and layer norm eps, under transformers' names.
    Only files written by this project have them."""
    shift: float = 0.0
    """Number that is subtracted from samples of the VAE before they are scaled."""


def find(path: pathlib.Path, config: str | os.PathLike[str] | None = None) -> Config:
    """Return the LDM config for the checkpoint file `path`, or {} if there is none.

    `config` is the path of a yaml or JSON file with the config. If it is None, the config inside
    the checkpoint file is read. Raises FileNotFoundError if there is no file at `config`, and
    ValueError if the file is not an LDM config.
    """
    if config is None and path.suffix == ".nemo":
        return torch_files.read_nemo_config(path)
    if config is None:
        text = torch_weights.read_metadata(path).get(METADATA)
        return json.loads(text) if text else {}
    import yaml  # Imported only if needed.

    config = files.local(config)
    if not config.is_file():
        raise FileNotFoundError(f"--config={config} does not exist: name the yaml file with the model's LDM config")
    try:
        content = yaml.safe_load(config.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"--config={config} is not yaml: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or "unet_config" not in _fields(content.get("model", content)):
        raise ValueError(
            f"--config={config} is not an LDM config, because it has no model.params.unet_config: "
            "name a file such as v1-inference.yaml"
        )
    return content


def read(config: Config, norm_groups: int | None = None) -> LdmSettings:
    """Convert an LDM or NeMo config to LdmSettings. Raises ValueError for unsupported models.

    `norm_groups` overrides the number of groups in the norms of the UNet's residual blocks; None
    keeps the config's number.
    """
    model = _fields(config.get("model", config))
    formats.check_only(model, _ONLY)
    predicts = model.get("parameterization")
    if predicts not in (None, *_PREDICTS):
        raise ValueError(
            f"the config's parameterization is {predicts!r}, but only {' and '.join(_PREDICTS)} are supported"
        )
    unet = _fields(model.get("unet_config"))
    text = _fields(model.get("cond_stage_config"))
    return LdmSettings(
        formats.unet_from_ldm(unet, norm_groups) if unet else None,
        predicts,
        model.get("image_size") or 64,
        model.get("scale_factor") or None,
        {name: text[name] for name in _TEXT if name in text},
        model.get("shift_factor") or 0.0,
    )


def write(facts: LdmSettings, text_width: int) -> str:
    """Return LdmSettings as an LDM config in JSON, the inverse of `read`.

    `text_width` is the width of the text embeddings that the UNet attends to.
    """
    model = {"image_size": facts.latent_size, "scale_factor": facts.scale}
    model |= {"shift_factor": facts.shift} if facts.shift else {}
    model |= {"parameterization": facts.predicts} if facts.predicts else {}
    if facts.unet:
        model["unet_config"] = {"params": formats.unet_to_ldm(facts.unet, text_width)}
    model["cond_stage_config"] = {"params": {n: facts.text[n] for n in _TEXT if n in facts.text}}
    return json.dumps({"model": {"params": model}})


def _fields(group: Any) -> Config:
    """Return the fields of a config group, which LDM nests in `params` and NeMo does not."""
    group = group if isinstance(group, Mapping) else {}
    return group.get("params") or {name: v for name, v in group.items() if name != "params"}
