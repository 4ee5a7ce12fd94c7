"""Wrappers from denoiser to denoiser: what Imagen and Stable Diffusion add around D."""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from diffusion_jax.diffusion.noise import Scalar
from diffusion_jax.diffusion.precond import Denoiser, Sigma

Scale = Scalar | Float[Array, "B"]
Schedule = Callable[[Sigma], Float[Array, "B"]]


def guided(
    denoise: Denoiser,
    scale: Scale | None,
    *,
    low: Scalar = 0.0,
    high: Scalar = float("inf"),
    threshold: str = "none",
) -> Denoiser:
    """`denoise` with guidance from `low` to `high`, then a threshold by its name in THRESHOLDS.

    `denoise` is conditioned on rows ordered as by `with_and_without`; where `scale` is None, for no
    guidance, on one row an image.
    """
    if scale is not None:
        denoise = classifier_free(denoise, interval(scale, low, high))
    return THRESHOLDS[threshold](denoise)


def with_and_without(cond: Array, uncond: Array) -> Array:
    """[B, ...] twice to [2 B, ...]: row 2i is cond[i], row 2i + 1 is uncond[i]."""
    return jnp.stack([cond, uncond], axis=1).reshape(-1, *cond.shape[1:])


def classifier_free(denoise_both: Denoiser, scale: Scale | Schedule) -> Denoiser:
    """D_uncond + scale * (D_cond - D_uncond) (Ho & Salimans 2022, equation 6).

    `denoise_both` sees each image twice, ordered as by `with_and_without`: neighbours, so that a
    sharded batch stays where it is. `scale` is one number, one per image, or a function of sigma
    such as `interval`; at 1 the result is D_cond to the last bit.
    """

    def denoise(x, sigma):
        both = denoise_both(x.repeat(2, axis=0), sigma.repeat(2))
        pairs = both.reshape(-1, 2, *x.shape[1:])  # [B, 2, H, W, C]
        cond, uncond = pairs[:, 0], pairs[:, 1]
        excess = jnp.asarray(scale(sigma) if callable(scale) else scale, x.dtype) - 1
        return cond + excess.reshape(-1, 1, 1, 1) * (cond - uncond)

    return denoise


def interval(scale: Scale, low: Scalar, high: Scalar) -> Schedule:
    """The scale where low <= sigma <= high, and 1 elsewhere (Kynkaanniemi et al. 2024)."""
    return lambda sigma: jnp.where((low <= sigma) & (sigma <= high), scale, 1.0)


def dynamic_threshold(denoise: Denoiser, percentile: Scalar = 99.5) -> Denoiser:
    """Clips x0 to its own percentile s >= 1, then divides by s (Imagen, section 2.3)."""

    def thresholded(x, sigma):
        x0 = denoise(x, sigma)
        s = jnp.percentile(jnp.abs(x0), percentile, axis=(1, 2, 3), keepdims=True)
        s = jnp.maximum(s, 1)
        return jnp.clip(x0, -s, s) / s

    return thresholded


def static_threshold(denoise: Denoiser) -> Denoiser:
    """Clips x0 to [-1, 1] (Imagen, section 2.3)."""
    return lambda x, sigma: jnp.clip(denoise(x, sigma), -1, 1)


# By sampler.threshold of a config. Imagen's alone: latents have no range to be held in.
THRESHOLDS: Mapping[str, Callable[[Denoiser], Denoiser]] = {
    "dynamic": dynamic_threshold,
    "static": static_threshold,
    "none": lambda denoise: denoise,
}
