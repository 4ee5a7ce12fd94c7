"""Conditioning of NeMo's UNets: the time, the text, how noisy the low-res image is.

B batch, L text tokens, D their width, E = 4 unet.embed_dim time embedding.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from diffusion_jax.config import named
from diffusion_jax.nn import ops
from diffusion_jax.nn.attention import counts_keys, valid_first
from diffusion_jax.nn.layers import dense, layer_norm
from imagen_jax.layers import bicubic_upsample

POOLING = ("attention", "mean")


@runtime_checkable
class Pictured(Protocol):
    """The fields of a UNet that say which pictures it takes."""

    image_size: int
    noise_aug: bool

    @property
    def low_res(self) -> bool:
        """Whether it sees a low-res image."""
        ...


@runtime_checkable
class Conditioned(Pictured, Protocol):
    """Also those that say how NeMo's are conditioned."""

    embed_dim: int
    text_pooling: str
    learned_time_dim: int
    null_token: bool
    attention_impl: str
    dtype: DTypeLike
    param: Callable


def condition(
    unet: Conditioned,
    time: Float[Array, "B"],
    text: Float[Array, "B L D"],
    text_mask: Bool[Array, "B L"],
    low_res_time: Float[Array, "B"] | None,
    cond_dim: int,
) -> tuple[Float[Array, "B E"], Float[Array, "B T {cond_dim}"], Bool[Array, "B T"]]:
    """The embedding that residual blocks see, the context of attention, and its mask.

    T is L, or one more with a null token. The parameters are those of `unet`, from whose
    `__call__` this is called.
    """
    embed = lambda name: TimeEmbed(unet.embed_dim, unet.learned_time_dim, unet.dtype, name=name)
    emb = embed("time_embed")(time)  # [B, E]
    if unet.noise_aug:
        emb += embed("low_res_time_embed")(given(low_res_time, "low_res_time", "noise_aug"))
    text = text.astype(unet.dtype)
    context = dense(text, cond_dim, "text_to_cond", dtype=unet.dtype)  # [B, L, cond_dim]
    if unet.text_pooling == "attention":
        pooled = AttentionPool(cond_dim, unet.dtype, name="text_pool")(text)  # [B, cond_dim]
    else:
        pooled = context.mean(axis=1)
    emb += TextEmbed(4 * unet.embed_dim, unet.dtype, name="text_embed")(pooled)
    if unet.null_token:
        token = unet.param("null_token", nn.initializers.normal(1.0), (1, 1, cond_dim))
        token = jnp.broadcast_to(token.astype(unet.dtype), (len(context), 1, cond_dim))
        context = jnp.concatenate([context, token], axis=1)  # [B, L + 1, cond_dim]
        text_mask = jnp.pad(text_mask, ((0, 0), (0, 1)), constant_values=True)
    if counts_keys(unet.attention_impl):  # The order of tokens changes nothing else.
        context, text_mask = valid_first(context, text_mask)
    return emb, context, text_mask


def with_low_res(
    x: Float[Array, "B H W 3"], low_res: Float[Array, "B _ _ 3"] | None
) -> Float[Array, "B H W 6"]:
    """The low-res image, enlarged to the size of x, as further channels."""
    low_res = given(low_res, "low_res", "low_res").astype(x.dtype)
    return jnp.concatenate([x, bicubic_upsample(low_res, *x.shape[1:3])], axis=-1)


def given(value: Array | None, name: str, field: str) -> Array:
    """The value of an argument that a field asks for; ValueError if it is not given."""
    if value is None:
        raise ValueError(f"a UNet with {field}=True must be given {name}")
    return value


def example_inputs(unet: Pictured, text_width: int) -> dict[str, Any]:
    """Zeros in the shapes that `unet` takes, for one image and one token."""
    image = jnp.zeros((1, unet.image_size, unet.image_size, 3))
    inputs = {
        "x": image,
        "time": jnp.zeros(1),
        "text": jnp.zeros((1, 1, text_width)),
        "text_mask": jnp.ones((1, 1), bool),
    }
    if unet.low_res:
        inputs["low_res"] = image
    if unet.noise_aug:
        inputs["low_res_time"] = jnp.zeros(1)
    return inputs


def check_conditioning(unet: Conditioned) -> None:
    """ValueError for fields that do not go together."""
    named.one_of("unet.text_pooling", unet.text_pooling, POOLING)
    if unet.learned_time_dim % 2 or unet.learned_time_dim < 0:
        raise ValueError(
            f"unet.learned_time_dim {unet.learned_time_dim} must be even, or 0 for none"
        )
    check_low_res(unet)


def check_low_res(unet: Pictured) -> None:
    """ValueError for noise on an image that there is not."""
    if unet.noise_aug and not unet.low_res:
        raise ValueError(
            "unet.noise_aug needs unet.low_res=True: there is no image to add noise to"
        )


class TimeEmbed(nn.Module):
    """Sinusoids of the time, fixed or learned, through two layers to 4 * width."""

    width: int
    learned_dim: int = 0
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, time: Float[Array, "B"]):
        """Returns [B, 4 * width]."""
        time = time.astype(jnp.float32)
        if self.learned_dim:
            shape = (self.learned_dim // 2,)
            frequencies = self.param("frequencies", nn.initializers.normal(1.0), shape)
            angles = 2 * jnp.pi * time[:, None] * frequencies  # [B, learned_dim / 2]
            h = jnp.concatenate([time[:, None], jnp.sin(angles), jnp.cos(angles)], axis=1)
        else:
            h = ops.sinusoid(time, self.width)
        h = nn.silu(dense(h, 4 * self.width, "dense1", dtype=self.dtype))
        return dense(h, 4 * self.width, "dense2", dtype=self.dtype)


class AttentionPool(nn.Module):
    """One vector for a text: a weighted mean over its tokens.

    The weights' softmax runs over all positions, padding included, as NeMo's does, so results
    depend on the padded length.
    """

    width: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, text: Float[Array, "B L D"]):
        """Returns [B, width]."""
        scores = dense(text, 1, "score", dtype=self.dtype).astype(jnp.float32)
        weights = jax.nn.softmax(scores, axis=1)  # [B, L, 1], float32
        pooled = layer_norm((weights * text).sum(1), dtype=self.dtype)  # [B, D]
        return dense(pooled, self.width, "out", dtype=self.dtype)


class TextEmbed(nn.Module):
    """The pooled text on its way to the time embedding that it is added to."""

    width: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, pooled: Float[Array, "B D"]):
        """Returns [B, width]."""
        h = layer_norm(pooled, dtype=self.dtype)
        h = nn.silu(dense(h, self.width, "dense1", dtype=self.dtype))
        return dense(h, self.width, "dense2", dtype=self.dtype)
