"""What Imagen supplies to the shared loss and sampler: pixels, texts and low-resolution images."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusion_jax import model
from diffusion_jax.config import picture_fields
from diffusion_jax.diffusion import editing, guidance_kinds, samplers
from diffusion_jax.model import SecondNetwork, System
from diffusion_jax.task import Task, to_range
from diffusion_jax.text import TextEncoder
from imagen_jax import super_resolution
from imagen_jax.conditioning import example_inputs
from imagen_jax.settings import Settings


def make_task(s: Settings, encoder: TextEncoder) -> Task:
    """Return the Task of an Imagen model: the functions that initialise, train and sample it.

    In training, a super-resolution model shrinks the images of the batch to get its small images.
    In sampling, it reads small images of any size from batch["low_res"], float [B, h, w, 3] in
    about [-1, 1].

    If a batch for sampling has "image", uint8 [B, H, W, 3], the sampler draws over these pictures.
    If it also has "mask", bool [B, H, W], the sampler changes only the pixels where the mask is
    True (see diffusion_jax/diffusion/editing.py).

    Args:
        s: The model's settings.
        encoder: The text encoder. Its weights are the frozen weights of the Task.

    Raises:
        ValueError: The sampling grid is spaced in time, but the noise defines no times.
    """
    frozen = {"text": encoder.frozen}
    return model.make_task(system(s, encoder), s.diffusion, s.sampler, s.text.drop_prob, frozen)


def make_sampler_inputs(
    s: Settings, encoder: TextEncoder, guide: Settings | None = None, strength: float = 1.0
) -> samplers.InputsFunction:
    """Return the function `sampler_inputs` of a Task, to draw with a guide or over pictures.

    Args:
        s: The model's settings.
        encoder: The text encoder.
        guide: The settings of a second model that guides this one, whose weights are
            frozen["guide"]; None for no such model.
        strength: When the model draws over a picture, the share of the sampling steps that it runs.
    """
    guiding = guide and SecondNetwork(guide.unet, guide.diffusion)
    return model.make_sampler_inputs(system(s, encoder, strength), s.diffusion, s.sampler, guiding)


def system(s: Settings, encoder: TextEncoder, strength: float = 1.0) -> System:
    """Return what Imagen supplies. The arguments are those of `make_sampler_inputs`."""
    unet, factor, side = s.unet, s.super_resolution.factor, s.unet.image_size
    objective = s.diffusion.objective
    threshold = s.sampler.limit
    prompt = s.sampler.negative_prompt
    negative_tokens = encoder.tokenize([prompt]) if prompt else {}
    named = picture_fields.read(s.data.fields)

    def text(frozen, batch):
        embeddings, mask = encoder.encode(frozen["text"], batch)  # [B, L, D], [B, L]
        return {"text": embeddings, "text_mask": mask}

    def empty(condition):
        """Replace the text by zeros, and keep its mask, as in NeMo."""
        return {**condition, "text": jnp.zeros_like(condition["text"])}

    def conditions(frozen, batch):
        given = text(frozen, batch)

        def negative():
            if not prompt:
                return empty(given)
            tokens = {name: jnp.asarray(row) for name, row in negative_tokens.items()}
            repeated = lambda x: x.repeat(len(given["text"]), 0)
            return {name: repeated(x) for name, x in text(frozen, tokens).items()}

        return {
            guidance_kinds.COND: lambda: given,
            guidance_kinds.NEGATIVE: negative,
            guidance_kinds.EMPTY: lambda: empty(given),
        }

    def sample_shape(batch):
        if factor > 1:
            height, width = batch["low_res"].shape[1:3]
            return factor * height, factor * width, 3
        return s.sampler.height or side, s.sampler.width or side, 3

    def training_inputs(frozen, batch, x0, keys):
        added = {"dropout_keys": keys} if getattr(unet, "dropout", 0) else {}
        if factor == 1:
            return added
        small = super_resolution.shrink(x0, factor)
        if not unet.noise_aug:
            return {"low_res": small, **added}
        noisy = super_resolution.at_random_levels(small, objective.noise, keys, objective.scalings)
        return {**noisy, **added}

    def sampling_inputs(frozen, batch, keys, x0):
        if factor == 1:
            return keys, {}
        small = batch["low_res"] if x0 is None else super_resolution.shrink(x0, factor)
        keys, low_keys = super_resolution.own_keys(keys, factor * small.shape[1])
        aug_sigma = s.super_resolution.aug_sigma if unet.noise_aug else None
        return keys, super_resolution.at_level(small, aug_sigma, low_keys, objective.scalings)

    def editor(frozen, batch, keys):
        image, mask = to_range(batch["image"]), batch.get("mask")
        eps = samplers.initial_noise(keys, image.shape[1:], 1)
        redrawn = None if mask is None else mask[..., None]  # [B, H, W, 1]
        return lambda sampler: editing.wrap(sampler, image, eps, strength, redrawn)

    return System(
        unet=unet,
        example=lambda: example_inputs(unet, s.text.width),
        target=lambda frozen, batch, keys: to_range(batch["image"]),
        text=text,
        dropped=lambda frozen, condition: empty(condition),
        conditions=conditions,
        sample_shape=sample_shape,
        decode=lambda frozen, batch, x: x,
        editor=editor,
        training_inputs=training_inputs,
        sampling_inputs=sampling_inputs,
        wrap_denoiser=lambda frozen, denoise: threshold(denoise),
        fields=named,
        field_values=picture_fields.values(named, s.sampler.fields),
        field_drop_prob=s.data.fields_drop_prob if named else 0.0,
    )


def example(s: Settings, encoder: TextEncoder) -> tuple[Task, dict[str, Any]]:
    """Return a Task and a batch of one black image, to trace a training step without any data.

    The batch holds no text. The caller must add the arrays that `encoder.tokenize` returns.
    """
    side = s.unet.image_size
    return make_task(s, encoder), {"image": np.zeros((1, side, side, 3), np.uint8)}
