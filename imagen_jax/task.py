"""A model of Imagen, base or super-resolution, as a Task: what its config means."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusion_jax.diffusion import guidance, precond, samplers
from diffusion_jax.diffusion.noise import NOISES
from diffusion_jax.machine.sharding import RULES
from diffusion_jax.task import (
    Sample,
    Task,
    kept_texts,
    loss_by_noise_level,
    normal_like,
    to_range,
)
from diffusion_jax.text import TextEncoder
from imagen_jax import super_resolution
from imagen_jax.conditioning import example_inputs
from imagen_jax.settings import Settings
from imagen_jax.super_resolution import LowRes


def make_task(s: Settings, encoder: TextEncoder) -> Task:
    """Init, loss and sampler of a model, with `encoder`'s weights as its frozen ones.

    A super-resolution model makes its small images from the large ones in training. Its sampler
    takes them as batch["low_res"], float [B, h, w, 3] in about [-1, 1], of any size.
    """
    unet, noise = s.unet, NOISES[s.diffusion.noise](s.diffusion)
    scalings = precond.PRECONDS[s.diffusion.precond](s.diffusion, noise.time)
    samplers.check_grid(noise, s.sampler)
    distance, factor = precond.DISTANCES[s.diffusion.distance], s.super_resolution.factor

    def init(key):
        return unet.init(key, **example_inputs(unet, s.text.width))

    def loss(params, frozen, batch, key):
        key_sigma, key_eps, key_drop, key_dropout, key_low = jax.random.split(key, 5)
        x0 = to_range(batch["image"])  # [B, H, W, 3]
        text, mask = encoder.encode(frozen, batch)  # [B, L, D], [B, L]
        # Zeros in place of a dropped text, under its own mask: so NeMo trains without text.
        text = text * kept_texts(key_drop, len(x0), s.text.drop_prob)[:, None, None]
        sigma, eps = noise.draw(key_sigma, len(x0)), normal_like(key_eps, x0)
        low_res = training_low_res(key_low, x0) if factor > 1 else LowRes()

        def network(x, time) -> Any:
            rngs = {"dropout": key_dropout}
            return unet.apply(params, x, time, text, mask, *low_res, train=True, rngs=rngs)

        per_image = precond.loss(network, scalings, x0, eps, sigma, distance)  # [B]
        return per_image.mean(), loss_by_noise_level(per_image, sigma)

    def training_low_res(key, x0):
        small = super_resolution.shrink(x0, factor)
        if not unet.noise_aug:
            return LowRes(small)
        key_sigma, key_eps = jax.random.split(key)
        sigma, eps = noise.draw(key_sigma, len(x0)), normal_like(key_eps, small)
        return super_resolution.with_noise(small, sigma, eps, scalings)

    return Task(init, loss, _make_sample(s, encoder), encoder.frozen, RULES)


def example(s: Settings, encoder: TextEncoder) -> tuple[Task, dict[str, np.ndarray]]:
    """The task, and an image to train on, in a batch of one."""
    side = s.unet.image_size
    return make_task(s, encoder), {"image": np.zeros((1, side, side, 3), np.uint8)}


def _make_sample(s: Settings, encoder: TextEncoder) -> Sample:
    unet, noise = s.unet, NOISES[s.diffusion.noise](s.diffusion)
    scalings = precond.PRECONDS[s.diffusion.precond](s.diffusion, noise.time)
    factor, aug_sigma = s.super_resolution
    aug_sigma = aug_sigma if unet.noise_aug else None

    def sample(params, frozen, batch, keys, scale):
        text, mask = encoder.encode(frozen, batch)
        if scale is not None:  # Without text is with zeros and the same mask.
            text = guidance.with_and_without(text, jnp.zeros_like(text))  # [2 B, L, D]
            mask = guidance.with_and_without(mask, mask)
        shape, low_res = (unet.image_size, unet.image_size, 3), LowRes()
        if factor > 1:
            small = batch["low_res"]  # [B, h, w, 3]
            shape = (factor * small.shape[1], factor * small.shape[2], 3)
            keys, low_keys = super_resolution.own_keys(keys, shape[0])
            low_res = super_resolution.sampling_inputs(small, aug_sigma, low_keys, scalings)
            low_res = jax.tree.map(lambda row: row.repeat(len(text) // len(row), axis=0), low_res)

        def network(x, time) -> Any:
            return unet.apply(params, x, time, text, mask, *low_res)

        sigmas, time = samplers.sampling_grid(noise, s.sampler)  # [steps + 1]
        on_grid = precond.PRECONDS[s.diffusion.precond](s.diffusion, time)
        denoise = guidance.guided(
            precond.denoiser(network, on_grid), scale, low=s.sampler.guidance_low,
            high=s.sampler.guidance_high, threshold=s.sampler.threshold,
        )  # fmt: skip
        sampler = samplers.make(s.sampler)
        x = samplers.initial_noise(keys, shape, sigmas[0])
        x = sampler(denoise, x, sigmas, samplers.gaussian_noise(keys, shape))
        return samplers.in_own_coordinates(x, sigmas[-1])

    return sample
