"""Draw images with a Stable Diffusion model, trained with this library or elsewhere.

    from sd_jax import drawing

    model = drawing.load("runs/sd_quickstart", *drawing.choose(steps=20))
    images = drawing.draw(model, ["a red seven on gray paper"], seeds=[0])

`load` opens training runs, diffusers directories, and single checkpoint files of CompVis,
Stability, MLPerf and NeMo.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8

from diffusion_jax import files
from diffusion_jax.diffusion import guidance as guidance_module
from diffusion_jax.draw import options, program
from diffusion_jax.draw.model import Model
from diffusion_jax.draw.options import NEWEST, Choice, Option, Options, Weights
from diffusion_jax.draw.program import Images
from diffusion_jax.files import sheets
from diffusion_jax.weights import pretrained
from sd_jax import sampling, settings
from sd_jax.weights import published, trained
from sd_jax.weights.published import NO_FACTS, File

OPTIONS: Options = {
    **options.SHARED,
    "vae_weights": Option(
        "A VAE to use instead of the model's own: a file, a diffusers directory or a workdir.",
        str, field="vae.weights", at_load=True,
    ),
    **options.of_group("sampler", settings.Sampler),
}  # fmt: skip
"""The options for drawing, keyed by name; flags and keyword arguments have the same names."""


def choose(**values: Any) -> Choice:
    """Convert option values, such as steps=20, to a Choice.

    The fields of a Choice are the arguments `overrides`, `weights` and `guide` of `load`.

    Args:
        **values: The option values; their names are keys of OPTIONS.

    Raises:
        ValueError: A name is unknown, or a value has the wrong type or is out of range.
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
    """Open the model of a training run, a diffusers directory or a single checkpoint file.

    Args:
        path: The run's workdir, the directory or the file.
        overrides: Values that replace those of the model's config, keyed by field, such as
            "sampler.steps"; `choose` makes them.
        weights: For a run, the checkpoint and the average (EMA) to load. Other models use only
            `weights.ema`, which chooses averaged or raw weights.
        guide: The run whose model guides this one, as WORKDIR or WORKDIR@STEP; "" for none.
        file: Settings that a directory or a file may lack, such as what the UNet predicts.
        strength: For image-to-image, the share of the sampling steps to take, in (0, 1].

    Raises:
        FileNotFoundError: The path, or a file that the model or an argument names, does not exist.
        ValueError: A part of the model or the chosen average is missing, an override is invalid, or
            the run `guide` cannot guide this model.
    """
    path = pretrained.snapshot(files.path(path))
    if path.is_file() or (path / "model_index.json").is_file() or (path / "unet").is_dir():
        if guide:
            raise ValueError(
                f"--guide={guide} works only for runs (--workdir), but {path} is a model trained "
                "elsewhere: leave --guide out"
            )
        return published.load_model(files.local(path), overrides, weights.ema, file, strength)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} does not exist: name the workdir of a run, a diffusers directory or a file"
        )
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
    """Draw one image for each prompt. Image n uses prompt n and seed n.

    Args:
        model: The model.
        prompts: One prompt per image.
        seeds: One seed per image.
        negative_prompt: The text that guidance leads away from; None for the model's setting.
        guidance: The guidance scale; None for the model's setting.
        images: Pictures to draw over (image-to-image), one per image; None draws from noise alone.
        masks: For inpainting, True at the pixels to redraw; None redraws all pixels.

    Returns:
        The images. Image n depends only on its own prompt, seed, picture and mask.

    Raises:
        ValueError: The numbers of prompts, seeds and images differ, the masks do not have the shape
            of the images, or the model cannot draw images of this size.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds: give one seed per prompt")
    if images is not None:
        if len(images) != len(seeds):
            raise ValueError(
                f"{len(images)} images and {len(seeds)} seeds: give one image per seed"
            )
        settings.check_size(model.settings, "the images' height", images.shape[1])
        settings.check_size(model.settings, "the images' width", images.shape[2])
    if masks is not None and (images is None or masks.shape != images.shape[:3]):
        raise ValueError(
            f"masks have the shape {masks.shape}: give one mask per image, as large as the image"
        )
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
    """Draw images in batches; yield each batch as floats [n, H, W, 3] in about [-1, 1].

    If the guidance scale has no effect (with most kinds of guidance, this is the scale 1), the
    negative prompt is not encoded.

    Args:
        model: The model.
        prompts: One prompt per image.
        seeds: One seed per image.
        negative_prompt: The text that guidance leads away from; None for the model's setting.
        guidance: The guidance scale; None for the model's setting.
        pictures: The pictures to draw over, at the key sampling.IMAGE, and for inpainting masks, at
            the key sampling.MASK; None draws from noise alone.
        batch_size: The number of images per batch; None for a default that depends on the image
            size.
    """
    s: settings.Sampler = model.settings.sampler
    negative_prompt = s.negative_prompt if negative_prompt is None else negative_prompt
    guidance = s.guidance if guidance is None else guidance
    batch = {**sampling.prompts(model.encoder, prompts, negative_prompt), **(pictures or {})}
    by_image = guidance_module.by_image(s, guidance, len(seeds))
    size = min(batch_size or default_batch_size(model), len(seeds))
    height, width = model.settings.output_shape
    channels = model.settings.vae.width * model.settings.vae.channel_mult[0]
    program.check_fits(height, width, channels, size)
    yield from program.in_batches(model.draw, model.params, batch, seeds, by_image, size)


def card(model: Model) -> dict[str, Any]:
    """Return the metadata to save with each image: the model, its weights and its settings."""
    p = model.settings
    card: dict[str, Any] = {"model": model.workdir, "checkpoint": model.step, "ema": model.ema}
    height, width = p.output_shape
    card |= {"height": height, "width": width, "predicts": p.diffusion.predicts}
    card |= {"sampler": p.sampler.name, "steps": p.sampler.steps, "eta": p.sampler.eta}
    card |= describe_grid(p.sampler) | describe_guidance(model)
    card |= {"guidance": p.sampler.guidance, "negative_prompt": p.sampler.negative_prompt}
    return card | ({"strength": p.strength, "steps_taken": p.steps_taken} if p.strength < 1 else {})


def describe_guidance(model: Model) -> dict[str, Any]:
    """Return metadata of a model: its LoRA, its guiding model, its guidance and its fields.

    Values that equal the defaults are left out.
    """
    s: settings.Sampler = model.settings.sampler
    is_changed = {"guiding": s.guiding != "cfg", "guidance_low": s.guidance_low > 0}
    is_changed |= {"fields": s.fields != ""}
    is_changed |= {"guidance_high": s.guidance_high < float("inf")}
    fields = {name: getattr(s, name) for name, changed in is_changed.items() if changed}
    return fields | ({"guide": model.guide} if model.guide else {}) | dict(model.lora)


def describe_grid(sampler: settings.Sampler) -> dict[str, Any]:
    """Return metadata of a sampler: the settings that determine its noise levels, and its churn.

    Settings with default values are left out, with one exception: if `sampler.grid` or
    `sampler.end` is set, all settings of the noise levels are included.
    """
    names = ("grid", "end", "offset", "sigma_min", "sigma_max", "rho", "unit_start")
    has_grid, defaults = sampler.grid or sampler.end, sampler._field_defaults
    fields = {name: getattr(sampler, name) for name in (*names, "churn")}
    shown = lambda name: (has_grid and name in names) or fields[name] != defaults[name]
    return {name: value for name, value in fields.items() if shown(name)}


def default_batch_size(model: Model) -> int:
    """Return the default batch size for drawing. Larger images use smaller batches."""
    return program.default_batch_size(*model.settings.output_shape)
