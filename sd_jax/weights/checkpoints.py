"""Read and write complete Stable Diffusion checkpoints: UNet, VAE and text encoder.

The readers accept diffusers directories and the single files of CompVis, Stability and MLPerf
(.ckpt, .safetensors) and of NeMo (.ckpt, .nemo). They never execute code inside a file.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Collection, Mapping, Sized
from typing import Any, NamedTuple

import jax
import numpy as np

from diffusion_jax import files
from diffusion_jax.files import untrusted
from diffusion_jax.text import tokenize
from diffusion_jax.weights import flax_files, pretrained, torch_files, torch_weights
from diffusion_jax.weights.torch_weights import StateDict
from sd_jax.unet import INPAINTING, PIX2PIX, UNet, sees
from sd_jax.vae import SCALE, VAE
from sd_jax.weights import file_parts, formats, ldm_config, names, schedulers, text
from sd_jax.weights.ldm_config import LdmSettings
from sd_jax.weights.text import TextPart

PARTS = ("unet", "vae", "text")
WEIGHTS = "diffusion_pytorch_model.safetensors"
_FLAX_NAMES = {"diffusers": "diffusion_flax_model.msgpack", "transformers": "flax_model.msgpack"}
_PIPELINES = {
    "": "StableDiffusionPipeline",
    INPAINTING: "StableDiffusionInpaintPipeline",
    PIX2PIX: "StableDiffusionInstructPix2PixPipeline",
}
_PIPELINE = (
    "scheduler",
    "tokenizer",
    "unet",
    "vae",
    "text_encoder",
    "safety_checker",
    "feature_extractor",
    "image_encoder",
)


class UNetPart(NamedTuple):
    """A UNet, the width of the text that it attends to, and its float32 params on the host."""

    network: UNet
    text_width: int
    params: Any


class VAEPart(NamedTuple):
    """A VAE and its float32 params on the host."""

    network: VAE
    params: Any


class Checkpoint(NamedTuple):
    """The parts and settings of a Stable Diffusion checkpoint. A missing part is None."""

    unet: UNetPart | None
    vae: VAEPart | None
    report: list[str]
    """Lines to print that describe the parts. For files and diffusers directories, the line of each
    part states its numbers of arrays and parameters."""
    text: TextPart | None = None
    predicts: str | None = None
    """The UNet's prediction, "eps" or "v"; None if the checkpoint does not state it."""
    latent_size: int = 64
    """Side of the latents that the model was trained on."""
    scale: float = SCALE
    """Factor that scales a sample of the VAE's posterior to the UNet's latents."""
    scheduler: Mapping[str, Any] | None = None
    """The content of scheduler_config.json in a diffusers directory, or what a file says about its
    noise; None if nothing is said."""
    shift: float = 0.0
    """Number that is subtracted from a sample of the VAE's posterior before it is scaled."""


def load(
    path: str | os.PathLike[str],
    ema: str = "ema",
    norm_groups: int | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    heads: tuple[int, int] | None = None,
    parts: Collection[str] = PARTS,
) -> Checkpoint:
    """Read a checkpoint, or only some of its parts, from a file or a diffusers directory.

    Args:
        path: A checkpoint file, or a diffusers directory.
        ema: "raw" for the raw weights, or "ema" for their averages if the file has any. In a
            diffusers directory, the raw weights are the variant non_ema, if there is one.
        norm_groups: For files, the number of groups in the norms of residual blocks (16 for
            MLPerf's models). By default, the value in the file's config, or 32 if there is none.
        config: For files, the path of LDM's yaml of the model.
        heads: For files, (num_heads, head_dim) of the UNet, used if neither `config` nor the file
            states them.
        parts: The parts to read: "unet", "vae" and "text".

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: `path` holds no supported model. If arrays are missing or unknown, the message
            lists their names.
    """
    path = pretrained.snapshot(files.local(path))
    if ema not in ("ema", "raw"):
        raise ValueError(f"ema is {ema!r}: choose 'ema' or 'raw'")
    if path.is_dir() and config is not None:
        raise ValueError(f"{path} is a directory, which has its own configs: leave --config out")
    try:
        if path.is_dir():
            return _from_folder(path, parts, "non_ema" if ema == "raw" else "")
        state, model_config = torch_files.read_state_dict(path), ldm_config.find(path, config)
        facts = ldm_config.read(model_config, norm_groups)
        return _from_file(state, facts, ema, norm_groups, heads, parts)
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def save_diffusers(
    checkpoint: Checkpoint,
    folder: str | os.PathLike[str],
    predicts: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    *,
    flax: bool = False,
) -> None:
    """Write a diffusers directory, which StableDiffusionPipeline.from_pretrained opens.

    diffusers opens models for inpainting and InstructPix2Pix with other pipelines. The scheduler is
    the checkpoint's, or DDIM if it has none. If writing fails, no incomplete directory is left.

    Args:
        checkpoint: The parts to write.
        folder: The directory, which must be empty or not exist.
        predicts: The UNet's prediction, "eps" or "v". By default, the value in the checkpoint, or
            "eps" if there is none.
        tokenizer: A diffusers directory whose tokenizer is copied, if it has one. Without a
            tokenizer, the caller of from_pretrained must pass one.
        flax: Whether to write the weights as .msgpack files, for diffusers' former
            FlaxStableDiffusionPipeline.

    Raises:
        ValueError: `folder` is not empty, or diffusers cannot express one of the networks.
    """
    folder = files.path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose a new folder")
    unet = checkpoint.unet.network if checkpoint.unet else UNet()
    pipeline = _PIPELINES[sees(unet.in_channels, unet.out_channels)]
    index: dict[str, Any] = {"_class_name": pipeline, "_diffusers_version": "0.34.0"}
    index |= {"safety_checker": [None, None], "feature_extractor": [None, None]}
    config = {"_class_name": "DDIMScheduler", **(checkpoint.scheduler or ddim())}
    config["prediction_type"] = _prediction(predicts or checkpoint.predicts or "eps")
    index |= {"requires_safety_checker": False, "scheduler": ["diffusers", config["_class_name"]]}
    index |= {"text_encoder": [None, None], "tokenizer": [None, None]}
    source = None if tokenizer is None else pretrained.snapshot(files.path(tokenizer))
    source = files.local(source) if source and (source / "tokenizer").is_dir() else None
    with files.whole(folder) as temporary:
        for part, (library, name, network, state) in _for_diffusers(checkpoint, source).items():
            _write_json(temporary / part / "config.json", network)
            if flax:
                flax_files.write(temporary / part / _FLAX_NAMES[library], state)
            else:
                torch_weights.write(temporary / part / name, state)
            index[part] = [library, network.get("_class_name") or network["architectures"][0]]
        _write_json(temporary / "scheduler" / "scheduler_config.json", config)
        if source:
            shutil.copytree(source / "tokenizer", temporary / "tokenizer")
            source_index = pretrained.read_json(source / "model_index.json")
            index["tokenizer"] = source_index.get("tokenizer", index["tokenizer"])
        _write_json(temporary / "model_index.json", index)


def save_file(checkpoint: Checkpoint, path: str | os.PathLike[str], dialect: str = "ldm") -> None:
    """Write all parts of a checkpoint to one .safetensors or .npz file.

    `dialect` chooses the parameter names: "ldm" or "nemo". Settings that the arrays do not show,
    such as the number of attention heads, are written to the file's metadata (see ldm_config.py).
    """
    if dialect not in ("ldm", "nemo"):
        raise ValueError(f"--names={dialect}: for a file of all weights, choose ldm or nemo")
    parts, prefix_index = {}, 1 if dialect == "ldm" else 0
    if checkpoint.unet:
        unet, _, params = checkpoint.unet
        parts["unet"] = names.unet_to_torch(params, unet, dialect)
    if checkpoint.vae:
        vae, params = checkpoint.vae
        parts["vae"] = names.vae_to_torch(params, vae, dialect)
    if checkpoint.text:
        parts["text"] = text.to_ldm(checkpoint.text)
    state = {
        file_parts.PREFIXES[part][prefix_index] + name: array
        for part, arrays in parts.items()
        for name, array in arrays.items()
    }
    if schedulers.read_diffusion(checkpoint.scheduler or {})[1] == schedulers.ZERO_SNR:
        state[file_parts.ZERO_SNR] = np.zeros(0, np.float32)
    torch_weights.write(path, state, {ldm_config.METADATA: _config(checkpoint)})


def ddim(zero_snr: bool = False) -> dict[str, Any]:
    """Return the scheduler_config.json of DDIM for Stable Diffusion's noise.

    With `zero_snr`, the noise has zero terminal SNR, and the first step is at its last level.
    """
    trailing = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return {
        "_class_name": "DDIMScheduler",
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "clip_sample": False,
        "num_train_timesteps": 1000,
        "set_alpha_to_one": False,
        "steps_offset": 1,
        **(trailing if zero_snr else {}),
    }


def equal(a: Checkpoint, b: Checkpoint) -> bool:
    """Return whether two checkpoints have the same parts, with bitwise equal parameters."""
    parts = lambda checkpoint: (checkpoint.unet, checkpoint.vae, checkpoint.text)
    networks = lambda c: [part and part._replace(params=None) for part in parts(c)]
    params = lambda c: [part and part.params for part in parts(c)]
    return networks(a) == networks(b) and jax.tree.all(jax.tree.map(np.array_equal, params(a), params(b)))


def _from_folder(folder: pathlib.Path, wanted: Collection[str], variant: str) -> Checkpoint:
    """Read the parts `wanted` from a diffusers directory with a pipeline or a single network.

    The variant `variant` of the UNet's weights is preferred.
    """
    if "unet" in wanted:  # The VAE and CLIP are also read from pipelines with other networks.
        _check_pipeline(folder / "model_index.json")
    places = {part: folder / part for part in ("unet", "vae") if (folder / part).is_dir()}
    if not places:
        config = _diffusers_config(folder / "config.json")
        places = {"vae" if config.get("_class_name") == "AutoencoderKL" else "unet": folder}
    unet_part, vae_part, text_part, report = None, None, None, []
    configs = {part: _diffusers_config(places[part] / "config.json") for part in places}
    if "unet" in wanted and "unet" in places:
        state = pretrained.open_weights(places["unet"], variant)
        unet_part = _unet(formats.unet_from_diffusers(configs["unet"]), state)
        report.append(_line("unet", state, "diffusers", unet_part.params))
    if "vae" in wanted and "vae" in places:
        state = pretrained.open_weights(places["vae"])
        vae_part = _vae(formats.vae_from_diffusers(configs["vae"]), state)
        report.append(_line("vae", state, "diffusers", vae_part.params))
    if "text" in wanted and (folder / "text_encoder").is_dir():
        text_part = text.from_folder(folder / "text_encoder")
        state = jax.tree.leaves(text_part.params)
        report.append(_line("text", state, "transformers", text_part.params))
    place = folder / "scheduler" / "scheduler_config.json"
    scheduler = _diffusers_config(place) if place.is_file() else None
    with untrusted.naming(str(place)):
        predicts = schedulers.read_diffusion(scheduler)[0] if scheduler else None
    latent_size = formats.latent_size(configs.get("unet", {}))
    scale = configs.get("vae", {}).get("scaling_factor") or SCALE
    shift = configs.get("vae", {}).get("shift_factor") or 0.0
    return Checkpoint(unet_part, vae_part, report, text_part, predicts, latent_size, scale, scheduler, shift)


def _from_file(
    state: StateDict,
    facts: LdmSettings,
    ema: str,
    norm_groups: int | None,
    heads: tuple[int, int] | None,
    wanted: Collection[str],
) -> Checkpoint:
    found = file_parts.split(state, ema, set(wanted))
    parts = {part: arrays for part, arrays in found.networks.items() if part in wanted}
    unet_part, vae_part, text_part, report = None, None, None, []
    if "unet" in parts:
        arrays = parts["unet"]
        unet_part = _unet(facts.unet or _guessed(arrays, norm_groups, heads), arrays)
        averaged = ", averages" if found.averaged else ""
        dialect = names.unet_dialect(arrays) + averaged
        report.append(_line("unet", arrays, dialect, unet_part.params))
    if "vae" in parts:
        vae_part = _vae(formats.vae_from_weights(parts["vae"]), parts["vae"])
        report.append(_line("vae", parts["vae"], "ldm", vae_part.params))
        if facts.scale is None and "unet" not in found.networks:
            report.append(
                f"vae: the file states no scale of the latents, so Stable Diffusion's {SCALE} is "
                "used: for another VAE, set latents.scale, or scaling_factor in vae/config.json"
            )
    if "text" in parts:
        try:
            text_part = text.from_ldm(parts["text"], facts.text)
            report.append(_text_line(parts["text"], text_part))
        except LookupError as error:
            report.append(f"text: arrays left out ({len(parts['text'])}): {error}")
    report += [f"the file is marked {mark}" for mark in found.marks]
    if found.ignored:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(found.ignored.items()))
        report.append(f"arrays of other networks, not used: {listed}")
    predicts = "v" if file_parts.V_PREDICTION in found.marks else facts.predicts
    scheduler = ddim(zero_snr=True) if file_parts.ZERO_SNR in found.marks else None
    size, scale, shift = facts.latent_size, facts.scale or SCALE, facts.shift
    return Checkpoint(unet_part, vae_part, report, text_part, predicts, size, scale, scheduler, shift)


def _unet(network: UNet, state: StateDict) -> UNetPart:
    width = names.text_width(state)
    return UNetPart(network, width, names.unet_from_torch(state, network, width))


def _vae(network: VAE, state: StateDict) -> VAEPart:
    return VAEPart(network, names.vae_from_torch(state, network))


def _guessed(arrays: StateDict, norm_groups: int | None, heads: tuple[int, int] | None) -> UNet:
    """Infer the UNet from its arrays. Raises ValueError if its number of heads is unknown."""
    names.text_width(arrays)  # Refuses networks of other kinds.
    if names.unet_dialect(arrays) == "diffusers":
        raise ValueError(
            "the UNet has diffusers' names, so config.json is also needed: name the "
            "directory that holds config.json and the weights"
        )
    unet = formats.unet_from_weights(arrays, norm_groups or 32, heads)
    if heads is None and not formats.is_published(unet):
        raise ValueError(
            f"the UNet has width {unet.width} and {len(unet.channel_mult)} levels, and the number "
            "of attention heads is known only for the sizes of Stable Diffusion 1.x and 2.x: give "
            "the model's LDM config, such as --config=v1-inference.yaml"
        )
    return unet


def _check_pipeline(index: pathlib.Path) -> None:
    parts = pretrained.read_json(index) if index.is_file() else {}
    part_names = [name for name, value in parts.items() if isinstance(value, list) and value[0]]
    if unknown := [name for name in part_names if name not in _PIPELINE]:
        raise ValueError(
            f"the model is a {parts.get('_class_name')} with the part {unknown[0]}: only Stable "
            "Diffusion 1.x and 2.x are supported, with the parts unet, vae and text_encoder"
        )


def _for_diffusers(
    checkpoint: Checkpoint, source: pathlib.Path | None
) -> dict[str, tuple[str, str, dict[str, Any], dict[str, np.ndarray]]]:
    """Map each part to its library, file name, config and arrays in a diffusers directory.

    The tokenizer of the diffusers directory `source`, if any, determines the ids in the configs.
    """
    parts = {}
    if checkpoint.unet:
        unet, text_width, params = checkpoint.unet
        config = formats.unet_to_diffusers(unet, text_width)
        config |= {"sample_size": checkpoint.latent_size}
        state = names.unet_to_torch(params, unet, "diffusers")
        parts["unet"] = "diffusers", WEIGHTS, config, state
    if checkpoint.vae:
        vae, params = checkpoint.vae
        config = formats.vae_to_diffusers(vae) | {"scaling_factor": checkpoint.scale}
        config["shift_factor"] = checkpoint.shift or None
        state = names.vae_to_torch(params, vae, "diffusers")
        parts["vae"] = "diffusers", WEIGHTS, config, state
    if checkpoint.text:
        clip = source and tokenize.clip(source / "tokenizer", open_clip=checkpoint.text.pads_with_0)
        model = text.to_transformers(checkpoint.text, clip)
        parts["text_encoder"] = "transformers", "model.safetensors", *model
    return parts


def _config(checkpoint: Checkpoint) -> str:
    unet, c = checkpoint.unet, checkpoint
    text_config = text.to_transformers(c.text)[0] if c.text else {}
    network = unet.network if unet else None
    facts = LdmSettings(network, c.predicts, c.latent_size, c.scale, text_config, c.shift)
    return ldm_config.write(facts, unet.text_width if unet else 0)


def _prediction(predicts: str) -> str:
    if predicts not in schedulers.PREDICTS:
        raise ValueError(f"--predicts={predicts}: choose from {', '.join(schedulers.PREDICTS)}")
    return schedulers.PREDICTS[predicts]


def _diffusers_config(path: pathlib.Path) -> dict[str, Any]:
    """Read a config of diffusers, with the torch class's name in place of a Flax class's."""
    config = pretrained.read_json(path)
    if "_class_name" in config:
        config["_class_name"] = str(config["_class_name"]).removeprefix("Flax")
    return config


def _text_line(arrays: StateDict, part: TextPart) -> str:
    count = sum(leaf.size for leaf in jax.tree.leaves(part.params))
    last = ", without OpenCLIP's last layer" if part.pads_with_0 else ""
    return f"text: {len(arrays)} arrays{last}, {count:,} parameters"


def _line(part: str, state: Sized, dialect: str, params: Any) -> str:
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return f"{part}: {len(state)} arrays ({dialect}), {count:,} parameters, each used once"


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")
