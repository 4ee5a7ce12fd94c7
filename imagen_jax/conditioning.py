"""How NeMo's UNets are conditioned on the time, the text and the low-resolution image.

In the shapes, B is the batch size, L the number of text tokens, D the width of the text tokens, and
E = 4 * unet.embed_dim the width of the time embedding.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from diffusion_jax.config import named
from diffusion_jax.config.ranges import WholeNumber, Width
from diffusion_jax.nn import ops
from diffusion_jax.nn.attention import counts_keys, valid_first
from diffusion_jax.nn.layers import dense, layer_norm
from diffusion_jax.nn.picture_fields import with_fields
from imagen_jax.attention import BLOCKS
from imagen_jax.layers import Network, bicubic_upsample

POOLING = ("attention", "mean")


class Conditioned(Network):
    """Base class of NeMo's UNets, with the fields that they share."""

    embed_dim: Width = 256
    """Number of channels of a level whose channel_mult is 1. The embedding of the time is four
    times as wide."""
    attention: Annotated[str, BLOCKS] = "fused"
    """What pixels attend to: pixels and text at once ("fused"), pixels, then text, then a
    feed-forward layer ("stacked"), only pixels ("self"), or only text ("cross")."""
    text_pooling: Annotated[str, POOLING] = "attention"
    """How the tokens of a text become one vector for the residual blocks: their learned weighted
    mean ("attention") or their plain mean ("mean")."""
    learned_time_dim: WholeNumber = 0
    """Number of learned sinusoids that embed the time; it must be even. If it is 0, the sinusoids
    are fixed."""
    null_token: bool = False
    """Whether to add one learned token to every text."""
    scale_shift: bool = True
    """Whether the time and the text scale and shift the activations of a residual block (True), or
    are only added to them (False)."""


def condition(
    unet: Conditioned,
    time: Float[Array, "B"],
    text: Float[Array, "B L D"],
    text_mask: Bool[Array, "B L"],
    low_res_time: Float[Array, "B"] | None,
    cond_dim: int,
    fields: Mapping[str, Float[Array, "B 2"]],
) -> tuple[Float[Array, "B E"], Float[Array, "B T {cond_dim}"], Bool[Array, "B T"]]:
    """Embed the time, the text and the fields. Return (embedding, context, mask).

    Residual blocks use the embedding. Attention uses the context of T tokens: the L tokens of the
    text, and the null token if there is one. The mask is True at the valid tokens of the context.
    If `unet` sees a noisy low-resolution image, `low_res_time` (the c_noise of this noise) is part
    of the embedding. Call this function in the `__call__` of `unet`, so that the parameters belong
    to `unet`.
    """
    embed = lambda name: TimeEmbed(unet.embed_dim, unet.learned_time_dim, unet.dtype, name=name)
    emb = embed("time_embed")(time)  # [B, E]
    if unet.noise_aug:
        emb += embed("low_res_time_embed")(required(low_res_time, "low_res_time", "noise_aug"))
    text = text.astype(unet.dtype)
    context = dense(text, cond_dim, "text_to_cond", dtype=unet.dtype)  # [B, L, cond_dim]
    if unet.text_pooling == "attention":
        pooled = AttentionPool(cond_dim, unet.dtype, name="text_pool")(text)  # [B, cond_dim]
    else:
        pooled = context.mean(axis=1)  # [B, cond_dim]
    emb += TextEmbed(4 * unet.embed_dim, unet.dtype, name="text_embed")(pooled)  # [B, E]
    emb = with_fields(emb, fields)
    if unet.null_token:
        token = unet.param("null_token", nn.initializers.normal(1.0), (1, 1, cond_dim))
        token = jnp.broadcast_to(token.astype(unet.dtype), (len(context), 1, cond_dim))
        context = jnp.concatenate([context, token], axis=1)  # [B, L + 1, cond_dim]
        text_mask = jnp.pad(text_mask, ((0, 0), (0, 1)), constant_values=True)  # [B, L + 1]
    if counts_keys(unet.attention_impl):  # Attention does not depend on the order of tokens.
        context, text_mask = valid_first(context, text_mask)
    return emb, context, text_mask


def with_low_res(x: Float[Array, "B H W 3"], low_res: Float[Array, "B _ _ 3"] | None) -> Float[Array, "B H W 6"]:
    """Enlarge the low-resolution image to the size of x, and append its channels to those of x."""
    low_res = required(low_res, "low_res", "low_res").astype(x.dtype)
    return jnp.concatenate([x, bicubic_upsample(low_res, *x.shape[1:3])], axis=-1)


def required(value: Array | None, name: str, field: str) -> Array:
    """Return `value`, the argument `name` of a UNet. Raises ValueError if `value` is None.

    The message says that a UNet whose field `field` is True needs this argument.
    """
    if value is None:
        raise ValueError(f"a UNet with {field}=True must be called with the argument {name}")
    return value


def example_inputs(unet: Any, text_width: int) -> dict[str, Any]:
    """Return example inputs for `unet`: one image and one valid text token, both all zeros."""
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
    """Raise ValueError if fields of the class Conditioned are invalid or contradict each other."""
    named.one_of("unet.text_pooling", unet.text_pooling, POOLING)
    if unet.learned_time_dim % 2 or unet.learned_time_dim < 0:
        raise ValueError(f"unet.learned_time_dim is {unet.learned_time_dim}: it must be even, or 0 for fixed sinusoids")
    check_low_res(unet)


def check_low_res(unet: Any) -> None:
    """Raise ValueError if `noise_aug` is set for a UNet without a low-resolution image."""
    if unet.noise_aug and not unet.low_res:
        raise ValueError(
            "unet.noise_aug is True, but unet.low_res is False, so there is no small image to add "
            "noise to: set noise_aug=False for a base model, or low_res=True for super-resolution"
        )


class TimeEmbed(nn.Module):
    """Embedding of the time: fixed or learned sinusoids, then two dense layers.

    If `learned_dim` is 0, there are `width` fixed sinusoids. Otherwise, there are `learned_dim`
    learned ones. Each dense layer has 4 * `width` channels.
    """

    width: int
    learned_dim: int = 0
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, time: Float[Array, "B"]):
        """Return the embedding of each image's time, [B, 4 * width]."""
        time = time.astype(jnp.float32)
        if self.learned_dim:
            shape = (self.learned_dim // 2,)
            frequencies = self.param("frequencies", nn.initializers.normal(1.0), shape)
            angles = 2 * jnp.pi * time[:, None] * frequencies  # [B, learned_dim / 2]
            # [B, learned_dim + 1]
            h = jnp.concatenate([time[:, None], jnp.sin(angles), jnp.cos(angles)], axis=1)
        else:
            h = ops.sinusoid(time, self.width)  # [B, width]
        h = nn.silu(dense(h, 4 * self.width, "dense1", dtype=self.dtype))  # [B, 4 width]
        return dense(h, 4 * self.width, "dense2", dtype=self.dtype)


class AttentionPool(nn.Module):
    """Attention pooling: a weighted mean of a text's tokens, then layer norm and a dense layer.

    A learned layer computes the weight of each token. As in NeMo, the softmax over tokens includes
    the padding. So the result depends on the length to which the text is padded.
    """

    width: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, text: Float[Array, "B L D"]):
        """Return one vector for each text, [B, width]."""
        scores = dense(text, 1, "score", dtype=self.dtype).astype(jnp.float32)  # [B, L, 1]
        weights = jax.nn.softmax(scores, axis=1)  # [B, L, 1]
        pooled = layer_norm((weights * text).sum(1), dtype=self.dtype)  # [B, D]
        return dense(pooled, self.width, "out", dtype=self.dtype)


class TextEmbed(nn.Module):
    """MLP that maps the pooled text to a vector, which is added to the time embedding."""

    width: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, pooled: Float[Array, "B D"]):
        """Return the vector to add to the time embedding of each image, [B, width]."""
        h = layer_norm(pooled, dtype=self.dtype)  # [B, D]
        h = nn.silu(dense(h, self.width, "dense1", dtype=self.dtype))
        return dense(h, self.width, "dense2", dtype=self.dtype)
