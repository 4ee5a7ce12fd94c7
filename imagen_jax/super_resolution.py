"""The low-resolution input of super-resolution models: a small image, made slightly noisy.

Noise on the small image (noise conditioning augmentation, Ho et al. 2021, "Cascaded Diffusion
Models", section 4.2) lets a model forgive what the stage before it got wrong.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from diffusion_jax.diffusion import samplers
from diffusion_jax.diffusion.precond import Images, Precond, Sigma


def shrink(images: Float[Array, "B H W C"], factor: int) -> Float[Array, "B h w C"]:
    """Bicubic with antialiasing (Pillow's and torch's, a = -0.5); overshoot is not clipped."""
    batch, height, width, channels = images.shape
    small = (batch, height // factor, width // factor, channels)
    return jax.image.resize(images, small, "cubic", precision=jax.lax.Precision.HIGHEST)


class LowRes(NamedTuple):
    """A UNet's arguments `low_res` and `low_res_time`; both None for a base model."""

    image: Images | None = None
    time: Sigma | None = None


def with_noise(image: Images, sigma: Sigma, eps: Images, scalings: Precond) -> LowRes:
    """A small image of noise level sigma.

    It is scaled as the large image and its time are: c_in * (image + sigma * eps), c_noise.
    """
    c = scalings(sigma)
    noisy = image + sigma[:, None, None, None] * eps
    return LowRes(c.c_in[:, None, None, None] * noisy, c.c_noise)


def own_keys(keys: Key[Array, "B"], size: int) -> tuple[Key[Array, "B"], Key[Array, "B"]]:
    """Each image's keys for its own noise and for its small image's at this stage.

    All stages of a cascade get the same seed; `size`, the side of what a stage draws, tells them
    apart.
    """
    stage = jax.vmap(jax.random.fold_in, (0, None))(keys, size)
    return tuple(jax.vmap(jax.random.split, out_axes=1)(stage))


def sampling_inputs(
    image: Images, sigma: float | None, keys: Key[Array, "B"], scalings: Precond
) -> LowRes:
    """`with_noise` at one level, the noise drawn once from the keys; as it is if sigma is None."""
    if sigma is None:
        return LowRes(image)
    batch, height, width, channels = image.shape
    eps = samplers.initial_noise(keys, (height, width, channels), jnp.ones(()))
    return with_noise(image, jnp.full(batch, sigma), eps, scalings)
