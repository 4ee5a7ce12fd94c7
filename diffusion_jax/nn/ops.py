"""Operations shared by several networks: functions of arrays, without learned parameters."""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

Function = TypeVar("Function", bound=Callable[..., Any])
_NUMBERS = ("NHWC", "HWIO", "NHWC")
_convolve = functools.partial(jax.lax.conv_general_dilated, dimension_numbers=_NUMBERS)


def by_batch(function: Function) -> Function:
    """Return `function` with its first argument and its result split like a batch.

    Both must be arrays whose first axis is the batch, as in a layer function(x, kernel). If the
    kernel is larger than x, the compiler would split x and the result along their channels, as the
    kernel is split over fsdp, and devices would exchange activations between all layers. The
    function does not change where there is no current mesh (see sharding.ambient), or where the
    mesh does not divide the batch.
    """

    @functools.wraps(function)
    def split(x, *args, **kwargs):
        return _split_batch(function(_split_batch(x), *args, **kwargs))

    return split  # pyright: ignore[reportReturnType]


def _split_batch(x: jax.Array) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    ways = 1 if mesh.empty else mesh.shape["replica"] * mesh.shape["fsdp"]
    if ways == 1 or len(x) % ways:
        return x
    # The compiler still chooses how to split the other axes, such as channels over tensor.
    free = [P.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, P(("replica", "fsdp"), *free))


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
    """Apply group norm (Wu & He 2018), modulation by `scale` and `shift`, and SiLU if `silu`.

    Everything is computed in float32, whatever x's dtype. In the paper's form:

        y = (x - mean) / sqrt(var + eps) * weight + bias  # mean, var over each [*S, C / groups]
        y = y * (1 + scale) + shift
        y = silu(y)

    Here weight, bias, scale and shift are combined into one factor and one offset per image and
    channel. For the backward pass, only x, these two and the statistics are stored, and everything
    else is recomputed.
    """
    b, c = x.shape[0], x.shape[-1]
    factor, offset = jnp.broadcast_to(weight, (b, c)), jnp.broadcast_to(bias, (b, c))
    if scale is not None:
        factor, offset = factor * (1 + scale), offset * (1 + scale)  # [B, C]
    if shift is not None:
        offset = offset + shift
    return _normalize(x, factor.astype(jnp.float32), offset.astype(jnp.float32), groups, eps, silu)


def sinusoid(t: Float[Array, "B"], width: int) -> Float[Array, "B {width}"]:
    """Embed each value of t as width / 2 cosines, followed by as many sines (NeMo's order).

    The angular frequencies fall from 1 to nearly 1 / 10000.
    """
    half = width // 2
    # The order of float32 operations is NeMo's: a log-SNR of -30 multiplies rounding errors by 30.
    exponents = -math.log(10000) * np.arange(half, dtype=np.float32) / np.float32(half)
    angles = t[:, None] * np.exp(exponents)  # [B, width / 2]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)


def add_broadcast(x: Float[Array, "*B C"], row: Float[Array, "*_ C"]) -> Float[Array, "*B C"]:
    """Compute x + row in float32, and cast the result to x's dtype.

    So the gradient of `row`, such as a bias, is summed in float32. Otherwise, XLA's CPU and GPU
    backends would sum bfloat16 values in bfloat16, in which 256 + 0.5 is 256.
    """
    return (x + row.astype(jnp.promote_types(row.dtype, jnp.float32))).astype(x.dtype)


@by_batch
def tensordot(x: Array, kernel: Array, axes: int = 1) -> Array:
    """Compute jnp.tensordot(x, kernel, axes).

    On CPUs the arrays are reshaped to matrices. Otherwise XLA would copy an operand to compute the
    kernel's gradient, which would take 1.2 to 3 times as long.
    """
    if platform() != "cpu":
        return jnp.tensordot(x, kernel, axes)
    inner = math.prod(kernel.shape[:axes])
    out = x.reshape(-1, inner) @ kernel.reshape(inner, -1)  # [rows of x, columns of kernel]
    return out.reshape(*x.shape[: x.ndim - axes], *kernel.shape[axes:])


@by_batch
def linear(
    x: Float[Array, "*B C"], kernel: Float[Array, "C D"], bias: Float[Array, "D"] | None = None
) -> Float[Array, "*B D"]:
    """Compute x @ kernel + bias.

    On TPUs, if D > C, one product computes the gradients of kernel and bias. For this, x gets an
    extra channel of ones, so that the last row of the product is the gradient of the bias, summed
    in float32. The output's gradient may be eight times as wide as x, and a separate sum would read
    it a second time.
    """
    if bias is None:
        return tensordot(x, kernel)
    if platform() == "tpu" and kernel.shape[1] > kernel.shape[0]:
        return _linear(x, kernel, bias)
    return add_broadcast(tensordot(x, kernel), bias)


def geglu(x: Float[Array, "*B C"], kernel: Float[Array, "C D"], bias: Float[Array, "D"]) -> Float[Array, "*B D//2"]:
    """Compute value * gelu(gate), where value and gate are the halves of linear(x, kernel, bias).

    GPUs compute two products: after one product, the backward pass joins the gradients of the
    halves in memory. For the backward pass, they store only the two products, and recompute the
    rest: otherwise, XLA also stores gelu(gate) and its slope.
    """
    if platform() != "gpu":
        value, gate = jnp.split(linear(x, kernel, bias), 2, axis=-1)
        return value * jax.nn.gelu(gate, approximate=False)
    products = (tensordot(x, half) for half in jnp.split(kernel, 2, axis=1))
    return _gated(*products, *jnp.split(bias, 2))


def _plain_gated(value, gate, value_bias, gate_bias):
    gate = jax.nn.gelu(add_broadcast(gate, gate_bias), approximate=False)
    return add_broadcast(value, value_bias) * gate


@jax.custom_vjp
def _gated(value, gate, value_bias, gate_bias):
    return _plain_gated(value, gate, value_bias, gate_bias)


def _gated_backward(residuals, gradient):
    # Without the barrier, the compiler would reuse values of the forward pass, and so store them.
    return jax.vjp(_plain_gated, *jax.lax.optimization_barrier(residuals))[1](gradient)


_gated.defvjp(lambda *arrays: (_plain_gated(*arrays), arrays), _gated_backward)


@jax.custom_vjp
def _linear(x: Array, kernel: Array, bias: Array) -> Array:
    return add_broadcast(tensordot(x, kernel), bias)


def _linear_backward(residuals, gradient):
    x, kernel = residuals
    with_ones = jnp.concatenate([x, jnp.ones((*x.shape[:-1], 1), x.dtype)], axis=-1)
    axes = tuple(range(x.ndim - 1))
    d_both = jax.lax.dot_general(
        with_ones, gradient, ((axes, axes), ((), ())), preferred_element_type=jnp.float32
    )  # [C + 1, D]
    return tensordot(gradient, kernel.T), d_both[:-1].astype(kernel.dtype), d_both[-1]


_linear.defvjp(lambda x, kernel, bias: (_linear(x, kernel, bias), (x, kernel)), _linear_backward)


@by_batch
def convolution(
    x: Float[Array, "B H W C"],
    kernel: Float[Array, "I J C D"],
    strides: tuple[int, int],
    padding: tuple[tuple[int, int], tuple[int, int]],
) -> Float[Array, "B _ _ D"]:
    """Compute a convolution. On CPUs, use im2col if the kernel is much larger than x.

    For such shapes (a few 8x8 images, wide layers), XLA's own CPU convolution spends as long on
    transposing the kernel for the gradient of x as on the convolution itself.
    """
    if platform() != "cpu" or kernel.size < 4 * x.size or max(strides) > 1:
        return _convolve(x, kernel, strides, padding)
    rows, columns, _, d = kernel.shape
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    h, w = x.shape[1] - rows + 1, x.shape[2] - columns + 1
    taps = [x[:, i : i + h, j : j + w] for i in range(rows) for j in range(columns)]
    patches = jnp.concatenate(taps, axis=3)  # [B, H, W, I J C]
    return tensordot(patches, kernel.reshape(-1, d))  # [B, H, W, D]


@by_batch
def conv_transpose_4x4(
    x: Float[Array, "B H W C"], kernel: Float[Array, "4 4 C D"], bias: Float[Array, "D"]
) -> Float[Array, "B 2*H 2*W D"]:
    """Compute torch's ConvTranspose2d with kernel 4, stride 2 and padding 1.

    TPUs compute the convolution directly, because their compiler skips the zeros between dilated
    pixels. CPUs and GPUs use `transpose_by_phases`, which is faster there. For 128 channels,
    cuDNN's deterministic kernel of the direct form takes 130 ms on an H200, and the four
    convolutions take 1.3 ms (16 images from 128x128 to 256x256, with gradients).
    """
    if platform() != "tpu":
        return add_broadcast(transpose_by_phases(x, kernel), bias)
    return add_broadcast(_convolve(x, kernel[::-1, ::-1], (1, 1), ((2, 2),) * 2, (2, 2)), bias)


def transpose_by_phases(x: Float[Array, "B H W C"], kernel: Float[Array, "4 4 C D"]) -> Float[Array, "B 2*H 2*W D"]:
    """Compute `conv_transpose_4x4` without bias as four 2x2 convolutions.

    Output pixels with row parity i and column parity j depend on 2x2 input pixels through every
    other tap of the kernel. So for each (i, j), one 2x2 convolution without stride or dilation
    computes all of these outputs. The gradients have this form too. Padding is a separate
    operation, because XLA's CPU backend computes the gradients of padded convolutions 20 times
    slower.
    """
    b, h, w, _ = x.shape
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))  # [B, H+2, W+2, C]

    def phase(i, j):  # [B, H, W, D]
        windows, taps = x[:, i : i + h + 1, j : j + w + 1], kernel[3 - i :: -2, 3 - j :: -2]
        return _convolve(windows, taps, (1, 1), "VALID")

    rows = [jnp.stack([phase(i, 0), phase(i, 1)], axis=3) for i in (0, 1)]  # [B, H, W, 2, D]
    return jnp.stack(rows, axis=2).reshape(b, 2 * h, 2 * w, -1)


def platform() -> str:
    """Return the platform of the current mesh: "cpu", "gpu" or "tpu".

    Without a mesh, return JAX's default platform.
    """
    device = _abstract_device()
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """Return the kind of device, such as "TPU v5 lite", of the current mesh.

    Without a mesh, return the kind of the first local device.
    """
    return (_abstract_device() or jax.local_devices()[0]).device_kind


def _abstract_device() -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh.abstract_device


def average_pool_2x2(x: Float[Array, "B H W C"]) -> Float[Array, "B H/2 W/2 C"]:
    b, h, w, c = x.shape
    return x.reshape(b, h // 2, 2, w // 2, 2, c).mean(axis=(2, 4))


def repeat_2x2(x: Float[Array, "B H W C"]) -> Float[Array, "B 2*H 2*W C"]:
    """Upsample by 2 with nearest-neighbour interpolation."""
    b, h, w, c = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None], (b, h, 2, w, 2, c))
    return x.reshape(b, 2 * h, 2 * w, c)


def space_to_depth(x: Float[Array, "B H W C"], patch: int) -> Float[Array, "B _ _ _"]:
    """Move each patch x patch block of pixels into channels, ordered (row, column, channel)."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // patch, patch, w // patch, patch, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, h // patch, w // patch, patch**2 * c)


def depth_to_space(x: Float[Array, "B H W C"], patch: int) -> Float[Array, "B _ _ _"]:
    """Move channels back into blocks of patch x patch pixels: the inverse of `space_to_depth`."""
    b, h, w, c = x.shape
    x = x.reshape(b, h, w, patch, patch, c // patch**2).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, h * patch, w * patch, c // patch**2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _normalize(x: Array, factor: Array, offset: Array, groups: int, eps: float, silu: bool):
    """Normalise x [B, *S, C] in groups, apply factor and offset [B, C], then SiLU if `silu`."""
    return _normalize_forward(x, factor, offset, groups, eps, silu)[0]


def _normalize_forward(x, factor, offset, groups, eps, silu):
    x = _stored(x)
    statistics = _moments(x, groups, eps)
    out = _normalized(x, statistics) * _like(factor, x) + _like(offset, x)
    out = jax.nn.silu(out) if silu else out
    return out.astype(x.dtype), (x, factor, offset, statistics)


def _normalize_backward(groups, _, silu, residuals, cotangent):
    # Without the barrier, the compiler would reuse values of the forward pass, and so store them.
    x, factor, offset, statistics = jax.lax.optimization_barrier(residuals)
    normal, gradient = _normalized(x, statistics), cotangent.astype(jnp.float32)
    row, axes = lambda value: _like(value, x), tuple(range(1, x.ndim - 1))
    if silu:
        out = normal * row(factor) + row(offset)
        gate = jax.nn.sigmoid(out)
        gradient = gradient * gate * (1 + out * (1 - gate))
    gradient = _stored(gradient.astype(x.dtype)).astype(jnp.float32)
    d_offset = gradient.sum(axes)  # [B, C]
    if platform() != "gpu":
        d_factor = (gradient * normal).sum(axes)  # [B, C]
    else:  # The same sum without `normal`, which XLA would store as an array of x's size.
        origin, mean, inverse = statistics
        moment = (gradient * (x.astype(jnp.float32) - row(origin))).sum(axes)
        d_factor = (moment - mean * d_offset) * inverse
    pixels = math.prod(x.shape[1:-1])
    mean, slope = (_group_mean(factor * d / pixels, groups) for d in (d_offset, d_factor))
    d_normal = gradient * row(factor) - row(mean) - normal * row(slope)
    return _stored((d_normal * row(statistics[2])).astype(x.dtype)), d_factor, d_offset


_normalize.defvjp(_normalize_forward, _normalize_backward)


def _stored(x: Array) -> Array:
    """Return x. On GPUs, also make XLA store it in x's own dtype instead of float32."""
    return jax.lax.optimization_barrier(x) if platform() == "gpu" else x


def _moments(x: Float[Array, "B *S C"], groups: int, eps: float) -> tuple[Array, Array, Array]:
    """Compute an origin, the mean relative to it, and 1 / sqrt(var + eps), for each group.

    Each of the three is [B, C], with equal values for all channels of a group.

    Mean and variance come from one pass over x, by var = E[x^2] - E[x]^2. This is inaccurate if the
    mean is large, so an origin is first subtracted from x: the mean of the group's channels at the
    first pixel. In exact arithmetic, the choice of the origin does not matter. On TPUs and GPUs,
    the origin of 16-bit arrays is 0: if the mean were large enough for float32 sums to be
    inaccurate, rounding x to 16 bits would already have erased the deviations from the mean.
    """
    first, axes = (slice(None), *[0] * (x.ndim - 2)), tuple(range(1, x.ndim - 1))
    origin = _group_mean(x[first].astype(jnp.float32), groups)
    if x.dtype.itemsize == 2 and platform() != "cpu":
        origin = jnp.zeros_like(origin)
    shifted = x.astype(jnp.float32) - _like(origin, x)
    mean = _group_mean(shifted.mean(axes), groups)
    variance = jnp.maximum(_group_mean((shifted**2).mean(axes), groups) - mean**2, 0)
    return origin, mean, jax.lax.rsqrt(variance + eps)


def _normalized(x: Float[Array, "B *S C"], statistics: tuple[Array, Array, Array]) -> Array:
    origin, mean, inverse = (_like(value, x) for value in statistics)
    return (x.astype(jnp.float32) - origin - mean) * inverse


def _like(row: Float[Array, "B C"], x: Float[Array, "B *S C"]) -> Float[Array, "B ... C"]:
    """Reshape `row` to [B, 1, ..., 1, C], which broadcasts over the spatial axes of x."""
    return jnp.expand_dims(row, tuple(range(1, x.ndim - 1)))


def _group_mean(x: Float[Array, "B C"], groups: int) -> Float[Array, "B C"]:
    """Replace the value of each channel by the mean of its group."""
    b, c = x.shape
    means = x.reshape(b, groups, c // groups).mean(-1, keepdims=True)
    return jnp.broadcast_to(means, (b, groups, c // groups)).reshape(b, c)
