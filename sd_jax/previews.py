"""Previews of latents during sampling, in approximately the colours of the decoded picture."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.diffusion.precond import Denoiser
from diffusion_jax.machine import programs
from sd_jax.settings import Pipeline


def sketched(denoise: Denoiser, preview: Preview, p: Pipeline, vae_params: Any) -> Denoiser:
    """Wrap a denoiser so that it shows a preview of each denoised latent."""
    matrix, grey = colours(p, vae_params)
    return programs.watched(denoise, preview, lambda x0: x0 @ matrix + grey)


def colours(p: Pipeline, vae_params: Any) -> tuple[Float[Array, "Z 3"], Float[Array, "3"]]:
    """Return the RGB change per unit of each latent channel, and the RGB of a zero latent.

    The former is the VAE's first-order response to latents that are constant over the image.
    """
    z = p.vae.latent_channels
    flat = jnp.concatenate([jnp.eye(z), -jnp.eye(z), jnp.zeros((1, z))]) / p.latents.scale
    latents = jnp.broadcast_to(flat[:, None, None], (len(flat), 4, 4, z))
    images: Any = p.vae.apply(vae_params, latents, method="decode")
    means = images.mean((1, 2))  # [2 Z + 1, 3]
    return (means[:z] - means[z:-1]) / 2, means[-1]
