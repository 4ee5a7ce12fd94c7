"""The small image that a super-resolution model enlarges, with a little noise added to it.

This noise conditioning augmentation (Ho et al. 2021, "Cascaded Diffusion Models", section 4.2)
makes a model robust to the errors of the stage before it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from diffusion_jax.diffusion import samplers
from diffusion_jax.diffusion.precond import Images, Precond, Sigma


def shrink(images: Float[Array, "B H W C"], factor: int) -> Float[Array, "B h w C"]:
    """Shrink both sides by `factor` with an antialiased bicubic filter (a = -0.5, as in Pillow).

    The result is not clipped, so it can slightly exceed the range of the input.
    """
    batch, height, width, channels = images.shape
    small = (batch, height // factor, width // factor, channels)
    return jax.image.resize(images, small, "cubic", precision=jax.lax.Precision.HIGHEST)


class LowRes(NamedTuple):
    """The arguments `low_res` and `low_res_time` of a UNet, for a batch.

    `image` holds the small images. `time` is the c_noise of their noise level, or None if no noise
    is added to them. Both are None for a base model.
    """

    image: Images | None = None
    time: Sigma | None = None

    def rows(self, rows: slice) -> "LowRes":
        """Return a LowRes with only these rows of the batch."""
        return LowRes(*(None if array is None else array[rows] for array in self))


def with_noise(image: Images, sigma: Sigma, eps: Images, scalings: Precond) -> LowRes:
    """Return a LowRes of noisy small images c_in * (image + sigma * eps), with c_noise as `time`.

    `eps` is standard normal noise. The preconditioner `scalings` maps sigma to c_in and c_noise.
    """
    c = scalings(sigma)
    noisy = image + sigma[:, None, None, None] * eps
    return LowRes(c.c_in[:, None, None, None] * noisy, c.c_noise)


def own_keys(keys: Key[Array, "B"], size: int) -> tuple[Key[Array, "B"], Key[Array, "B"]]:
    """Return two arrays of keys: to draw the images, and for the noise added to the small images.

    All stages of a cascade get the same `keys`. To give each stage different noise, the side of the
    stage's images in pixels, `size`, is folded into the keys.
    """
    stage = jax.vmap(jax.random.fold_in, (0, None))(keys, size)
    return tuple(jax.vmap(jax.random.split, out_axes=1)(stage))


def sampling_inputs(
    image: Images, sigma: float | None, keys: Key[Array, "B"], scalings: Precond
) -> LowRes:
    """Add noise of level `sigma`, drawn from `keys`, to small images, and return them as a LowRes.

    If `sigma` is None, the images stay unchanged, and their time is None.
    """
    if sigma is None:
        return LowRes(image)
    batch, height, width, channels = image.shape
    eps = samplers.initial_noise(keys, (height, width, channels), jnp.ones(()))
    return with_noise(image, jnp.full(batch, sigma), eps, scalings)
