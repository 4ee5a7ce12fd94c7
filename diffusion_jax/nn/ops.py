"""Operations that several networks share: functions of arrays, never blocks with parameters."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_NUMBERS = ("NHWC", "HWIO", "NHWC")
_convolve = functools.partial(jax.lax.conv_general_dilated, dimension_numbers=_NUMBERS)


def group_norm(
    x: Float[Array, "B *S C"],
    weight: Float[Array, "C"],
    bias: Float[Array, "C"],
    scale: Float[Array, "B C"] | None = None,
    shift: Float[Array, "B C"] | None = None,
    *,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
) -> Float[Array, "B *S C"]:
    """Group normalisation (Wu & He 2018), then * (1 + scale) + shift, then SiLU where `silu`.

    All of it is float32 whatever x is. In the paper's form:

        y = (x - mean) / sqrt(var + eps) * weight + bias    # Moments of a group, [S, C / groups].
        y = y * (1 + scale) + shift
        y = silu(y)

    Here weight, bias, scale and shift are one factor and one offset a channel. The gradient keeps x
    and the statistics alone: what lies between them and the result is computed again.
    """
    b, c = x.shape[0], x.shape[-1]
    factor, offset = jnp.broadcast_to(weight, (b, c)), jnp.broadcast_to(bias, (b, c))
    if scale is not None:
        factor, offset = factor * (1 + scale), offset * (1 + scale)  # [B, C]
    if shift is not None:
        offset = offset + shift
    return _normalize(x, factor.astype(jnp.float32), offset.astype(jnp.float32), groups, eps, silu)


def sinusoid(t: Float[Array, "B"], width: int) -> Float[Array, "B {width}"]:
    """Cosines, then sines, of t at frequencies from 1 down to almost 1 / 10000 (NeMo's order)."""
    half = width // 2
    # In NeMo's order of float32 operations: log-SNRs of -30 make a last digit here 30 elsewhere.
    exponents = -math.log(10000) * np.arange(half, dtype=np.float32) / np.float32(half)
    angles = t[:, None] * np.exp(exponents)  # [B, width / 2]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)


def add_broadcast(x: Float[Array, "*B C"], row: Float[Array, "*_ C"]) -> Float[Array, "*B C"]:
    """x + row in float32, as of x's dtype: so the gradient of `row` is a sum in float32.

    Compilers for CPUs and NVIDIA's GPUs sum bfloat16 in bfloat16, where 256 + 0.5 is 256.
    """
    return (x + row.astype(jnp.promote_types(row.dtype, jnp.float32))).astype(x.dtype)


def tensordot(x: Array, kernel: Array, axes: int = 1) -> Array:
    """jnp.tensordot: the sum over the last `axes` of x and the first ones of the kernel.

    On CPUs it is a product of matrices: of arrays with more axes XLA copies a factor for the
    kernel's gradient, which then takes 1.2 to 3 times as long.
    """
    if platform() != "cpu":
        return jnp.tensordot(x, kernel, axes)
    inner = math.prod(kernel.shape[:axes])
    out = x.reshape(-1, inner) @ kernel.reshape(inner, -1)
    return out.reshape(*x.shape[: x.ndim - axes], *kernel.shape[axes:])


def convolution(
    x: Float[Array, "B H W C"], kernel: Float[Array, "I J C D"], strides, padding, **kind: Any
) -> Float[Array, "B _ _ D"]:
    """jax.lax.conv_general_dilated; on CPUs im2col where the kernel is much larger than the input.

    Its transpose, for the gradient of x, takes XLA there as long as convolving a few 8x8 pictures.
    """
    if platform() != "cpu" or kernel.size < 4 * x.size or max(strides) > 1:
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, **kind)
    rows, columns, _, d = kernel.shape
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    h, w = x.shape[1] - rows + 1, x.shape[2] - columns + 1
    taps = [x[:, i : i + h, j : j + w] for i in range(rows) for j in range(columns)]
    return tensordot(jnp.concatenate(taps, axis=3), kernel.reshape(-1, d))  # [B, H, W, I J C]


def conv_4x4_halving(
    x: Float[Array, "B H W C"], kernel: Float[Array, "4 4 C D"], bias: Float[Array, "D"]
) -> Float[Array, "B H/2 W/2 D"]:
    """nn.Conv(D, (4, 4), strides=2, padding=1); where that is slow, a dense one of 2x2 patches.

    Padded, each 4x4 window is 2x2 whole patches of 2x2 pixels: the same products, whose gradients
    are dense convolutions too.
    """
    if platform() == "tpu":
        return add_broadcast(_convolve(x, kernel, (2, 2), ((1, 1), (1, 1))), bias)
    c, d = kernel.shape[2:]
    x = space_to_depth(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), 2)  # [B, H/2+1, W/2+1, 4 C]
    patches = kernel.reshape(2, 2, 2, 2, c, d).transpose(0, 2, 1, 3, 4, 5).reshape(2, 2, 4 * c, d)
    return add_broadcast(_convolve(x, patches, (1, 1), "VALID"), bias)


def conv_transpose_4x4(
    x: Float[Array, "B H W C"], kernel: Float[Array, "4 4 C D"], bias: Float[Array, "D"]
) -> Float[Array, "B 2*H 2*W D"]:
    """torch's ConvTranspose2d(kernel 4, stride 2, padding 1); where that is slow, four of 2x2.

    Each of the four phases (i, j) of the output pixels sees windows of 2x2 pixels, through every
    other tap. Exact, and dense forwards and backwards. The padding is apart from the convolutions,
    whose gradients XLA's CPU backend computes 20 times slower otherwise.
    """
    if platform() == "tpu":  # Whose compiler skips the zeros between dilated pixels.
        return add_broadcast(_convolve(x, kernel[::-1, ::-1], (1, 1), ((2, 2),) * 2, (2, 2)), bias)
    b, h, w, _ = x.shape
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))

    def phase(i, j):
        windows, taps = x[:, i : i + h + 1, j : j + w + 1], kernel[3 - i :: -2, 3 - j :: -2]
        return _convolve(windows, taps, (1, 1), "VALID")

    rows = [jnp.stack([phase(i, 0), phase(i, 1)], axis=3) for i in (0, 1)]  # [B, H, W, 2, D]
    return add_broadcast(jnp.stack(rows, axis=2).reshape(b, 2 * h, 2 * w, -1), bias)


def platform() -> str:
    """That of the devices of the mesh in use, or else of the default one: "cpu", "gpu", "tpu"."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    return jax.default_backend() if device is None else device.platform


def average_pool_2x2(x: Float[Array, "B H W C"]) -> Float[Array, "B H/2 W/2 C"]:
    """Means of 2x2 pixels."""
    b, h, w, c = x.shape
    return x.reshape(b, h // 2, 2, w // 2, 2, c).mean(axis=(2, 4))


def repeat_2x2(x: Float[Array, "B H W C"]) -> Float[Array, "B 2*H 2*W C"]:
    """Each pixel four times: upsampling by the nearest."""
    b, h, w, c = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None], (b, h, 2, w, 2, c))
    return x.reshape(b, 2 * h, 2 * w, c)


def space_to_depth(x: Float[Array, "B H W C"], patch: int) -> Float[Array, "B _ _ _"]:
    """Patches of patch x patch pixels become channels, ordered (row, column, channel)."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // patch, patch, w // patch, patch, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, h // patch, w // patch, patch**2 * c)


def depth_to_space(x: Float[Array, "B H W C"], patch: int) -> Float[Array, "B _ _ _"]:
    """The inverse of `space_to_depth`."""
    b, h, w, c = x.shape
    x = x.reshape(b, h, w, patch, patch, c // patch**2).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, h * patch, w * patch, c // patch**2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _normalize(x: Array, factor: Array, offset: Array, groups: int, eps: float, silu: bool):
    """x [B, *S, C], normalised in groups, * factor + offset [B, C], then SiLU where `silu`."""
    return _normalize_forward(x, factor, offset, groups, eps, silu)[0]


def _normalize_forward(x, factor, offset, groups, eps, silu):
    statistics = _moments(x, groups, eps)
    out = _normalized(x, statistics) * _like(factor, x) + _like(offset, x)
    out = jax.nn.silu(out) if silu else out
    return out.astype(x.dtype), (x, factor, offset, statistics)


def _normalize_backward(groups, _, silu, kept, cotangent):
    # The barrier keeps the compiler from storing what the forward pass computed of the same x.
    x, factor, offset, statistics = jax.lax.optimization_barrier(kept)
    normal, gradient = _normalized(x, statistics), cotangent.astype(jnp.float32)
    row, axes = lambda value: _like(value, x), tuple(range(1, x.ndim - 1))
    if silu:
        out = normal * row(factor) + row(offset)
        gate = jax.nn.sigmoid(out)
        gradient = gradient * gate * (1 + out * (1 - gate))
    d_offset, d_factor = gradient.sum(axes), (gradient * normal).sum(axes)  # [B, C]
    pixels = math.prod(x.shape[1:-1])
    mean, slope = (_group_mean(factor * d / pixels, groups) for d in (d_offset, d_factor))
    d_normal = gradient * row(factor) - row(mean) - normal * row(slope)
    return (d_normal * row(statistics[2])).astype(x.dtype), d_factor, d_offset


_normalize.defvjp(_normalize_forward, _normalize_backward)


def _moments(x: Float[Array, "B *S C"], groups: int, eps: float) -> tuple[Array, Array, Array]:
    """A point amid each group's values, their mean about it, and 1 / deviation: all [B, C].

    One pass over x gives both moments. E[x^2] - E[x]^2 cancels where the mean is large, so they are
    taken about the mean of the first pixel; the result does not depend on it.
    """
    first, axes = (slice(None), *[0] * (x.ndim - 2)), tuple(range(1, x.ndim - 1))
    origin = _group_mean(x[first].astype(jnp.float32), groups)
    about = x.astype(jnp.float32) - _like(origin, x)
    mean = _group_mean(about.mean(axes), groups)
    variance = jnp.maximum(_group_mean((about**2).mean(axes), groups) - mean**2, 0)
    return origin, mean, jax.lax.rsqrt(variance + eps)


def _normalized(x: Float[Array, "B *S C"], statistics: tuple[Array, Array, Array]) -> Array:
    origin, mean, inverse = (_like(value, x) for value in statistics)
    return (x.astype(jnp.float32) - origin - mean) * inverse


def _like(row: Float[Array, "B C"], x: Float[Array, "B *S C"]) -> Float[Array, "B ... C"]:
    """One value a channel, to be broadcast over the pixels of x."""
    return jnp.expand_dims(row, tuple(range(1, x.ndim - 1)))


def _group_mean(x: Float[Array, "B C"], groups: int) -> Float[Array, "B C"]:
    """Each channel's value replaced by the mean of its group."""
    b, c = x.shape
    means = x.reshape(b, groups, c // groups).mean(-1, keepdims=True)
    return jnp.broadcast_to(means, (b, groups, c // groups)).reshape(b, c)
