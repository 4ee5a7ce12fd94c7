"""Attention blocks of Imagen's UNets: pixels attend to pixels, to text, or to both.

NHWC; B batch, H W pixels, C channels, L text tokens, D their width, N heads, K their width.
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
    """Pixels attend to pixels."""

    head_dim: int
    implementation: str = "auto"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], context=None, text_mask=None):
        """Ignores the text, which the other kinds take in its place."""
        del context, text_mask
        tokens = _tokens(x)
        q, k, v = _heads(self, GroupNorm(name="norm")(tokens), 3, x, "qkv")  # 3 of [B, HW, N, K]
        out = attend(q, k, v, implementation=self.implementation)  # [B, HW, N, K]
        return x + _out(self, out, x)


class CrossAttention(nn.Module):
    """Pixels attend to text tokens."""

    head_dim: int
    implementation: str = "auto"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], context: Float[Array, "B L D"], text_mask):
        """A text without tokens adds nothing but the bias of the output."""
        (q,) = _heads(self, GroupNorm(name="norm")(_tokens(x)), 1, x, "q")  # [B, HW, N, K]
        k, v = _heads(self, GroupNorm(name="norm_context")(context), 2, x, "kv")  # [B, L, N, K]
        out = attend(q, k, v, text_mask, implementation=self.implementation)  # [B, HW, N, K]
        return x + _out(self, out, x)


class FusedAttention(nn.Module):
    """Pixels attend to pixels and text tokens in one softmax."""

    head_dim: int
    implementation: str = "auto"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], context: Float[Array, "B L D"], text_mask):
        """The pixels are keys through a norm of their own, "norm_self"."""
        tokens = _tokens(x)
        (q,) = _heads(self, GroupNorm(name="norm")(tokens), 1, x, "q")  # [B, HW, N, K]
        pixels = _heads(self, GroupNorm(name="norm_self")(tokens), 2, x, "kv_self")  # 2 of the same
        text = _heads(self, GroupNorm(name="norm_context")(context), 2, x, "kv_context")
        pairs = zip(pixels, text, strict=True)
        k, v = (jnp.concatenate(pair, axis=1) for pair in pairs)  # [B, HW + L, N, K]
        out = attend(q, k, v, text_mask, implementation=self.implementation)  # [B, HW, N, K]
        return x + _out(self, out, x)


class StackedAttention(nn.Module):
    """Self-attention, cross-attention and a gated feed-forward layer: a transformer block."""

    head_dim: int
    implementation: str = "auto"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], context: Float[Array, "B L D"], text_mask):
        """Each of the three adds to its input, and the whole to x."""
        c = x.shape[-1]
        kind = (self.head_dim, self.implementation, self.dtype)
        h = dense(GroupNorm(name="norm")(x), c, "in", dtype=self.dtype)  # [B, H, W, C]
        h = SelfAttention(*kind, name="self")(h)
        h = CrossAttention(*kind, name="cross")(h, context, text_mask)
        gated = dense(GroupNorm(name="ff_norm")(h), 8 * c, "ff_in", dtype=self.dtype)
        value, gate = jnp.split(gated, 2, axis=-1)  # Each [B, H, W, 4 C]
        gate = nn.gelu(gate, approximate=False)
        h = h + dense(value * gate, c, "ff_out", dtype=self.dtype)
        return x + dense(h, c, "out", zero=True, dtype=self.dtype)


BLOCKS = {
    "fused": FusedAttention,
    "stacked": StackedAttention,
    "self": SelfAttention,
    "cross": CrossAttention,
}


def check_attention(kind: str, implementation: str, dtype: DTypeLike, head_dim: int) -> None:
    """ValueError for fields of which no attention can be made."""
    named.one_of("unet.attention", kind, BLOCKS)
    named.one_of("unet.attention_impl", implementation, IMPLEMENTATIONS)
    if implementation == "cudnn" and (
        jnp.dtype(dtype).itemsize != 2 or head_dim % 8 or head_dim > 128
    ):
        raise ValueError(
            f"unet.attention_impl 'cudnn' is for 16-bit dtypes and head_dim in multiples of 8 up "
            f"to 128, not for {jnp.dtype(dtype).name} and {head_dim}: change these, or take 'xla'"
        )


def check_heads(widths: Iterable[int], head_dim: int) -> None:
    """ValueError unless heads of `head_dim` fill each of the widths that have attention."""
    for width in widths:
        if head_dim < 1 or width % head_dim:
            raise ValueError(
                f"unet.head_dim {head_dim} does not divide the width {width} of a level with "
                "attention: choose a head_dim that does"
            )


def _tokens(x: Array) -> Array:
    """[B, H, W, C] -> [B, HW, C], before a norm: so a TPU's compiler copies less than after it."""
    return x.reshape(len(x), -1, x.shape[-1])


def _heads(block: Any, normed: Array, parts: int, x: Array, name: str) -> list[Array]:
    """`parts` arrays [B, tokens, N, K] of [B, tokens, D], as many heads as fill the width of x."""
    num_heads = x.shape[-1] // block.head_dim
    layer = ToHeads(parts, num_heads, block.head_dim, dtype=block.dtype, name=name)
    return layer(normed)


def _out(block: Any, out: Array, x: Array) -> Array:
    """[B, HW, N, K] -> [B, H, W, C], starting at zero."""
    layer = FromHeads(x.shape[-1], zero=True, dtype=block.dtype, name="out")
    return layer(out).reshape(x.shape)
