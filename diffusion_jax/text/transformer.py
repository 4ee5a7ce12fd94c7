"""Define a linear layer and attention for the frozen networks of text encoders.

The residual stream, norms and softmax are float32 for every compute type, and bf16 matrix products
accumulate in float32. This is necessary because T5's residual stream has values of tens of
thousands. At this size, neighbouring bf16 values are up to 256 apart, and float16 overflows.
"""

from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # OpenAI's CLIP.
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}


class Linear(nn.Module):
    """Linear layer, computed in `dtype` with float32 accumulation. The output is float32."""

    features: int
    bias: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B {self.features}"]:
        """Return x @ kernel, plus the bias if there is one. The kernel is cast to `dtype`."""
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        y = jnp.einsum(
            "...i,io->...o", x.astype(self.dtype), kernel.astype(self.dtype), preferred_element_type=jnp.float32
        )
        if self.bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,)).astype(jnp.float32)
        return y


class Attention(nn.Module):
    """Self-attention. The layers of q, k and v have the names `names`, and all have biases."""

    num_heads: int
    dtype: DTypeLike
    names: Sequence[str] = ("q", "k", "v")

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"], bias: Array | None) -> Float[Array, "B L D"]:
        """Return the output of attention. `bias`, which broadcasts, is added to the logits."""
        b, length, width = x.shape
        head = width // self.num_heads
        linear = lambda name: Linear(width, True, self.dtype, name=name)
        split = lambda y: y.reshape(b, length, self.num_heads, head)
        q, k, v = (split(linear(name)(x)) for name in self.names)  # each [B, L, N, K]
        return linear("out")(attend(q, k, v, bias, scale=head**-0.5, dtype=self.dtype))


class Mlp(nn.Module):
    """Feed-forward layer with one hidden layer of `width` channels."""

    width: int
    activation: str
    dtype: DTypeLike
    names: tuple[str, str] = ("fc1", "fc2")

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Return the output of the second linear layer."""
        first, second = self.names
        h = ACTIVATIONS[self.activation](Linear(self.width, True, self.dtype, name=first)(x))
        return Linear(x.shape[-1], True, self.dtype, name=second)(h)


def attend(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    bias: Float[Array, "#B #N #T #S"] | None,
    *,
    scale: float,
    dtype: DTypeLike,
) -> Float[Array, "B T N*K"]:
    """Return softmax(scale * q k^T + bias) v, with the heads concatenated."""
    b, t, n, head = q.shape
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    logits = jnp.einsum("btnk,bsnk->bnts", q, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(logits if bias is None else logits + bias, axis=-1)  # [B, N, T, S]
    out = jnp.einsum("bnts,bsnk->btnk", weights.astype(dtype), v)  # [B, T, N, K]
    return out.reshape(b, t, n * head)


def mask_bias(mask: Array) -> Float[Array, "..."]:
    """Return a bias for attention logits: 0 where the mask is nonzero, else the lowest float32.

    With -inf, the softmax of a fully masked row would be NaN. With the lowest finite float32,
    attention averages over all keys of such a row, as in torch.
    """
    return jnp.where(mask != 0, 0.0, jnp.finfo(jnp.float32).min)
