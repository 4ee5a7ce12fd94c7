"""Draws with a Stable Diffusion model, trained here or elsewhere: in a notebook, or for a command.

    from sd_jax import drawing

    model = drawing.load("runs/sd_quickstart")
    images = drawing.draw(model, ["a red seven on gray paper"], seeds=[0])

`load` also opens diffusers directories and single files of CompVis, Stability, MLPerf and NeMo.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8

from diffusion_jax.diffusion.guidance import scales as scales_of
from diffusion_jax.draw import program
from diffusion_jax.draw.model import Model
from diffusion_jax.draw.program import Images
from diffusion_jax.machine import files, sheets
from sd_jax import sampling, settings
from sd_jax.weights import published, trained
from sd_jax.weights.published import File
from sd_jax.weights.trained import Choice


def load(
    path: str | os.PathLike[str], choice: Choice | None = None, file: File | None = None
) -> Model:
    """The model of a training run's workdir, a diffusers directory or a single file.

    `file` is for the last two. FileNotFoundError, or ValueError that says what is missing or wrong.
    """
    choice = choice or Choice()
    path = files.path(path)
    if path.is_file() or (path / "model_index.json").is_file() or (path / "unet").is_dir():
        return published.load_model(files.local(path), choice, file or File())
    if not path.is_dir():
        raise FileNotFoundError(f"there is no {path}: name a run, a diffusers directory or a file")
    return trained.load_model(path, choice)


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
    """One image for each prompt and seed (as many of both); None stands for the model's settings.

    Image n depends on its prompt, its seed and what it is drawn over, images[n] where masks[n] is
    True, alone. ValueError if the numbers or sizes do not fit.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts and {len(seeds)} seeds: give one seed a prompt")
    if images is not None:
        if len(images) != len(seeds):
            raise ValueError(f"{len(images)} images and {len(seeds)} seeds: give one for each")
        settings.check_size(model.settings, "the images' height", images.shape[1])
        settings.check_size(model.settings, "the images' width", images.shape[2])
    if masks is not None and (images is None or masks.shape != images.shape[:3]):
        raise ValueError(f"masks of {masks.shape}: give images of the same sizes")
    given = {sampling.IMAGE: images, sampling.MASK: masks}
    given = {name: array for name, array in given.items() if array is not None}
    batches = draw_batches(model, prompts, seeds, negative_prompt, guidance, given)
    return np.concatenate([sheets.to_uint8(some) for some in batches])


def draw_batches(
    model: Model,
    prompts: Sequence[str],
    seeds: Sequence[int],
    negative_prompt: str | None = None,
    guidance: float | None = None,
    given: Mapping[str, np.ndarray] | None = None,
    batch_size: int | None = None,
) -> Iterator[Images]:
    """Draws like `draw`, and yields `batch_size` images at a time, about in [-1, 1].

    `given` are pictures and masks under their names in sampling. At guidance 1 the negative prompt
    is not even encoded.
    """
    sampler = model.settings.sampler
    negative = sampler.negative_prompt if negative_prompt is None else negative_prompt
    scale = sampler.guidance if guidance is None else guidance
    scales = scales_of(sampler, scale, len(seeds))
    batch = {**sampling.prompts(model.encoder, prompts, negative), **(given or {})}
    size = min(batch_size or default_batch_size(model), len(seeds))
    yield from program.in_batches(model.draw, model.params, batch, seeds, scales, size)


def card(model: Model) -> dict[str, Any]:
    """The model and its sampler, as the command writes them beside each picture."""
    p = model.settings
    card: dict[str, Any] = {"model": model.workdir, "checkpoint": model.step, "ema": model.ema}
    height, width = p.output_shape
    card |= {"height": height, "width": width, "predicts": p.diffusion.predicts}
    card |= {"sampler": p.sampler.name, "steps": p.sampler.steps, "eta": p.sampler.eta}
    card |= describe_grid(p.sampler) | describe_guidance(model)
    card |= {"guidance": p.sampler.guidance, "negative_prompt": p.sampler.negative_prompt}
    return card | ({"strength": p.strength, "steps_taken": p.steps_taken} if p.strength < 1 else {})


def describe_guidance(model: Model) -> dict[str, Any]:
    """The fields for cards of guidance, where it is not classifier-free and everywhere; of LoRA."""
    s: settings.Sampler = model.settings.sampler
    given = {"guiding": s.guiding != "cfg", "guidance_low": s.guidance_low > 0}
    given |= {"guidance_high": s.guidance_high < float("inf")}
    fields = {name: getattr(s, name) for name, differs in given.items() if differs}
    return fields | ({"guide": model.guide} if model.guide else {}) | dict(model.lora)


def describe_grid(sampler: settings.Sampler) -> dict[str, Any]:
    """The fields of a sampler's grid for cards, where it is not the sampler's own; its churn."""
    names = ("grid", "end", "offset", "sigma_min", "sigma_max", "rho", "unit_start")
    given, usual = sampler.grid or sampler.end, sampler._field_defaults
    fields = {name: getattr(sampler, name) for name in (*names, "churn")}
    shown = lambda name: (given and name in names) or fields[name] != usual[name]
    return {name: value for name, value in fields.items() if shown(name)}


def default_batch_size(model: Model) -> int:
    """How many images are drawn at once by default: fewer where they are larger."""
    return program.default_batch_size(*model.settings.output_shape)
