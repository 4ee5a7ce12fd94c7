"""The forms of operations that benchmarks.kernels compares."""

import functools

import jax
import jax.numpy as jnp

from benchmarks import group_norm_kernel
from diffusion_jax.nn import ops

_NHWC = ("NHWC", "HWIO", "NHWC")


def halving(x, kernel):
    """Compute a 4x4 convolution with stride 2 and padding 1."""
    return jax.lax.conv_general_dilated(x, kernel, (2, 2), ((1, 1), (1, 1)), dimension_numbers=_NHWC)


def halving_by_patches(x, kernel):
    """Compute `halving` as a 2x2 convolution over patches of 2x2 pixels."""
    c, d = kernel.shape[2:]
    x = ops.space_to_depth(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), 2)  # [B, H/2+1, W/2+1, 4C]
    patches = kernel.reshape(2, 2, 2, 2, c, d).transpose(0, 2, 1, 3, 4, 5).reshape(2, 2, 4 * c, d)
    return jax.lax.conv_general_dilated(x, patches, (1, 1), "VALID", dimension_numbers=_NHWC)


def dilated(x, kernel):
    """Compute the transposed 4x4 convolution with stride 2 as a dilated convolution."""
    flipped = kernel[::-1, ::-1]
    return jax.lax.conv_general_dilated(
        x, flipped, (1, 1), ((2, 2), (2, 2)), lhs_dilation=(2, 2), dimension_numbers=_NHWC
    )


def one_product(x, kernel, bias):
    value, gate = jnp.split(ops.linear(x, kernel, bias), 2, axis=-1)
    return value * jax.nn.gelu(gate, approximate=False)


def two_products(x, kernel, bias):
    value, gate = map(functools.partial(ops.linear, x), jnp.split(kernel, 2, 1), jnp.split(bias, 2))
    return value * jax.nn.gelu(gate, approximate=False)


def own_gradient(x, kernel, bias):
    products = (ops.tensordot(x, half) for half in jnp.split(kernel, 2, 1))
    return ops._gated(*products, *jnp.split(bias, 2))


def biased(x, kernel, bias):
    return ops.add_broadcast(ops.tensordot(x, kernel), bias)


def own_norm(x, weight, bias, scale, shift):
    return ops.group_norm(x, weight, bias, scale, shift, silu=True)


def plain_norm(x, weight, bias, scale, shift):
    """Compute group norm, scale and shift, and SiLU in the order of the papers."""
    b, c = x.shape[0], x.shape[-1]
    groups = x.astype(jnp.float32).reshape(b, -1, 32, c // 32)
    mean = groups.mean((1, 3), keepdims=True)
    variance = ((groups - mean) ** 2).mean((1, 3), keepdims=True)
    normal = ((groups - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    out = (normal * weight + bias) * (1 + scale[:, None, None]) + shift[:, None, None]
    return jax.nn.silu(out.astype(x.dtype))


@jax.custom_vjp
def biased_row(x, kernel, bias):
    return biased(x, kernel, bias)


def biased_row_backward(residuals, gradient):
    # As in ops.linear on TPUs, but with eight further channels, so that rows stay aligned.
    x, kernel = residuals
    ones = jnp.zeros((*x.shape[:-1], 8), x.dtype).at[..., 0].set(1)
    axes = tuple(range(x.ndim - 1))
    d_both = jax.lax.dot_general(
        jnp.concatenate([x, ones], axis=-1), gradient, ((axes, axes), ((), ())), preferred_element_type=jnp.float32
    )  # [C + 8, D]
    c = x.shape[-1]
    return ops.tensordot(gradient, kernel.T), d_both[:c].astype(kernel.dtype), d_both[c]


biased_row.defvjp(lambda x, kernel, bias: (biased(x, kernel, bias), (x, kernel)), biased_row_backward)


def pallas_norm(x, weight, bias, scale, shift):
    factor, offset = weight * (1 + scale), bias * (1 + scale) + shift  # [B, C]
    return group_norm_kernel.group_norm(x, factor, offset)


def conv_ohwi(x, kernel):
    layout = ("NHWC", "OHWI", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def conv(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=_NHWC)


def padded_input(x, kernel):
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 5)))
    return conv(x, jnp.pad(kernel, ((0, 0), (0, 0), (0, 5), (0, 0))))


def padded_output(x, kernel):
    return conv(x, jnp.pad(kernel, ((0, 0), (0, 0), (0, 0), (0, 5))))[..., :3]
