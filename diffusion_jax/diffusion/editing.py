"""Image-to-image and inpainting: a wrapper that makes any sampler start from an input image."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from diffusion_jax.diffusion.onestep import Sampler
from diffusion_jax.diffusion.precond import Images


def wrap(
    sampler: Sampler,
    image: Images,
    eps: Images,
    strength: float,
    new: Bool[Array, "B H W 1"] | None = None,
) -> Sampler:
    """Return a sampler that edits `image` by running only the last steps of `sampler` (SDEdit).

    Args:
        sampler: The sampler to wrap.
        image: The images to edit, in the range of x0, or their latents.
        eps: Standard normal noise.
        strength: The share of the steps to run, from 0 to 1 (see `steps_taken`). Sampling starts
            from image + sigma * eps (SDEdit, Meng et al. 2022). At 1 it starts from pure noise.
        new: True at the pixels to draw. At all other pixels D returns the image. There, the network
            sees the noisy image, and the result equals the image (as in Lugmayr et al. 2022,
            equation 8). None draws all pixels.
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
        # Callers divide by this factor, in samplers.in_own_coordinates.
        return jnp.where(fixed, image * jnp.sqrt(1 + sigmas[-1] ** 2), x)

    return draw


def steps_taken(strength: float, steps: int) -> int:
    """Return how many of the steps run at this strength: strength * steps, rounded down.

    The product is computed in floating point, as in CompVis and diffusers, so 0.58 * 50 gives 28.
    """
    return int(strength * steps)
