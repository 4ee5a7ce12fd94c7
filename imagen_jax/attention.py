"""Attention blocks of Imagen's UNets: pixels attend to pixels, to text, or to both.

Images are NHWC. In the shapes, B is the batch size, H and W are the height and width, and C is the
number of channels. There are L text tokens of width D, and N attention heads of width K.
"""

from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffusion_jax.config import named
from diffusion_jax.nn.attention import IMPLEMENTATIONS, attend
from diffusion_jax.nn.layers import FromHeads, GroupNorm, ToHeads, dense


class SelfAttention(nn.Module):
    """Attention from pixels to pixels."""

    head_dim: int
    implementation: str = "auto"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], context=None, text_mask=None):
        """Return x plus the output of attention. `context` and `text_mask` have no effect."""
        del context, text_mask
        tokens = _tokens(x)  # [B, HW, C]
        q, k, v = _heads(self, GroupNorm(name="norm")(tokens), 3, x, "qkv")  # [B, HW, N, K] each
        out = attend(q, k, v, implementation=self.implementation)  # [B, HW, N, K]
        return x + _out(self, out, x)


class CrossAttention(nn.Module):
    """Attention from pixels to text tokens."""

    head_dim: int
    implementation: str = "auto"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], context: Float[Array, "B L D"], text_mask):
        """Return x plus the output of attention.

        If the text is empty, that output is only the bias of the output layer.
        """
        (q,) = _heads(self, GroupNorm(name="norm")(_tokens(x)), 1, x, "q")  # [B, HW, N, K]
        # [B, L, N, K] each
        k, v = _heads(self, GroupNorm(name="norm_context")(context), 2, x, "kv")
        out = attend(q, k, v, text_mask, implementation=self.implementation)  # [B, HW, N, K]
        return x + _out(self, out, x)


class FusedAttention(nn.Module):
    """Attention from pixels to pixels and text tokens in one softmax."""

    head_dim: int
    implementation: str = "auto"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], context: Float[Array, "B L D"], text_mask):
        """Return x plus the output of attention.

        The queries and the keys and values of the pixels are computed after two different norms.
        """
        tokens = _tokens(x)  # [B, HW, C]
        (q,) = _heads(self, GroupNorm(name="norm")(tokens), 1, x, "q")  # [B, HW, N, K]
        # k and v: [B, HW, N, K] each from the pixels, [B, L, N, K] each from the text.
        pixels = _heads(self, GroupNorm(name="norm_self")(tokens), 2, x, "kv_self")
        text = _heads(self, GroupNorm(name="norm_context")(context), 2, x, "kv_context")
        pairs = zip(pixels, text, strict=True)
        k, v = (jnp.concatenate(pair, axis=1) for pair in pairs)  # [B, HW + L, N, K]
        out = attend(q, k, v, text_mask, implementation=self.implementation)  # [B, HW, N, K]
        return x + _out(self, out, x)


class StackedAttention(nn.Module):
    """Transformer block: self-attention, cross-attention and a gated feed-forward layer."""

    head_dim: int
    implementation: str = "auto"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], context: Float[Array, "B L D"], text_mask):
        """Return x plus the output of the block. Its three inner layers are also residual."""
        c = x.shape[-1]
        fields = (self.head_dim, self.implementation, self.dtype)
        h = dense(GroupNorm(name="norm")(x), c, "in", dtype=self.dtype)  # [B, H, W, C]
        h = SelfAttention(*fields, name="self")(h)
        h = CrossAttention(*fields, name="cross")(h, context, text_mask)
        gated = dense(GroupNorm(name="ff_norm")(h), 8 * c, "ff_in", dtype=self.dtype)
        value, gate = jnp.split(gated, 2, axis=-1)  # [B, H, W, 4 C] each
        gate = nn.gelu(gate, approximate=False)
        h = h + dense(value * gate, c, "ff_out", dtype=self.dtype)  # [B, H, W, C]
        return x + dense(h, c, "out", zero=True, dtype=self.dtype)


BLOCKS = {"fused": FusedAttention, "stacked": StackedAttention, "self": SelfAttention, "cross": CrossAttention}


def check_attention(kind: str, implementation: str, dtype: DTypeLike, head_dim: int) -> None:
    """Raise ValueError if attention cannot be built from these fields of a UNet.

    `kind` is the UNet's field `attention`, a key of BLOCKS.
    """
    named.one_of("unet.attention", kind, BLOCKS)
    check_implementation(implementation, dtype, head_dim)


def check_implementation(implementation: str, dtype: DTypeLike, head_dim: int) -> None:
    """Raise ValueError if the attention implementation is unknown or cannot run with these fields.

    "cudnn" needs a 16-bit dtype, and a `head_dim` that is a multiple of 8 up to 128.
    """
    named.one_of("unet.attention_impl", implementation, IMPLEMENTATIONS)
    if implementation == "cudnn" and (jnp.dtype(dtype).itemsize != 2 or head_dim % 8 or head_dim > 128):
        raise ValueError(
            f"unet.attention_impl is 'cudnn', which needs a 16-bit unet.dtype and heads of width "
            f"8, 16, ... or 128, but unet.dtype is {jnp.dtype(dtype).name} and the heads have "
            f"width {head_dim}: change these, or set unet.attention_impl='xla'"
        )


def check_heads(widths: Iterable[int], head_dim: int) -> None:
    """Raise ValueError unless `head_dim` divides the width of every level with attention."""
    for width in widths:
        if head_dim < 1 or width % head_dim:
            raise ValueError(
                f"unet.head_dim {head_dim} does not divide the width {width} of a level with "
                "attention: choose a divisor of this width"
            )


def _tokens(x: Array) -> Array:
    """Reshape [B, H, W, C] to [B, HW, C].

    Call this before the norm, not after it, because the TPU compiler then makes fewer copies.
    """
    return x.reshape(len(x), -1, x.shape[-1])


def _heads(block: Any, normed: Array, parts: int, x: Array, name: str) -> list[Array]:
    """Map T tokens, [B, T, D], to a list of `parts` arrays of heads, [B, T, N, K] each.

    The layer `name` of `block` computes them. N * K is the number of channels of x.
    """
    num_heads = x.shape[-1] // block.head_dim
    layer = ToHeads(parts, num_heads, block.head_dim, dtype=block.dtype, name=name)
    return layer(normed)


def _out(block: Any, out: Array, x: Array) -> Array:
    """Map attention's output [B, HW, N, K] to [B, H, W, C] with a layer initialised to zero."""
    layer = FromHeads(x.shape[-1], zero=True, dtype=block.dtype, name="out")
    return layer(out).reshape(x.shape)
