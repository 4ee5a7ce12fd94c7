"""Image-to-image and inpainting with Stable Diffusion: samplers and UNets that see pictures."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Key, UInt8

from diffusion_jax.diffusion import editing, samplers
from diffusion_jax.diffusion.onestep import SamplerFunction
from diffusion_jax.task import to_range
from sd_jax import vae
from sd_jax.settings import Pipeline
from sd_jax.unet import INPAINTING

IMAGE, MASK = "image", "mask"


def editor(
    p: Pipeline, vae_params: Any, batch: Mapping[str, Any], keys: Key[Array, "B"]
) -> Callable[[SamplerFunction], SamplerFunction]:
    """Return a function that maps a sampler to one that edits the latents of a batch's pictures.

    Args:
        p: The model's settings; p.strength is the share of the sampling steps to take.
        vae_params: The weights of the VAE, which encodes the pictures.
        batch: A dict with the pictures at "image", uint8 [B, H, W, 3]. It may also hold masks at
            "mask", bool [B, H, W], True at the pixels to redraw. A latent is redrawn if the mask is
            True at any pixel that it covers, or if the UNet itself sees the mask.
        keys: One random key per picture, for the noise that is added to its latents.
    """
    factor, pixels = vae.factor(p.vae), to_range(batch[IMAGE], p.latents.pixels)
    moments: Any = p.vae.apply(vae_params, pixels, method="encode")
    z = p.latents.to_unet(vae.mean_and_std(moments)[0])  # [B, h, w, Z]
    eps, new = samplers.initial_noise(keys, z.shape[1:], 1), None
    if MASK in batch and p.sees != INPAINTING:
        b, h, w, _ = z.shape
        new = batch[MASK].reshape(b, h, factor, w, factor).any((2, 4))[..., None]
    return lambda sampler: editing.wrap(sampler, z, eps, p.strength, new)


def seen(
    p: Pipeline, vae_params: Any, pictures: UInt8[ArrayLike, "B H W 3"], mask: Bool[Array, "B H W"]
) -> Float[Array, "B h w _"]:
    """Return the argument `picture` of a UNet: the channels that it reads beside the noisy latents.

    An inpainting UNet (p.sees) reads the mask and the latents of the picture, which is gray where
    the mask is True. As in LDM, the mask of a latent is that of its first pixel. InstructPix2Pix
    reads the latents of the whole picture, which are not standardized (Latents.to_unet).
    """
    factor, pixels = vae.factor(p.vae), to_range(pictures, p.latents.pixels)
    if p.sees == INPAINTING:
        gray = 0.5 if p.latents.pixels == "unit" else 0.0
        pixels = jnp.where(mask[..., None], gray, pixels)
    moments: Any = p.vae.apply(vae_params, pixels, method="encode")
    z = vae.mean_and_std(moments)[0]  # [B, h, w, Z]
    if p.sees != INPAINTING:
        return z
    small = mask[:, ::factor, ::factor, None].astype(z.dtype)
    return jnp.concatenate([small, p.latents.to_unet(z)], axis=-1)  # [B, h, w, 1 + Z]
