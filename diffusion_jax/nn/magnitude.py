"""Magnitude-preserving layers: config G of EDM2 (Karras et al. 2024, arXiv 2312.02696).

The magnitude of an array is its root mean square. These layers map inputs of magnitude 1 to outputs
of magnitude 1, so a network of them needs neither group norm nor biases. The magnitude of a weight
has no effect on the output, because `MPConv` divides by it. After every training update, `forced`
resets this magnitude to 1. So only the learning rate determines how far an update turns a weight.
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
from diffusion_jax.nn.ops import by_batch

UNIT = "unit_kernel"
"""Parameter name of weights whose magnitude is 1 for each output channel, the last axis."""
_EPS = 1e-4


def normalize(x: Float[Array, "..."], axes: int | Sequence[int] = -1) -> Float[Array, "..."]:
    """Divide x by its magnitude along `axes`. The magnitude is computed in float32.

    Zeros stay zeros. Over the channels of an image, this is EDM2's pixel norm. Over all axes of a
    weight except the output channels, it is EDM2's weight normalisation (equation 47).
    """
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axes, keepdims=True)
    # EDM2's form is x / (eps + sqrt(square)). The maximum avoids the infinite gradient of the
    # square root at 0. Dropped texts are zeros.
    return x / (_EPS + jnp.sqrt(jnp.maximum(square, 1e-30))).astype(x.dtype)


def mp_silu(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Apply SiLU and divide by 0.596, SiLU's magnitude at standard normal x (EDM2, equation 81)."""
    return nn.silu(x) / 0.596


def mp_sum(a: Float[Array, "*S"], b: Float[Array, "*S"], t: float) -> Float[Array, "*S"]:
    """Interpolate from a to b by t (EDM2, equation 88).

    The result has magnitude 1 if a and b have magnitude 1 and are uncorrelated.
    """
    return ((1 - t) * a + t * b) / np.hypot(1 - t, t).item()


def mp_cat(a: Float[Array, "*S C"], b: Float[Array, "*S D"]) -> Float[Array, "*S C+D"]:
    """Concatenate channels so that a and b contribute equally (EDM2, equation 103, t = 1/2)."""
    c, d = a.shape[-1], b.shape[-1]
    half = ((c + d) / 2) ** 0.5
    return jnp.concatenate([half / c**0.5 * a, half / d**0.5 * b], axis=-1)


def mp_fourier(t: Float[Array, "B"], width: int) -> Float[Array, "B {width}"]:
    """Embed t as cosines with fixed random frequencies and phases (EDM2, equation 75).

    numpy guarantees that RandomState(0) always draws the same numbers, so all runs use the same
    frequencies and phases.
    """
    random = np.random.RandomState(0)
    frequencies, phases = random.randn(width), random.rand(width)
    angles = t.astype(jnp.float32)[:, None] * np.float32(2 * np.pi * frequencies)  # [B, width]
    return 2**0.5 * jnp.cos(angles + np.float32(2 * np.pi * phases))


class MPConv(nn.Module):
    """Convolution, or linear layer if `kernel` is 1, whose weights are normalised to magnitude 1.

    This is equation 47 of EDM2.
    """

    width: int
    kernel: int = 1
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*B C"], gain: ArrayLike = 1.0):
        """Apply the layer. The output [*B, width] has magnitude `gain` if x has magnitude 1."""
        c, k = x.shape[-1], self.kernel
        shape = (c, self.width) if k == 1 else (k, k, c, self.width)
        weight = _to_unit(self.param(UNIT, _unit_normal, shape))
        weight = (weight * (gain / (k * k * c) ** 0.5)).astype(self.dtype)
        x = x.astype(self.dtype)
        if k == 1:
            return checkpoint_name(by_batch(jnp.matmul)(x, weight), PRODUCT)
        numbers = ("NHWC", "HWIO", "NHWC")
        padding = [(k // 2, k // 2)] * 2
        convolve = by_batch(jax.lax.conv_general_dilated)
        out = convolve(x, weight, (1, 1), padding, dimension_numbers=numbers)
        return checkpoint_name(out, PRODUCT)


def forced(params: Any) -> Any:
    """Return `params` with all weights of MPConv layers scaled to magnitude 1 (EDM2, equation 66).

    These weights are the arrays with the name UNIT.
    """

    def force(path, leaf):
        return _to_unit(leaf) if getattr(path[-1], "key", "") == UNIT else leaf

    return jax.tree_util.tree_map_with_path(force, params)


def _to_unit(weight: Float[Array, "..."]) -> Float[Array, "..."]:
    return normalize(weight, range(weight.ndim - 1))


def _unit_normal(key: Any, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> Array:
    return _to_unit(jax.random.normal(key, tuple(shape), dtype))
