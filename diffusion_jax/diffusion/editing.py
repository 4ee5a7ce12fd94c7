"""Image-to-image and inpainting: a wrapper that makes any sampler start from an input image."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from diffusion_jax.diffusion.onestep import SamplerFunction
from diffusion_jax.diffusion.precond import Images


def wrap(
    sampler: SamplerFunction, image: Images, eps: Images, strength: float, new: Bool[Array, "B H W 1"] | None = None
) -> SamplerFunction:
    """Return a sampler that edits `image` by running only the last steps of `sampler` (SDEdit).

    Args:
        sampler: The sampler to wrap.
        image: The images to edit, in [-1, 1], or their latents if the model works on latents.
        eps: Standard normal noise, which is added to `image` at the first noise level.
        strength: The share of the steps to run, from 0 to 1 (see `steps_taken`). Sampling starts
            from image + sigma * eps (SDEdit, Meng et al. 2022). With strength 1, the pixels to
            redraw start from pure noise instead.
        new: True at the pixels to redraw; by default, all pixels are redrawn. At the other pixels,
            the denoiser returns `image`. So the network sees a noisy version of `image` there, and
            the result equals `image` (as in Lugmayr et al. 2022, equation 8).
    """

    def draw(denoise, x, sigmas, noise):
        steps = len(sigmas) - 1
        sigmas = sigmas[steps - steps_taken(strength, steps) :]
        noisy = image + sigmas[0] * eps
        fixed = jnp.zeros((), bool) if new is None else ~new  # [B, H, W, 1]
        x = jnp.where(fixed, noisy, x) if strength == 1 else noisy
        if len(sigmas) > 1:
            with_image = lambda x, sigma: jnp.where(fixed, image, denoise(x, sigma))
            x = sampler(denoise if new is None else with_image, x, sigmas, noise)
        # Callers divide the result by this factor (samplers.to_variance_preserving).
        return jnp.where(fixed, image * jnp.sqrt(1 + sigmas[-1] ** 2), x)

    return draw


def steps_taken(strength: float, steps: int) -> int:
    """Return the number of steps to run at this strength: strength * steps, rounded down.

    The product is computed in floating point, as in CompVis and diffusers. So 0.58 * 50 gives 28
    instead of 29.
    """
    return int(strength * steps)
