"""Image-to-image and inpainting: a wrapper that makes any sampler start from a given picture."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from diffusion_jax.diffusion.onestep import Sampler
from diffusion_jax.diffusion.precond import Images


def over(
    sampler: Sampler,
    image: Images,
    eps: Images,
    strength: float,
    new: Bool[Array, "B H W 1"] | None = None,
) -> Sampler:
    """Return a sampler that draws over `image` with the last `strength` of its steps.

    Args:
        sampler: The sampler.
        image: Images in the coordinates of x0.
        eps: Standard normal noise.
        strength: From 0 to 1. SDEdit (Meng et al. 2022) starts from image + sigma * eps; at 1 the
            sampler starts from its own noise.
        new: True at the pixels to draw. At the others D is the image itself, so the network sees
            the image under the noise of each level, and the result holds it (as in Lugmayr et al.
            2022, equation 8). None draws all pixels.
    """

    def draw(denoise, x, sigmas, noise):
        steps = len(sigmas) - 1
        sigmas = sigmas[steps - round(strength * steps) :]
        noisy = image + sigmas[0] * eps
        fixed = jnp.zeros((), bool) if new is None else ~new  # [B, H, W, 1]
        x = jnp.where(fixed, noisy, x) if strength == 1 else noisy
        if len(sigmas) > 1:
            with_image = lambda x, sigma: jnp.where(fixed, image, denoise(x, sigma))
            x = sampler(denoise if new is None else with_image, x, sigmas, noise)
        # Callers divide by this factor (see samplers.in_own_coordinates).
        return jnp.where(fixed, image * jnp.sqrt(1 + sigmas[-1] ** 2), x)

    return draw
