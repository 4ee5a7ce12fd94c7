"""Layers shared by the networks: norms, convolutions and linear layers with torch's initialisation.

Channels come last. Shapes: B batch, S spatial axes, C channels.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from diffusion_jax.nn import ops
from diffusion_jax.nn.attention import ATTENTION

Padding = tuple[int, int]
PRODUCT = "product"
"""The checkpoint_name of the outputs of convolutions and linear layers."""
_POLICIES = jax.checkpoint_policies
KEEPS: Mapping[str, Callable[..., Any]] = {
    "nothing": _POLICIES.nothing_saveable,
    "attention": _POLICIES.save_only_these_names(ATTENTION),
    "products": _POLICIES.save_only_these_names(ATTENTION, PRODUCT),
    "offloaded": _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[ATTENTION, PRODUCT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""Policies of nn.remat: the values that a block stores for the backward pass besides its inputs.

"nothing" stores no further values. "attention" stores attention outputs. "products" also stores the
outputs of convolutions and linear layers, so that only norms and activations are recomputed.
"offloaded" stores the same values as "products", but in host memory.
"""


def with_remat(block: type[nn.Module], remat: bool, keeps: str) -> type[nn.Module]:
    """Return `block`, wrapped in nn.remat if `remat` is True.

    `keeps`, a key of KEEPS, selects the outputs that are stored instead of recomputed.
    """
    return nn.remat(block, policy=KEEPS[keeps]) if remat else block


class GroupNorm(nn.Module):
    """Group normalisation with a learned weight and bias, and optionally SiLU."""

    groups: int = 32
    eps: float = 1e-5
    silu: bool = False
    """Whether to apply SiLU after the norm, in the same operation."""

    @nn.compact
    def __call__(self, x: Float[Array, "B *S C"], scale=None, shift=None) -> Float[Array, "B *S C"]:
        """Normalise x. If scale and shift, [B, C] each, are given, also apply them.

        The normalised x is then multiplied by 1 + scale, and shift is added.
        """
        weight = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        kind = {"groups": self.groups, "eps": self.eps, "silu": self.silu}
        return ops.group_norm(x, weight, bias, scale, shift, **kind)


def dropout(
    x: Float[Array, "B *S C"], rate: float, keys: Key[Array, "B"] | None, path: tuple[str, ...]
) -> Float[Array, "B *S C"]:
    """Set values to 0 with probability `rate`, and divide the others by 1 - rate.

    `keys` is one key per image; with None, x is returned unchanged. `path` is the path of the
    module that calls this function, from which each module gets random numbers of its own.
    """
    if keys is None or not rate:
        return x
    number = zlib.crc32("/".join(path).encode()) & 0x7FFFFFFF
    keep = lambda key: jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, x.shape[1:])
    return jnp.where(jax.vmap(keep)(keys), x / (1 - rate), 0)


def uniform(fan_in: int) -> nn.initializers.Initializer:
    """Return torch's default initializer of kernels and biases: U(-1, 1) / sqrt(fan_in)."""
    limit = fan_in**-0.5
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -limit, limit)


def layer_norm(x: Float[Array, "*B C"], name: str = "norm", *, dtype: DTypeLike) -> Float[Array, "*B C"]:
    """Apply layer norm with torch's epsilon and a variance that is accurate at large means."""
    norm = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, dtype=dtype, name=name)
    return norm(x)


def dense(
    x: Float[Array, "*B C"], width: int, name: str, *, zero: bool = False, bias: bool = True, dtype: DTypeLike
) -> Float[Array, "*B {width}"]:
    """Apply a linear layer, which is also a 1x1 convolution.

    With `zero`, its kernel and bias start at zero.
    """
    init = nn.initializers.zeros if zero else uniform(x.shape[-1])
    return _Affine((x.shape[-1], width), init, bias, dtype, name=name)(x, ops.linear)


def geglu(x: Float[Array, "*B C"], width: int, name: str, *, dtype: DTypeLike) -> Float[Array, "*B {width}"]:
    """Apply a linear layer with 2 * width outputs, and gate its first half by the second.

    The gate is an exact GELU (GEGLU, Shazeer 2020).
    """
    layer = _Affine((x.shape[-1], 2 * width), uniform(x.shape[-1]), True, dtype, name=name)
    return layer(x, ops.geglu)


class ToHeads(nn.Module):
    """Linear layer that returns `parts` arrays of attention heads, such as q, k and v.

    In the usual form:

        out = dense(x)  # [B, T, parts * N * K]
        q, k, v = out.reshape(B, T, parts, N, K).unstack(axis=2)

    Here each part is a separate product that has the heads as an axis. So a TPU copies neither the
    results nor the gradients of the results.
    """

    parts: int
    num_heads: int
    head_dim: int
    bias: bool = True
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T C"]) -> list[Float[Array, "B T N K"]]:
        """Return `parts` arrays of N heads with K channels each."""
        c, heads = x.shape[-1], (self.parts, self.num_heads, self.head_dim)
        kernel = self.param("kernel", uniform(c), (c, math.prod(heads))).astype(self.dtype)
        x, kernel = x.astype(self.dtype), kernel.reshape(c, *heads)  # [C, parts, N, K]
        out = [ops.tensordot(x, kernel[:, i]) for i in range(self.parts)]  # [B, T, N, K] each
        if self.bias:
            bias = self.param("bias", uniform(c), (math.prod(heads),)).reshape(heads)
            out = [ops.add_broadcast(y, b) for y, b in zip(out, bias, strict=True)]
        return [checkpoint_name(y, PRODUCT) for y in out]


class FromHeads(nn.Module):
    """Linear layer after attention, over all heads at once.

    In the usual form: dense(x.reshape(B, T, N * K)). Here the heads stay an axis, so that a TPU
    does not copy the inputs. With `zero`, the kernel and bias start at zero.
    """

    width: int
    zero: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T N K"]) -> Float[Array, "B T {self.width}"]:
        """Return one vector of `width` channels per token."""
        n, k = x.shape[2:]
        init = nn.initializers.zeros if self.zero else uniform(n * k)
        kernel = self.param("kernel", init, (n * k, self.width)).astype(self.dtype)
        kernel = kernel.reshape(n, k, self.width)  # [N, K, width]
        out = ops.tensordot(x.astype(self.dtype), kernel, axes=2)  # [B, T, width]
        bias = self.param("bias", init, (self.width,))
        return checkpoint_name(ops.add_broadcast(out, bias), PRODUCT)


def conv(
    x: Float[Array, "B H W C"],
    width: int,
    name: str,
    *,
    kernel: int,
    stride: int = 1,
    padding: Padding | None = None,
    zero: bool = False,
    dtype: DTypeLike,
) -> Float[Array, "B _ _ {width}"]:
    """Apply a convolution. With `zero`, its kernel and bias start at zero.

    By default, kernel // 2 pixels are padded on each side, as is usual in torch. `padding` is a
    pair (before, after) of other amounts, for both rows and columns. Padding "SAME" is not used,
    because it pads strided convolutions differently.
    """
    init = nn.initializers.zeros if zero else uniform(kernel**2 * x.shape[-1])
    sides = (kernel // 2, kernel // 2) if padding is None else padding
    strides, pads = (stride, stride), (sides, sides)
    convolve = lambda x, w, b: ops.add_broadcast(ops.convolution(x, w, strides, pads), b)
    shape = (kernel, kernel, x.shape[-1], width)
    return _Affine(shape, init, True, dtype, name=name)(x, convolve)


class _Affine(nn.Module):
    """A layer that creates a kernel and an optional bias, and calls a function with them."""

    shape: tuple[int, ...]
    initializer: nn.initializers.Initializer
    use_bias: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Array, function: Callable[[Array, Array, Any], Any]) -> Any:
        """Return function(x, kernel, bias). The bias, None without `use_bias`, stays float32."""
        kernel = self.param("kernel", self.initializer, self.shape).astype(self.dtype)
        bias = self.param("bias", self.initializer, self.shape[-1:]) if self.use_bias else None
        return checkpoint_name(function(x.astype(self.dtype), kernel, bias), PRODUCT)


def blocks_per_level(num_res_blocks: int | Sequence[int], levels: int) -> tuple[int, ...]:
    """Return the number of residual blocks at each level of a UNet.

    A single number applies to every level. Raises ValueError for another number of entries.
    """
    blocks = (num_res_blocks,) * levels if isinstance(num_res_blocks, int) else num_res_blocks
    if len(blocks) != levels:
        raise ValueError(
            f"unet.num_res_blocks {tuple(blocks)} has {len(blocks)} entries, but unet.channel_mult "
            f"has {levels} levels: give one entry per level, or a single number"
        )
    return tuple(blocks)
