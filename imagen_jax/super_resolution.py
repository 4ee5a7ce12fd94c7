"""What a super-resolution model sees beside its image: a small one, made slightly noisy.

Noise on the small image (noise conditioning augmentation, Ho et al. 2021, "Cascaded Diffusion
Models", section 4.2) lets a model forgive what the stage before it got wrong.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from diffusion_jax import samplers
from diffusion_jax.precond import Images, Precond, Sigma


def shrink(images: Float[Array, "B H W C"], factor: int) -> Float[Array, "B h w C"]:
    """Bicubic with antialiasing (Pillow's and torch's, a = -0.5); overshoot is not clipped."""
    batch, height, width, channels = images.shape
    small = (batch, height // factor, width // factor, channels)
    return jax.image.resize(images, small, "cubic", precision=jax.lax.Precision.HIGHEST)


def with_noise(low_res: Images, sigma: Sigma, eps: Images, scalings: Precond) -> dict[str, Array]:
    """The UNet's inputs `low_res` and `low_res_time` for a small image of noise level sigma.

    They are scaled as the large image and its time are: c_in * (low_res + sigma * eps), c_noise.
    """
    c = scalings(sigma)
    noisy = low_res + sigma[:, None, None, None] * eps
    return {"low_res": c.c_in[:, None, None, None] * noisy, "low_res_time": c.c_noise}


def own_keys(keys: Key[Array, "B"], size: int) -> tuple[Key[Array, "B"], Key[Array, "B"]]:
    """Each image's keys for its own noise and for its small image's at this stage.

    All stages of a cascade get the same seed; `size`, the side of what a stage draws, tells them
    apart.
    """
    stage = jax.vmap(jax.random.fold_in, (0, None))(keys, size)
    return tuple(jax.vmap(jax.random.split, out_axes=1)(stage))


def sampling_inputs(
    low_res: Images, sigma: float | None, keys: Key[Array, "B"], scalings: Precond
) -> dict[str, Array]:
    """`with_noise` at one level, the noise drawn once from the keys; as it is if sigma is None."""
    if sigma is None:
        return {"low_res": low_res}
    eps = samplers.initial_noise(keys, low_res.shape[1:], jnp.ones(()))
    return with_noise(low_res, jnp.full(len(low_res), sigma), eps, scalings)
