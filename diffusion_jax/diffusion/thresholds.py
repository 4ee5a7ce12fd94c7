"""Thresholds: wrappers from denoiser to denoiser that hold x0 in the range of images."""

import jax.numpy as jnp

from diffusion_jax.diffusion.noise import Scalar
from diffusion_jax.diffusion.precond import Denoiser


def dynamic(denoise: Denoiser, *, percentile: Scalar = 99.5) -> Denoiser:
    """Clips x0 to its own percentile s >= 1, then divides by s (Imagen, section 2.3)."""

    def thresholded(x, sigma):
        x0 = denoise(x, sigma)
        s = jnp.percentile(jnp.abs(x0), percentile, axis=(1, 2, 3), keepdims=True)
        s = jnp.maximum(s, 1)
        return jnp.clip(x0, -s, s) / s

    return thresholded


def static(denoise: Denoiser) -> Denoiser:
    """Clips x0 to [-1, 1] (Imagen, section 2.3)."""
    return lambda x, sigma: jnp.clip(denoise(x, sigma), -1, 1)
