"""Draw with a Stable Diffusion model, trained here or elsewhere.

    from sd_jax import drawing

    model = drawing.load("runs/sd_quickstart", *drawing.choose(steps=20))
    images = drawing.draw(model, ["a red seven on gray paper"], seeds=[0])

`load` also opens diffusers directories and single files of CompVis, Stability, MLPerf and NeMo.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8

from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.draw import options, program
from diffusion_jax.draw.model import Model
from diffusion_jax.draw.options import NEWEST, Choice, Option, Options, Weights
from diffusion_jax.draw.program import Images
from diffusion_jax.machine import files, sheets
from sd_jax import sampling, settings
from sd_jax.weights import published, trained
from sd_jax.weights.published import NO_FACTS, File

OPTIONS: Options = {
    **options.SHARED,
    "vae_weights": Option(
        "Another VAE: a file, a diffusers directory or a workdir.",
        str, field="vae.weights", at_load=True,
    ),
    **options.of_group("sampler", settings.Sampler),
}  # fmt: skip
"""The options of a model, keyed by the names of their flags and keywords."""


def choose(**values: Any) -> Choice:
    """Convert values of OPTIONS to a Choice, the arguments of `load`.

    Raises ValueError for an unknown name, and for a value of another type or out of range.
    """
    return options.choose(OPTIONS, values)


def load(
    path: str | os.PathLike[str],
    overrides: Mapping[str, Any] = {},
    weights: Weights = NEWEST,
    guide: str = "",
    *,
    file: File = NO_FACTS,
    strength: float = 1.0,
) -> Model:
    """Open the model of a training run's workdir, a diffusers directory or a single file.

    Args:
        path: The workdir, directory or file.
        overrides: Values that replace those of the config, keyed by field; see `choose`.
        weights: The saved weights of a run; for a file, its averaged or its raw weights.
        guide: A run that guides this one, WORKDIR or WORKDIR@STEP.
        file: Facts that a directory or a file may not contain.
        strength: The share of the steps that draw over a given picture; see settings.Pipeline.

    Raises:
        FileNotFoundError: If the path, or something that it names, does not exist.
        ValueError: If a part of the model is missing, or the arguments do not fit it.
    """
    path = files.path(path)
    if path.is_file() or (path / "model_index.json").is_file() or (path / "unet").is_dir():
        if guide:
            raise ValueError(f"--guide={guide} needs a run (--workdir), but {path} is not a run")
        return published.load_model(files.local(path), overrides, weights.ema, file, strength)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no {path}: name a run, a diffusers directory or a file")
    return trained.load_model(path, overrides, weights, guide, strength)


def draw(
    model: Model,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    negative_prompt: str | None = None,
    guidance: float | None = None,
    images: UInt8[np.ndarray, "N H W 3"] | None = None,
    masks: Bool[np.ndarray, "N H W"] | None = None,
) -> UInt8[np.ndarray, "N H W 3"]:
    """Draw one image for each prompt and its seed; None stands for the model's settings.

    With `images`, image n is drawn over images[n]; with `masks`, only where masks[n] is True. Image
    n depends only on its own prompt, seed, picture and mask.

    Raises:
        ValueError: If the numbers of prompts, seeds and images differ, or a size does not fit.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds: give one seed per prompt")
    if images is not None:
        if len(images) != len(seeds):
            raise ValueError(f"{len(images)} images and {len(seeds)} seeds: give one for each")
        settings.check_size(model.settings, "the images' height", images.shape[1])
        settings.check_size(model.settings, "the images' width", images.shape[2])
    if masks is not None and (images is None or masks.shape != images.shape[:3]):
        raise ValueError(f"masks have the shape {masks.shape}: give images of the same size")
    pictures = {sampling.IMAGE: images, sampling.MASK: masks}
    pictures = {name: array for name, array in pictures.items() if array is not None}
    batches = draw_batches(model, prompts, seeds, negative_prompt, guidance, pictures)
    return np.concatenate([sheets.to_uint8(batch) for batch in batches])


def draw_batches(
    model: Model,
    prompts: Sequence[str],
    seeds: Sequence[int],
    negative_prompt: str | None = None,
    guidance: float | None = None,
    pictures: Mapping[str, np.ndarray] | None = None,
    batch_size: int | None = None,
) -> Iterator[Images]:
    """Draw like `draw`, but yield `batch_size` images at a time, in about [-1, 1].

    `pictures` holds pictures and masks, keyed by sampling.IMAGE and MASK. If guidance changes
    nothing, the negative prompt is not even encoded.
    """
    s: settings.Sampler = model.settings.sampler
    negative_prompt = s.negative_prompt if negative_prompt is None else negative_prompt
    guidance = s.guidance if guidance is None else guidance
    batch = {**sampling.prompts(model.encoder, prompts, negative_prompt), **(pictures or {})}
    by_image = guidance_module.by_image(s.guiding, guidance, len(seeds))
    size = min(batch_size or default_batch_size(model), len(seeds))
    yield from program.in_batches(model.draw, model.params, batch, seeds, by_image, size)


def card(model: Model) -> dict[str, Any]:
    """Return the facts about model and sampler that the command writes beside each picture."""
    p = model.settings
    card: dict[str, Any] = {"model": model.workdir, "checkpoint": model.step, "ema": model.ema}
    height, width = p.output_shape
    card |= {"height": height, "width": width, "predicts": p.diffusion.predicts}
    card |= {"sampler": p.sampler.name, "steps": p.sampler.steps, "eta": p.sampler.eta}
    card |= describe_grid(p.sampler) | describe_guidance(model)
    card |= {"guidance": p.sampler.guidance, "negative_prompt": p.sampler.negative_prompt}
    return card | ({"strength": p.strength, "steps_taken": p.steps_taken} if p.strength < 1 else {})


def describe_guidance(model: Model) -> dict[str, Any]:
    """Return a card's fields on LoRA, the guiding model, and guidance other than the default."""
    s: settings.Sampler = model.settings.sampler
    differs = {"guiding": s.guiding != "cfg", "guidance_low": s.guidance_low > 0}
    differs |= {"guidance_high": s.guidance_high < float("inf")}
    fields = {name: getattr(s, name) for name, shown in differs.items() if shown}
    return fields | ({"guide": model.guide} if model.guide else {}) | dict(model.lora)


def describe_grid(sampler: settings.Sampler) -> dict[str, Any]:
    """Return the card fields of the grid and of churn that differ from the defaults."""
    names = ("grid", "end", "offset", "sigma_min", "sigma_max", "rho", "unit_start")
    has_grid, defaults = sampler.grid or sampler.end, sampler._field_defaults
    fields = {name: getattr(sampler, name) for name in (*names, "churn")}
    shown = lambda name: (has_grid and name in names) or fields[name] != defaults[name]
    return {name: value for name, value in fields.items() if shown(name)}


def default_batch_size(model: Model) -> int:
    """Return the default batch size; larger images use smaller batches."""
    return program.default_batch_size(*model.settings.output_shape)
