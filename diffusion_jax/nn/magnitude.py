"""Layers that keep magnitudes: config G of EDM2 (Karras et al. 2024, arXiv 2312.02696).

The magnitude of an array is the root of its mean square. Of inputs of magnitude 1 these layers give
outputs of magnitude 1, so that a network of them needs no group norm and no biases. A weight's
length says nothing then: `MPConv` divides it out, and `forced` keeps it at 1 after every update of
training, so that the learning rate alone says how far an update turns a weight.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from diffusion_jax.nn.layers import PRODUCT

UNIT = "unit_kernel"
"""The name of parameters of magnitude 1 over all axes but the last, that of the outputs."""
_EPS = 1e-4


def normalize(x: Float[Array, "..."], axes: int | Sequence[int] = -1) -> Float[Array, "..."]:
    """x over its magnitude along the axes, which is taken in float32; of zeros, zeros.

    Over channels it is pixel norm, over a weight's inputs weight norm (equation 47).
    """
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axes, keepdims=True)
    # A root has no gradient at 0, where text that was dropped is.
    return x / (_EPS + jnp.sqrt(jnp.maximum(square, 1e-30))).astype(x.dtype)


def mp_silu(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """SiLU over its magnitude for normal x (equation 81)."""
    return nn.silu(x) / 0.596


def mp_sum(a: Float[Array, "*S"], b: Float[Array, "*S"], t: float) -> Float[Array, "*S"]:
    """a and b in shares of 1 - t and t (equation 88), taken to be uncorrelated."""
    return ((1 - t) * a + t * b) / np.hypot(1 - t, t).item()


def mp_cat(a: Float[Array, "*S C"], b: Float[Array, "*S D"]) -> Float[Array, "*S C+D"]:
    """The channels of both, each adding as much as the other (equation 103, t = 1/2)."""
    c, d = a.shape[-1], b.shape[-1]
    half = ((c + d) / 2) ** 0.5
    return jnp.concatenate([half / c**0.5 * a, half / d**0.5 * b], axis=-1)


def mp_fourier(t: Float[Array, "B"], width: int) -> Float[Array, "B {width}"]:
    """Waves of t of fixed random frequencies and phases (equation 75).

    numpy keeps the numbers of RandomState for good, so that they are the same for every run.
    """
    random = np.random.RandomState(0)
    frequencies, phases = random.randn(width), random.rand(width)
    angles = t.astype(jnp.float32)[:, None] * np.float32(2 * np.pi * frequencies)  # [B, width]
    return 2**0.5 * jnp.cos(angles + np.float32(2 * np.pi * phases))


class MPConv(nn.Module):
    """A convolution, with kernel 1 a linear layer, of weights of magnitude 1 (equation 47)."""

    width: int
    kernel: int = 1
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*B C"], gain: ArrayLike = 1.0):
        """Returns [*B, width], of magnitude `gain`."""
        c, k = x.shape[-1], self.kernel
        shape = (c, self.width) if k == 1 else (k, k, c, self.width)
        weight = _to_unit(self.param(UNIT, _unit_normal, shape))
        weight = (weight * (gain / (k * k * c) ** 0.5)).astype(self.dtype)
        x = x.astype(self.dtype)
        if k == 1:
            return checkpoint_name(x @ weight, PRODUCT)
        numbers = ("NHWC", "HWIO", "NHWC")
        padding = [(k // 2, k // 2)] * 2
        out = jax.lax.conv_general_dilated(x, weight, (1, 1), padding, dimension_numbers=numbers)
        return checkpoint_name(out, PRODUCT)


def forced(params: Any) -> Any:
    """The same tree, its parameters named `unit_kernel` at magnitude 1 (equation 66)."""

    def force(path, leaf):
        return _to_unit(leaf) if getattr(path[-1], "key", "") == UNIT else leaf

    return jax.tree_util.tree_map_with_path(force, params)


def _to_unit(weight: Float[Array, "..."]) -> Float[Array, "..."]:
    return normalize(weight, range(weight.ndim - 1))


def _unit_normal(key: Any, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> Array:
    return _to_unit(jax.random.normal(key, tuple(shape), dtype))
