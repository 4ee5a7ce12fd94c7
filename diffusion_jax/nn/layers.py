"""Layers that the networks share: norms, convolutions and linear layers, as torch starts them.

Channels last; B batch, C channels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffusion_jax.nn import ops
from diffusion_jax.nn.attention import KEPT

Padding = tuple[int, int]
PRODUCT = "product"
"""The name, for KEEPS, of what convolutions and linear layers give."""
_POLICIES = jax.checkpoint_policies
KEEPS: Mapping[str, Callable[..., Any]] = {
    "nothing": _POLICIES.nothing_saveable,
    "attention": _POLICIES.save_only_these_names(KEPT),
    "products": _POLICIES.save_only_these_names(KEPT, PRODUCT),
    "offloaded": _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[KEPT, PRODUCT],
        offload_src="device", offload_dst="pinned_host",
    ),
}  # fmt: skip
"""What of its forward pass a block with remat keeps for the backward one, beside its inputs.

What attention gives; also what convolutions and linear layers give, so that only norms and
activations are computed again; the same in the memory of the host.
"""


def with_remat(block: type[nn.Module], remat: bool, keeps: str) -> type[nn.Module]:
    """The block, which the gradient computes again but for what `keeps`, in KEEPS, names."""
    return nn.remat(block, policy=KEEPS[keeps]) if remat else block


class GroupNorm(nn.Module):
    """Group normalisation by ops.group_norm, with its learned weight and bias."""

    groups: int = 32
    eps: float = 1e-5
    silu: bool = False
    """Whether SiLU follows, in one operation."""

    @nn.compact
    def __call__(self, x: Float[Array, "B *S C"], scale=None, shift=None) -> Float[Array, "B *S C"]:
        """`scale` and `shift`, [B, C], modulate the normalised x."""
        weight = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        kind = {"groups": self.groups, "eps": self.eps, "silu": self.silu}
        return ops.group_norm(x, weight, bias, scale, shift, **kind)


def uniform(fan_in: int) -> nn.initializers.Initializer:
    """torch's default for kernels and biases: U(-1, 1) / sqrt(fan_in)."""
    limit = fan_in**-0.5
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(
        key, shape, dtype, -limit, limit
    )


def layer_norm(
    x: Float[Array, "*B C"], name: str = "norm", *, dtype: DTypeLike
) -> Float[Array, "*B C"]:
    """Layer norm with torch's epsilon, and a variance that does not cancel at large means."""
    norm = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, dtype=dtype, name=name)
    return norm(x)


def dense(
    x: Float[Array, "*B C"],
    width: int,
    name: str,
    *,
    zero: bool = False,
    bias: bool = True,
    dtype: DTypeLike,
) -> Float[Array, "*B {width}"]:
    """A linear layer, or a 1x1 convolution; `zero`: it starts at zero."""
    init = nn.initializers.zeros if zero else uniform(x.shape[-1])
    kind = {"kernel_init": init, "bias_init": init, "dtype": dtype, "promote_dtype": _promoted}
    product = lambda x, kernel, *_, **__: ops.tensordot(x, kernel)
    out = nn.Dense(width, use_bias=bias, name=name, dot_general=product, **kind)(x).astype(dtype)
    return checkpoint_name(out, PRODUCT)


class ToHeads(nn.Module):
    """`parts` arrays of attention's heads, such as q, k and v: `dense`, then a reshape.

    With the heads as an axis of the product a TPU copies neither the results nor their gradients.
    """

    parts: int
    num_heads: int
    head_dim: int
    bias: bool = True
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T C"]) -> list[Float[Array, "B T N K"]]:
        """N heads, K their width."""
        c, heads = x.shape[-1], (self.parts, self.num_heads, self.head_dim)
        kernel = self.param("kernel", uniform(c), (c, math.prod(heads))).astype(self.dtype)
        x, kernel = x.astype(self.dtype), kernel.reshape(c, *heads)
        out = [ops.tensordot(x, kernel[:, i]) for i in range(self.parts)]  # [B, T, N, K]
        if self.bias:
            bias = self.param("bias", uniform(c), (math.prod(heads),)).reshape(heads)
            out = [ops.add_broadcast(y, b) for y, b in zip(out, bias, strict=True)]
        return [checkpoint_name(y, PRODUCT) for y in out]


class FromHeads(nn.Module):
    """The linear layer after attention, of all heads together; `zero`: it starts at zero."""

    width: int
    zero: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T N K"]) -> Float[Array, "B T {self.width}"]:
        """See ToHeads."""
        n, k = x.shape[2:]
        init = nn.initializers.zeros if self.zero else uniform(n * k)
        kernel = self.param("kernel", init, (n * k, self.width)).astype(self.dtype)
        out = ops.tensordot(x.astype(self.dtype), kernel.reshape(n, k, self.width), axes=2)
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
    """A convolution padded by kernel // 2, or by `padding` (before, after) of rows and columns.

    Not "SAME", which pads strided convolutions unlike torch.
    """
    init = nn.initializers.zeros if zero else uniform(kernel**2 * x.shape[-1])
    out = nn.Conv(
        width,
        (kernel, kernel),
        strides=stride,
        padding=kernel // 2 if padding is None else (padding, padding),
        kernel_init=init,
        bias_init=init,
        dtype=dtype,
        promote_dtype=_promoted,
        conv_general_dilated=ops.convolution,
        name=name,
    )(x).astype(dtype)
    return checkpoint_name(out, PRODUCT)


def _promoted(*arrays: Array | None, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """flax's promote_dtype, but for the bias: in float32, for the reason of ops.add_broadcast."""
    *rest, bias = arrays
    return [*promote_dtype(*rest, dtype=dtype, inexact=inexact), bias]


def blocks_per_level(num_res_blocks: int | Sequence[int], levels: int) -> tuple[int, ...]:
    """A UNet's `num_res_blocks` written out: one number a level, where one may stand for all."""
    return (num_res_blocks,) * levels if isinstance(num_res_blocks, int) else tuple(num_res_blocks)
