"""Whole Stable Diffusion checkpoints of every origin, opened as UNet, VAE and text, and written.

CompVis', Stability's and MLPerf's files (.ckpt, .safetensors), NeMo's (.ckpt, .nemo), and
directories of diffusers. Nothing that lies in a file is ever run.
"""

import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sized
from typing import Any, NamedTuple

import jax
import numpy as np

from diffusion_jax.machine import files
from diffusion_jax.weights import pretrained, torch_files, torch_weights
from diffusion_jax.weights.torch_weights import StateDict
from sd_jax.unet import UNet
from sd_jax.vae import SCALE, VAE
from sd_jax.weights import formats, names, schedulers, text
from sd_jax.weights.text import TextPart

WEIGHTS = "diffusion_pytorch_model.safetensors"
_PREFIXES = {
    "unet": ("model.model.diffusion_model.", "model.diffusion_model.", "diffusion_model."),
    "vae": ("model.first_stage_model.", "first_stage_model."),
    "text": ("model.cond_stage_model.", "cond_stage_model."),
}
_EMA = "model_ema."
# What the schedule, the loss and the averages' counters leave beside the weights.
_NO_WEIGHTS = re.compile(
    r"(model\.)?(betas|\w*alphas_cumprod(_prev)?|posterior_\w+|lvlb_weights|logvar|scale_factor)"
    r"|model_ema\.(decay|num_updates)|loss\..*"
)


class UNetPart(NamedTuple):
    """A UNet, the width of the text that it attends to, and its params, float32 on the host."""

    network: UNet
    text_width: int
    params: Any


class VAEPart(NamedTuple):
    """A VAE and its params, float32 on the host."""

    network: VAE
    params: Any


class Checkpoint(NamedTuple):
    """The parts of a checkpoint, None where it lacks them."""

    unet: UNetPart | None
    vae: VAEPart | None
    report: list[str]
    """A line for each part: where it was found, and what it is."""
    text: TextPart | None = None
    predicts: str | None = None
    """The kind of the UNet's output, "eps" or "v", where the checkpoint says it."""
    latent_size: int = 64
    """The side of the latents that it was made for, where the checkpoint says it."""
    scale: float = SCALE
    """The factor from a sample of the VAE's posterior to the latents that the UNet sees."""
    scheduler: Mapping[str, Any] | None = None
    """A diffusers directory's scheduler_config.json."""


def load(
    path: str | os.PathLike[str], ema: str = "ema", norm_groups: int | None = None
) -> Checkpoint:
    """Opens a file or a diffusers directory.

    `ema`: "ema" takes averaged weights where the file has them beside the raw ones, "raw" never.
    `norm_groups` is for files alone, which do not show it: 16 of MLPerf's, 32 of all others.
    FileNotFoundError, or ValueError that lists the keys that do not fit.
    """
    path = pathlib.Path(path)
    if ema not in ("ema", "raw"):
        raise ValueError(f"ema is {ema!r}: choose 'ema' or 'raw'")
    try:
        return _from_folder(path) if path.is_dir() else _from_file(path, ema, norm_groups)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


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


def save_diffusers(
    checkpoint: Checkpoint,
    folder: str | os.PathLike[str],
    predicts: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    scheduler: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a directory for StableDiffusionPipeline.from_pretrained, whole or not at all.

    `tokenizer` and `scheduler`: diffusers directories that these are copied from, if they have
    them. Otherwise the scheduler is DDIM's for a UNet that `predicts` "eps" or "v" (by default what
    the checkpoint says, or eps), and the tokenizer is for from_pretrained's caller to give.
    ValueError for networks that diffusers does not have.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name a new folder")
    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline"}
    index |= {"safety_checker": [None, None], "feature_extractor": [None, None]}
    index |= {"requires_safety_checker": False, "scheduler": ["diffusers", "DDIMScheduler"]}
    index |= {"text_encoder": [None, None], "tokenizer": [None, None]}
    ddim = _scheduler(predicts or checkpoint.predicts or "eps")
    with files.whole(folder) as temporary:
        for part, (library, name, config, state) in _for_diffusers(checkpoint).items():
            _write_json(temporary / part / "config.json", config)
            torch_weights.write(temporary / part / name, state)
            index[part] = [library, config.get("_class_name") or config["architectures"][0]]
        _write_json(temporary / "scheduler" / "scheduler_config.json", ddim)
        for part, source in (("tokenizer", tokenizer), ("scheduler", scheduler)):
            if source is not None and (pathlib.Path(source) / part).is_dir():
                there = temporary / part
                shutil.copytree(pathlib.Path(source) / part, there, dirs_exist_ok=True)
                theirs = pretrained.read_json(pathlib.Path(source) / "model_index.json")
                index[part] = theirs.get(part, index[part])
        _write_json(temporary / "model_index.json", index)


def save_file(checkpoint: Checkpoint, path: str | os.PathLike[str], dialect: str = "ldm") -> None:
    """Writes all parts into one .safetensors or .npz file under LDM's or NeMo's names."""
    if dialect not in ("ldm", "nemo"):
        raise ValueError(f"a file has the names 'ldm' or 'nemo', not {dialect!r}")
    parts, which = {}, 1 if dialect == "ldm" else 0
    if checkpoint.unet:
        unet, _, params = checkpoint.unet
        parts["unet"] = names.unet_to_torch(params, unet, dialect)
    if checkpoint.vae:
        vae, params = checkpoint.vae
        parts["vae"] = names.vae_to_torch(params, vae, dialect)
    if checkpoint.text:
        parts["text"] = text.to_ldm(checkpoint.text)
    state = {
        _PREFIXES[part][which] + name: array
        for part, arrays in parts.items()
        for name, array in arrays.items()
    }
    torch_weights.write(path, state)


def equal(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether two hold the same parts, the same to the last bit."""
    pairs = ((a.unet, b.unet), (a.vae, b.vae), (a.text, b.text))
    return all(
        (x is None) == (y is None)
        # The network comes first; what follows is the same where it is.
        and (x is None or y is None or x[0] == y[0])
        and (x is None or y is None or jax.tree.all(jax.tree.map(_same, x.params, y.params)))
        for x, y in pairs
    )


def _from_folder(folder: pathlib.Path) -> Checkpoint:
    unet_part, vae_part, text_part, latent_size, report = None, None, None, 64, []
    scale = SCALE
    # A pipeline's folder, or that of one network.
    places = {part: folder / part for part in ("unet", "vae") if (folder / part).is_dir()}
    config = {} if places else pretrained.read_json(folder / "config.json")
    if not places:
        places = {"vae" if config.get("_class_name") == "AutoencoderKL" else "unet": folder}
    for part, place in places.items():
        config, state = pretrained.read_json(place / "config.json"), _open(place)
        if part == "unet":
            unet, width = formats.unet_from_diffusers(config), names.text_width(state)
            unet_part = UNetPart(unet, width, names.unet_from_torch(state, unet, width))
            latent_size = config.get("sample_size") or latent_size
            report.append(_line(part, state, "diffusers", unet_part.params))
        else:
            vae = formats.vae_from_diffusers(config)
            vae_part = VAEPart(vae, names.vae_from_torch(state, vae))
            scale = config.get("scaling_factor", SCALE)
            report.append(_line(part, state, "diffusers", vae_part.params))
    if (folder / "text_encoder").is_dir():
        text_part = text.from_folder(folder / "text_encoder")
        state = jax.tree.leaves(text_part.params)
        report.append(_line("text", state, "transformers", text_part.params))
    scheduler = _read_scheduler(folder / "scheduler" / "scheduler_config.json")
    predicts = schedulers.read_diffusion(scheduler)[0] if scheduler else None
    return Checkpoint(
        unet_part, vae_part, report, text_part, predicts, latent_size, scale, scheduler
    )


def _from_file(path: pathlib.Path, ema: str, norm_groups: int | None) -> Checkpoint:
    state = torch_files.read_state_dict(path)
    parts = split(state, ema)
    config = torch_files.read_nemo_config(path) if path.suffix == ".nemo" else {}
    unet_part, vae_part, text_part, report = None, None, None, []
    if "unet" in parts:
        arrays = parts["unet"]
        dialect, width = names.unet_dialect(arrays), names.text_width(arrays)
        if "unet_config" in config:
            unet = formats.unet_from_ldm(config["unet_config"], norm_groups)
        elif dialect == "diffusers":
            raise ValueError("a UNet under diffusers' names is read from its folder, where its "
                             "config.json lies")  # fmt: skip
        else:
            unet = formats.unet_from_weights(arrays, norm_groups or 32)
        unet_part = UNetPart(unet, width, names.unet_from_torch(arrays, unet, width))
        averaged = ", averages" if ema == "ema" and _has_averages(state) else ""
        report.append(_line("unet", arrays, dialect + averaged, unet_part.params))
    if "vae" in parts:
        vae = formats.vae_from_weights(parts["vae"])
        vae_part = VAEPart(vae, names.vae_from_torch(parts["vae"], vae))
        report.append(_line("vae", parts["vae"], "ldm", vae_part.params))
    if "text" in parts:
        text_part = text.from_ldm(parts["text"])
        report.append(_text_line(parts["text"], text_part))
    predicts = config.get("parameterization")
    return Checkpoint(unet_part, vae_part, report, text_part, predicts)


def _for_diffusers(
    checkpoint: Checkpoint,
) -> dict[str, tuple[str, str, dict[str, Any], dict[str, np.ndarray]]]:
    """The library, file name, config and arrays of each part."""
    written = {}
    if checkpoint.unet:
        unet, text_width, params = checkpoint.unet
        config = formats.unet_to_diffusers(unet, text_width)
        config |= {"sample_size": checkpoint.latent_size}
        state = names.unet_to_torch(params, unet, "diffusers")
        written["unet"] = "diffusers", WEIGHTS, config, state
    if checkpoint.vae:
        vae, params = checkpoint.vae
        config = formats.vae_to_diffusers(vae) | {"scaling_factor": checkpoint.scale}
        state = names.vae_to_torch(params, vae, "diffusers")
        written["vae"] = "diffusers", WEIGHTS, config, state
    if checkpoint.text:
        model = text.to_transformers(checkpoint.text)
        written["text_encoder"] = "transformers", "model.safetensors", *model
    return written


def _open(folder: pathlib.Path) -> Mapping[str, np.ndarray]:
    whole = folder / WEIGHTS
    return pretrained.map_safetensors(whole) if whole.is_file() else pretrained.open_weights(folder)


def _part(name: str) -> tuple[str, str]:
    for part, prefixes in _PREFIXES.items():
        for prefix in prefixes:
            if name.startswith(prefix):
                return part, name.removeprefix(prefix)
    return "", name


def _has_averages(state: StateDict) -> bool:
    return any(name.startswith(f"{_EMA}diffusion_model") for name in state)


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


def _scheduler(predicts: str) -> dict[str, Any]:
    if predicts not in schedulers.PREDICTS:
        known = ", ".join(schedulers.PREDICTS)
        raise ValueError(f"predicts is {predicts!r}: choose from {known}")
    return {
        "_class_name": "DDIMScheduler",
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "clip_sample": False,
        "num_train_timesteps": 1000,
        "prediction_type": schedulers.PREDICTS[predicts],
        "set_alpha_to_one": False,
        "steps_offset": 1,
    }


def _read_scheduler(path: pathlib.Path) -> dict[str, Any] | None:
    """A scheduler's config, None without a file; ValueError if its noise is not built here."""
    config = pretrained.read_json(path) if path.is_file() else None
    try:
        schedulers.read_diffusion(config or {})
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
    return config


def _text_line(arrays: StateDict, part: TextPart | None) -> str:
    if part is None:
        return f"text: {len(arrays)} arrays of another kind than CLIP's, left out"
    count = sum(leaf.size for leaf in jax.tree.leaves(part.params))
    last = ", the last layer of OpenCLIP's left out" if part.pads_with_0 else ""
    return f"text: {len(arrays)} arrays{last}, {count:,} parameters"


def _line(part: str, state: Sized, dialect: str, params: Any) -> str:
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return f"{part}: {len(state)} arrays ({dialect}), {count:,} parameters, each used once"


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b)
