"""Inversion: from an image to the noise that deterministic samplers draw it from."""

import jax

from diffusion_jax.diffusion.noise import Sigmas
from diffusion_jax.diffusion.precond import Denoiser, Images
from diffusion_jax.diffusion.samplers import same_level


def ddim(denoise: Denoiser, x: Images, sigmas: Sigmas) -> Images:
    """DDIM backwards (Song et al. 2021, section 4.3): x at sigmas[-1], above 0, to x at sigmas[0].

    `euler` from what it returns comes back to x, but for the step's error: each step takes eps
    where it begins.
    """

    def step(x, inputs):
        sigma, sigma_next = inputs
        x0 = denoise(x, same_level(sigma, x))
        return x0 + sigma_next / sigma * (x - x0), None

    return jax.lax.scan(step, x, (sigmas[:0:-1], sigmas[-2::-1]))[0]
