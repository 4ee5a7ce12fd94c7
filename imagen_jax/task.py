"""A model of Imagen, base or super-resolution, as a Task: what its config means."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, UInt8

from diffusion_jax.diffusion import guidance, precond, samplers
from diffusion_jax.diffusion.precond import Denoiser
from diffusion_jax.machine import sharding
from diffusion_jax.task import Task, loss_by_noise_level
from diffusion_jax.text import TextEncoder
from imagen_jax import settings, super_resolution
from imagen_jax.conditioning import example_inputs
from imagen_jax.settings import Diffusion, Sampler, Settings
from imagen_jax.super_resolution import LowRes

RULES: sharding.Rules = [
    (r"conv1/kernel$", sharding.OUTPUTS),  # Of residual blocks, between which lies a group norm.
    (r"conv2/kernel$", sharding.INPUTS),
    (r"(kernel|null_token|embedding)$", sharding.FSDP),
    (r"(bias|scale|frequencies)$", sharding.P()),
]


def make_task(s: Settings, encoder: TextEncoder) -> Task:
    """Init, loss and sampler of a model, with `encoder`'s weights as its frozen ones.

    A super-resolution model makes its small images from the large ones in training. Its sampler
    takes them as batch["low_res"], float [B, h, w, 3] in about [-1, 1], of any size.
    """
    unet, scalings = s.unet, settings.PRECONDS[s.diffusion.precond](s.diffusion)
    draw_sigma = settings.NOISES[s.diffusion.noise](s.diffusion)
    distance = settings.DISTANCES[s.diffusion.distance]
    factor, aug_sigma = s.super_resolution
    aug_sigma = aug_sigma if unet.noise_aug else None

    def init(key):
        return unet.init(key, **example_inputs(unet, s.text.width))

    def loss(params, frozen, batch, key):
        key_sigma, key_eps, key_drop, key_dropout, key_low = jax.random.split(key, 5)
        x0 = to_unit_range(batch["image"])
        text, mask = encoder.encode(frozen, batch)
        text = drop_text(key_drop, text, s.text.drop_prob)
        sigma = draw_sigma(key_sigma, len(x0))
        # Drawn flat: a 4-D draw of the same numbers compiles several times slower on CPUs.
        eps = jax.random.normal(key_eps, (len(x0), x0[0].size)).reshape(x0.shape)
        low_res = training_low_res(key_low, x0) if factor > 1 else LowRes()

        def network(x, time) -> Any:
            rngs = {"dropout": key_dropout}
            return unet.apply(params, x, time, text, mask, *low_res, train=True, rngs=rngs)

        per_image = precond.loss(network, scalings, x0, eps, sigma, distance)
        return per_image.mean(), loss_by_noise_level(per_image, sigma)

    def training_low_res(key, x0):
        small = super_resolution.shrink(x0, factor)
        if not unet.noise_aug:
            return LowRes(small)
        key_sigma, key_eps = jax.random.split(key)
        eps = jax.random.normal(key_eps, (len(small), small[0].size)).reshape(small.shape)
        return super_resolution.with_noise(small, draw_sigma(key_sigma, len(x0)), eps, scalings)

    def sample(params, frozen, batch, keys, scale):
        text, mask = encoder.encode(frozen, batch)
        if scale is not None:  # Rows 2i with the text, 2i + 1 with zeros and the same mask.
            text, mask = text.repeat(2, axis=0), mask.repeat(2, axis=0)
            text = text.at[1::2].set(0)
        shape, low_res = (unet.image_size, unet.image_size, 3), LowRes()
        if factor > 1:
            small = batch["low_res"]
            shape = (factor * small.shape[1], factor * small.shape[2], 3)
            keys, low_keys = super_resolution.own_keys(keys, shape[0])
            low_res = super_resolution.sampling_inputs(small, aug_sigma, low_keys, scalings)
            low_res = jax.tree.map(lambda row: row.repeat(len(text) // len(row), axis=0), low_res)

        def network(x, time) -> Any:
            return unet.apply(params, x, time, text, mask, *low_res)

        denoise = _guided(precond.denoiser(network, scalings), scale, s.sampler)
        sigmas = sampling_sigmas(s.diffusion, s.sampler)
        x = samplers.initial_noise(keys, shape, sigmas[0])
        draws = samplers.gaussian_noise(keys, shape)
        return settings.SAMPLERS[s.sampler.name](s.sampler)(denoise, x, sigmas, draws)

    return Task(init, loss, sample, encoder.frozen, RULES)


def to_unit_range(images: UInt8[ArrayLike, "B H W C"]) -> Float[Array, "B H W C"]:
    """0 ... 255 to [-1, 1]."""
    return jnp.asarray(images, jnp.float32) / 127.5 - 1


def drop_text(key: jax.Array, text: Float[Array, "B L D"], prob: float) -> Float[Array, "B L D"]:
    """Zeroes each text with this probability. The mask stays: so NeMo trains without text."""
    keep = jax.random.bernoulli(key, 1 - prob, (len(text), 1, 1))
    return text * keep


def sampling_sigmas(diffusion: Diffusion, sampler: Sampler) -> Float[Array, "{sampler.steps}+1"]:
    """Karras' levels for EDM noise; a schedule's own, at even times, for a DDPM model."""
    if diffusion.noise == "lognormal":
        low, high = sampler.sigma_min, sampler.sigma_max
        return samplers.karras_sigmas(sampler.steps, low, high, sampler.rho)
    sigmas = samplers.log_snr_sigmas(settings.SCHEDULES[diffusion.noise], sampler.steps)
    return sigmas if sampler.name == "ddpm" else samplers.ending_at_zero(sigmas)


def _guided(denoise: Denoiser, scale: Any, sampler: Sampler) -> Denoiser:
    if scale is not None:
        within = guidance.interval(scale, sampler.guidance_low, sampler.guidance_high)
        denoise = guidance.classifier_free(denoise, within)
    return settings.THRESHOLDS[sampler.threshold](denoise)
