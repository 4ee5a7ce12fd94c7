"""What Imagen supplies to the shared loss and sampler: pixels, texts and low-resolution images."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusion_jax import model
from diffusion_jax.config import picture_fields
from diffusion_jax.diffusion import editing, guidance_kinds, samplers
from diffusion_jax.model import SecondNetwork, System
from diffusion_jax.nn.magnitude import forced
from diffusion_jax.task import Task, to_range
from diffusion_jax.text import TextEncoder
from imagen_jax import super_resolution
from imagen_jax.conditioning import example_inputs
from imagen_jax.magnitude_unet import MagnitudeUNet
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
    return model.make_task(Imagen(s, encoder), s.diffusion, s.sampler, s.text.drop_prob, frozen)


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
    return model.make_sampler_inputs(Imagen(s, encoder, strength), s.diffusion, s.sampler, guiding)


class Imagen(System):
    """What Imagen supplies: pixels, texts and low-resolution images."""

    def __init__(self, s: Settings, encoder: TextEncoder, strength: float = 1.0) -> None:
        """Store the settings and the text encoder.

        `strength` is the share of the sampling steps that editing a picture takes.
        """
        self.s, self.encoder, self.strength, self.unet = s, encoder, strength, s.unet
        self.factor, self.scalings = s.super_resolution.factor, s.diffusion.objective.scalings
        self.fields = picture_fields.read(s.data.fields)
        self.field_values = picture_fields.values(self.fields, s.sampler.fields)
        self.field_drop_prob = s.data.fields_drop_prob if self.fields else 0.0
        prompt = s.sampler.negative_prompt
        self.negative_tokens = encoder.tokenize([prompt]) if prompt else None

    def example(self):
        return example_inputs(self.unet, self.s.text.width)

    def target(self, frozen, batch, keys):
        return to_range(batch["image"])

    def text(self, frozen, batch):
        embeddings, mask = self.encoder.encode(frozen["text"], batch)  # [B, L, D], [B, L]
        return {"text": embeddings, "text_mask": mask}

    def dropped(self, frozen, condition):
        """Replace the text by zeros, and keep its mask, as in NeMo."""
        del frozen
        return {**condition, "text": jnp.zeros_like(condition["text"])}

    def conditions(self, frozen, batch):
        """Compute the text once. Without a negative prompt, guidance leads away from zeros."""
        given = self.text(frozen, batch)

        def negative():
            if self.negative_tokens is None:
                return self.dropped(frozen, given)
            tokens = {name: jnp.asarray(row) for name, row in self.negative_tokens.items()}
            repeated = lambda x: x.repeat(len(given["text"]), 0)
            return {name: repeated(x) for name, x in self.text(frozen, tokens).items()}

        return {
            guidance_kinds.COND: lambda: given,
            guidance_kinds.NEGATIVE: negative,
            guidance_kinds.EMPTY: lambda: self.dropped(frozen, given),
        }

    def sample_shape(self, batch):
        """Return the shape of the low-resolution images times the factor, or the sampler's."""
        if self.factor > 1:
            height, width = batch["low_res"].shape[1:3]
            return self.factor * height, self.factor * width, 3
        sampler, side = self.s.sampler, self.unet.image_size
        return sampler.height or side, sampler.width or side, 3

    def training_inputs(self, frozen, batch, x0, keys):
        """Return small images, perhaps with noise of random levels, and the keys of dropout."""
        added = {"dropout_keys": keys} if getattr(self.unet, "dropout", 0) else {}
        if self.factor == 1:
            return added
        small = super_resolution.shrink(x0, self.factor)
        if not self.unet.noise_aug:
            return {"low_res": small, **added}
        noise = self.s.diffusion.objective.noise
        return {**super_resolution.at_random_levels(small, noise, keys, self.scalings), **added}

    def sampling_inputs(self, frozen, batch, keys, x0):
        """Return small images with noise of the level super_resolution.aug_sigma."""
        if self.factor == 1:
            return keys, {}
        small = batch["low_res"] if x0 is None else super_resolution.shrink(x0, self.factor)
        keys, low_keys = super_resolution.own_keys(keys, self.factor * small.shape[1])
        aug_sigma = self.s.super_resolution.aug_sigma if self.unet.noise_aug else None
        return keys, super_resolution.at_level(small, aug_sigma, low_keys, self.scalings)

    def editor(self, frozen, batch, keys):
        """Return a function that adapts the sampler to pictures, and to masks if there are any."""
        image, mask = to_range(batch["image"]), batch.get("mask")
        eps = samplers.initial_noise(keys, image.shape[1:], 1)
        redrawn = None if mask is None else mask[..., None]  # [B, H, W, 1]
        return lambda sampler: editing.wrap(sampler, image, eps, self.strength, redrawn)

    def wrap_denoiser(self, frozen, denoise):
        return self.s.sampler.limit(denoise)

    def constrain(self, params):
        return forced(params) if isinstance(self.unet, MagnitudeUNet) else params


def example(s: Settings, encoder: TextEncoder) -> tuple[Task, dict[str, Any]]:
    """Return a Task and a batch of one black image, to trace a training step without any data.

    The batch holds no text. The caller must add the arrays that `encoder.tokenize` returns.
    """
    side = s.unet.image_size
    return make_task(s, encoder), {"image": np.zeros((1, side, side, 3), np.uint8)}
