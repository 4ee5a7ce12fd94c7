"""The small image that a super-resolution model enlarges, with a little noise added to it.

This noise conditioning augmentation (Ho et al. 2021, "Cascaded Diffusion Models", section 4.2)
makes a model robust to the errors of the stage before it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from diffusion_jax.diffusion import samplers
from diffusion_jax.diffusion.noise import Noise
from diffusion_jax.diffusion.precond import Images, Precond, Sigma
from diffusion_jax.model import Condition


def shrink(images: Float[Array, "B H W C"], factor: int) -> Float[Array, "B h w C"]:
    """Shrink both sides by `factor` with an antialiased bicubic filter (a = -0.5, as in Pillow).

    The result is not clipped, so it can slightly exceed the range of the input.
    """
    batch, height, width, channels = images.shape
    small = (batch, height // factor, width // factor, channels)
    return jax.image.resize(images, small, "cubic", precision=jax.lax.Precision.HIGHEST)


def with_noise(image: Images, sigma: Sigma, eps: Images, scalings: Precond) -> Condition:
    """Return noisy small images c_in * (image + sigma * eps), and the time c_noise of their level.

    They are the network's arguments "low_res" and "low_res_time". `eps` is standard normal noise.
    The preconditioner `scalings` maps sigma to c_in and c_noise.
    """
    c = scalings(sigma)
    noisy = image + sigma[:, None, None, None] * eps
    return {"low_res": c.c_in[:, None, None, None] * noisy, "low_res_time": c.c_noise}


def at_random_levels(image: Images, noise: Noise, keys: Key[Array, "B"], scalings: Precond) -> Condition:
    """Add noise to small images, at levels from the noise distribution of training."""
    draw = lambda key: noise.draw(jax.random.fold_in(key, 1), 1)[0]
    eps = samplers.initial_noise(keys, image.shape[1:], 1)
    return with_noise(image, jax.vmap(draw)(keys), eps, scalings)


def own_keys(keys: Key[Array, "B"], size: int) -> tuple[Key[Array, "B"], Key[Array, "B"]]:
    """Return two arrays of keys: to draw the images, and for the noise added to the small images.

    All stages of a cascade get the same `keys`. To give each stage different noise, the side of the
    stage's images in pixels, `size`, is folded into the keys.
    """
    stage = jax.vmap(jax.random.fold_in, (0, None))(keys, size)
    return tuple(jax.vmap(jax.random.split, out_axes=1)(stage))


def at_level(image: Images, sigma: float | None, keys: Key[Array, "B"], scalings: Precond) -> Condition:
    """Add noise of level `sigma` to small images; None leaves them unchanged, without a time."""
    if sigma is None:
        return {"low_res": image}
    eps = samplers.initial_noise(keys, image.shape[1:], jnp.ones(()))
    return with_noise(image, jnp.full(len(image), sigma), eps, scalings)
