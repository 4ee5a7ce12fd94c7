"""Quantise embeddings to 8 bits, with one scale for each group of channels.

A value is stored as an int8 q and restored as a * q |q| / 127^2. The scale a is the largest
absolute value in the group of channels. The step between neighbouring values grows with the value.
Uniform steps (a * q / 127 with one scale per token) have a relative error of more than 1 % if one
channel is an outlier, as in T5: for a channel 30 times larger than the others, the error is 5 %.
Here, an outlier affects only its own group, and small values have small steps. In shapes, D is the
number of channels, and G is the number of groups.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

_GROUP = 64


def num_groups(width: int) -> int:
    """Return G, the number of channel groups of an embedding with `width` channels.

    A group has gcd(width, 64) channels.
    """
    return width // math.gcd(width, _GROUP)


def quantize(x: Float[Array, "*B D"]) -> tuple[Int8[Array, "*B D"], Float[Array, "*B G"]]:
    """Quantise x to (q, scale): int8 values, and one bfloat16 scale for each group of channels."""
    grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], num_groups(x.shape[-1]), -1)
    scale = jnp.abs(grouped).max(-1).astype(jnp.bfloat16)
    largest = scale.astype(jnp.float32)[..., None]
    # Rounding to bfloat16 may leave the largest value a little above its scale.
    root = jnp.sqrt(jnp.minimum(jnp.abs(grouped) / jnp.where(largest == 0, 1, largest), 1))
    q = jnp.sign(grouped) * jnp.round(127 * root)
    return q.reshape(x.shape).astype(jnp.int8), scale


def dequantize(q: Int8[Array, "*B D"], scale: Float[Array, "*B G"]) -> Float[Array, "*B D"]:
    """Restore float32 values from the output (q, scale) of `quantize`."""
    grouped = jnp.asarray(q, jnp.float32).reshape(*scale.shape, -1)
    step = jnp.asarray(scale, jnp.float32)[..., None] / 127**2
    return (grouped * jnp.abs(grouped) * step).reshape(q.shape)


def errors(x: Float[Array, "*B D"], x_hat: Float[Array, "*B D"]) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """Return the relative error |x_hat - x| / |x| and the cosine similarity of each token.

    If x and x_hat of a token are both 0, the error is 0 and the similarity is 1.
    """
    norm = jnp.linalg.norm(x, axis=-1)
    norm_hat = jnp.linalg.norm(x_hat, axis=-1)
    relative = jnp.linalg.norm(x_hat - x, axis=-1) / jnp.maximum(norm, np.finfo(np.float32).tiny)
    product = norm * norm_hat
    cosine = (x * x_hat).sum(-1) / jnp.where(product == 0, 1, product)
    return relative, jnp.where(product == 0, 1.0, cosine)
