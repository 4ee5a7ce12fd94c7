"""Drawing over a given picture, of which a mask may leave parts as they are.

Both wrap a sampler, so that they work with each of them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from diffusion_jax.diffusion.precond import Images
from diffusion_jax.diffusion.samplers import Sampler


def over(
    sampler: Sampler,
    image: Images,
    eps: Images,
    strength: float,
    new: Bool[Array, "B H W 1"] | None = None,
) -> Sampler:
    """The sampler, whose last `strength` (0 to 1) of the steps take noise off `image` again.

    SDEdit (Meng et al. 2022): it starts from image + sigma * eps, and at strength 1 from its own
    noise. Where `new` is False, D is the image itself, which is what the network then sees under
    its noise at each level, and what remains in the end (as in Lugmayr et al. 2022, equation 8).
    """

    def draw(denoise, x, sigmas, noise):
        steps = len(sigmas) - 1
        sigmas = sigmas[steps - round(strength * steps) :]
        noisy = image + sigmas[0] * eps
        known = jnp.zeros((), bool) if new is None else ~new  # [B, H, W, 1]
        x = jnp.where(known, noisy, x) if strength == 1 else noisy
        if len(sigmas) > 1:
            keep = lambda x, sigma: jnp.where(known, image, denoise(x, sigma))
            x = sampler(denoise if new is None else keep, x, sigmas, noise)
        # Of x = x0 + sigma * eps at a last level above 0 samplers return x0 in other coordinates.
        return jnp.where(known, image * jnp.sqrt(1 + sigmas[-1] ** 2), x)

    return draw
