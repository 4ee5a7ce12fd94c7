"""Group norm with SiLU for GPUs, whose sums over pixels are Pallas kernels: a form to measure.

XLA reads the input twice to normalise it, and in the backward pass it stores the gradient before
SiLU. With these kernels, the backward pass reads x and the output's gradient twice and writes only
the gradient of x. Everything elementwise is left to XLA, which can fuse it with what follows.

A program of a kernel sums one part of a picture's pixels, for 64 channels: one program per picture
and group would fill only a quarter of an H100. The parts are added in a fixed order, so results do
not vary between calls. The form enters diffusion_jax/nn/ops.py once a GPU has shown that it is
faster.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

_CHANNELS = 64  # Channels of a program: a row of them in bfloat16 is 128 bytes.
_ROWS = 64  # Pixels that a program reads at once.
_PROGRAMS = 1024  # The number of programs to aim at: about eight per multiprocessor of an H100.


def group_norm(
    x: Float[Array, "B *S C"],
    factor: Float[Array, "B C"],
    offset: Float[Array, "B C"],
    *,
    groups: int = 32,
    eps: float = 1e-5,
    interpret: bool = False,
) -> Float[Array, "B *S C"]:
    """Compute silu(normal * factor + offset), where `normal` is x normalised in groups.

    The variance is E[x^2] - E[x]^2 in float32, as `ops.group_norm` computes it for 16-bit x. With
    `interpret`, the kernels run on any device. Raises ValueError if C is not a multiple of 64, or
    if the number of pixels is odd.
    """
    b, c, pixels = x.shape[0], x.shape[-1], math.prod(x.shape[1:-1])
    if c % _CHANNELS or pixels % 2:
        raise ValueError(f"{c} channels and {pixels} pixels: give a multiple of 64, and of 2")
    flat = x.reshape(b, pixels, c)
    out: Array = _normalize(flat, factor, offset, groups, eps, interpret)
    return out.reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _normalize(x, factor, offset, groups, eps, interpret):
    return _forward(x, factor, offset, groups, eps, interpret)[0]


def _forward(x, factor, offset, groups, eps, interpret):
    total, squares = _sums(_moments_of, 2, (x,), (), interpret)  # [B, C]
    mean = _group_mean(total / x.shape[1], groups)
    variance = jnp.maximum(_group_mean(squares / x.shape[1], groups) - mean**2, 0)
    inverse = jax.lax.rsqrt(variance + eps)
    scale = factor * inverse
    shift = offset - mean * scale
    out = jax.nn.silu(x.astype(jnp.float32) * scale[:, None] + shift[:, None])
    return out.astype(x.dtype), (x, factor, mean, inverse, scale, shift)


def _backward(groups, _, interpret, residuals, cotangent):
    x, factor, mean, inverse, scale, shift = residuals
    d_offset, moment = _sums(_gradients_of, 2, (x, cotangent), (scale, shift), interpret)
    d_factor = (moment - mean * d_offset) * inverse
    low, slope = (_group_mean(factor * d / x.shape[1], groups) for d in (d_offset, d_factor))
    gradient = _gradient(x, cotangent, scale[:, None], shift[:, None])
    # d_x = (gradient * factor - low - normal * slope) * inverse, with normal = (x - mean) * inverse
    bend = slope * inverse**2
    d_x = gradient * scale[:, None] - x * bend[:, None] + (mean * bend - low * inverse)[:, None]
    return d_x.astype(x.dtype), d_factor, d_offset


_normalize.defvjp(_forward, _backward)


def _gradient(x, cotangent, scale, shift):
    """Return the gradient before SiLU, in float32."""
    out = x.astype(jnp.float32) * scale + shift
    gate = jax.nn.sigmoid(out)
    return cotangent.astype(jnp.float32) * gate * (1 + out * (1 - gate))


def _moments_of(x):
    x = x.astype(jnp.float32)
    return x, x * x


def _gradients_of(x, cotangent, scale, shift):
    gradient = _gradient(x, cotangent, scale, shift)
    return gradient, gradient * x.astype(jnp.float32)


def _sums(function, results, arrays, rows, interpret) -> list[Array]:
    """Return the sums over pixels of each result of `function`, as arrays [B, C].

    `function` is elementwise; it maps the values of `arrays`, [B, P, C], and of `rows`, [B, C], to
    `results` arrays.
    """
    b, pixels, c = arrays[0].shape
    rows_at_once = math.gcd(pixels, _ROWS)
    steps, parts = pixels // rows_at_once, 1
    while steps % 2 == 0 and parts * b * c // _CHANNELS < _PROGRAMS:
        steps, parts = steps // 2, parts * 2

    def kernel(*refs):
        inputs, vectors, out = refs[: len(arrays)], refs[len(arrays) : -1], refs[-1]
        vectors = [ref[:] for ref in vectors]  # [64]

        def add(i, totals):
            at = pl.ds(i * rows_at_once, rows_at_once)
            values = function(*(ref[at, :] for ref in inputs), *vectors)
            return [total + value for total, value in zip(totals, values, strict=True)]

        start = [jnp.zeros((rows_at_once, _CHANNELS), jnp.float32)] * results
        for i, total in enumerate(jax.lax.fori_loop(0, steps, add, start)):
            out[i, :] = total.sum(0)

    picture = pl.BlockSpec((None, steps * rows_at_once, _CHANNELS), lambda i, j, k: (i, k, j))
    row = pl.BlockSpec((None, _CHANNELS), lambda i, j, k: (i, j))
    sums = pl.pallas_call(
        kernel,
        grid=(b, c // _CHANNELS, parts),
        in_specs=[picture] * len(arrays) + [row] * len(rows),
        out_specs=pl.BlockSpec((None, None, results, _CHANNELS), lambda i, j, k: (i, k, 0, j)),
        out_shape=jax.ShapeDtypeStruct((b, parts, results, c), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
        name=function.__name__.strip("_"),
    )(*arrays, *rows)
    total = sums.sum(1)  # [B, results, C]
    return [total[:, i] for i in range(results)]


def _group_mean(x: Float[Array, "B C"], groups: int) -> Float[Array, "B C"]:
    """Replace the value of each channel by the mean of its group."""
    b, c = x.shape
    return jnp.repeat(x.reshape(b, groups, c // groups).mean(-1), c // groups, axis=1)
