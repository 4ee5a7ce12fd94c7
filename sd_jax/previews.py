"""Previews during sampling: small RGB images that approximate the colours of decoded latents."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from diffusion_jax.devices import programs
from diffusion_jax.diffusion.guidance import Preview
from diffusion_jax.diffusion.precond import Denoiser
from sd_jax.settings import Pipeline


def sketched(denoise: Denoiser, preview: Preview, p: Pipeline, vae_params: Any) -> Denoiser:
    """Return a denoiser that computes the same as `denoise` and sends previews to `preview`.

    Args:
        denoise: The denoiser.
        preview: A function that is called on the host after each evaluation, with the noise level
            and a small RGB version of the result, [B, h, w, 3] in about [-1, 1].
        p: The model's settings.
        vae_params: The weights of the VAE, which determine the colours.
    """
    matrix, grey = colours(p, vae_params)
    return programs.watched(denoise, preview, lambda x0: x0 @ matrix + grey)


def colours(p: Pipeline, vae_params: Any) -> tuple[Float[Array, "Z 3"], Float[Array, "3"]]:
    """Return a linear approximation of the VAE's decoder: a matrix [Z, 3] and a colour [3].

    The RGB colour of a scaled latent z is about z @ matrix + colour. The colour is that of a zero
    latent. The matrix holds the decoder's finite-difference derivatives by each of the Z latent
    channels, for latents that are constant over the image.
    """
    z = p.vae.latent_channels
    flat = p.latents.to_vae(jnp.concatenate([jnp.eye(z), -jnp.eye(z), jnp.zeros((1, z))]))
    latents = jnp.broadcast_to(flat[:, None, None], (len(flat), 4, 4, z))
    images: Any = p.vae.apply(vae_params, latents, method="decode")
    means = images.mean((1, 2))  # [2 Z + 1, 3]
    return (means[:z] - means[z:-1]) / 2, means[-1]
