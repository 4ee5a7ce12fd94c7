"""Magnitude-preserving UNet of EDM2, config G (Karras et al. 2024, arXiv 2312.02696), with text.

The network has neither group norm nor biases. All activations keep a magnitude (root mean square)
near 1, because weights are normalised, sums and nonlinearities are scaled, and the blocks on the
way down start with pixel norm (see diffusion_jax/nn/magnitude.py).

The pooled text replaces EDM2's class label. Attention may also see the text tokens. Train the
network with diffusion.predicts "edm", diffusion.weight "uncertainty", optimizer.schedule
"inverse_sqrt" and optimizer.weight_decay 0.

Images are NHWC. In the shapes, B is the batch size, H and W are the height and width of the images
in pixels, h and w those of a level in patches (halved from level to level), C is the number of
channels of a level, and E the width of the embedding of time and text. There are L text tokens of
width D, and N attention heads of width K.
"""

import functools
from collections.abc import Sequence
from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Key

from diffusion_jax.config.ranges import Count, Decay, Interval, Multiples, Width
from diffusion_jax.nn import ops
from diffusion_jax.nn.attention import attend, counts_keys, valid_first
from diffusion_jax.nn.layers import dropout, with_remat
from diffusion_jax.nn.magnitude import MPConv, mp_cat, mp_fourier, mp_silu, mp_sum, normalize
from diffusion_jax.nn.picture_fields import with_fields
from imagen_jax.attention import check_attention, check_heads
from imagen_jax.conditioning import check_low_res, required, with_low_res
from imagen_jax.layers import Network, check_resolutions

ATTENTION = ("fused", "cross", "self")
_BRANCH = 0.3  # Weight of a residual or attention branch in the sum with its input.
_CLIP = 256  # Activations are clipped to [-_CLIP, _CLIP].


class MagnitudeUNet(Network):
    """EDM2's magnitude-preserving UNet, with text (unet.kind "magnitude")."""

    patch: Count = 1
    """Side in pixels of the patches that the image is first divided into."""
    embed_dim: Width = 192
    """Number of channels of a level whose channel_mult is 1."""
    channel_mult: Multiples = (1, 2, 3, 4)
    """Number of channels of each level, in multiples of `embed_dim`. Each level has half the
    resolution of the previous one."""
    num_res_blocks: Count = 3
    """Number of residual blocks of each level on the way down; the way up has one more."""
    attention_resolutions: Annotated[Sequence[int], Interval("(0, inf)"), [()]] = (16, 8)
    """The levels with attention, given by their resolutions in patches per side. The middle of the
    network always has attention."""
    attention: Annotated[str, ATTENTION] = "fused"
    """What pixels attend to: pixels and text ("fused"), only text ("cross"), or only pixels
    ("self", as in EDM2)."""
    cond_dim: Count = 512
    """Width of the text tokens that attention sees."""
    dropout: Decay = 0.0
    """Share of the activations in residual blocks that are set to 0 in training."""
    low_res: bool = False
    """Whether the network also sees a small image to enlarge. Super-resolution models set it."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B H W 3"],
        time: Float[Array, "B"],
        text: Float[Array, "B L D"],
        text_mask: Bool[Array, "B L"],
        low_res: Float[Array, "B _ _ 3"] | None = None,
        low_res_time: Float[Array, "B"] | None = None,
        dropout_keys: Key[Array, "B"] | None = None,
        **fields: Float[Array, "B 2"],
    ) -> Float[Array, "B H W 3"]:
        """Return the network's raw output F, in float32.

        `time` is the preconditioner's c_noise. `dropout_keys` is one key per image for dropout;
        with None, nothing is dropped. `fields` are those of nn/picture_fields.py.
        """
        # [B, E], [B, L, cond_dim] (None without text attention), [B, L]
        emb, context, text_mask = self._conditions(time, text, text_mask, low_res_time, fields)
        widths = [self.embed_dim * m for m in self.channel_mult]
        deepest = len(widths) - 1
        block = functools.partial(
            with_remat(Block, self.remat, self.remat_keeps),
            head_dim=self.head_dim,
            dropout=self.dropout,
            implementation=self.attention_impl,
            dtype=self.dtype,
        )
        run = lambda block, h: block(h, emb, context, text_mask, dropout_keys)

        def blocks(level, decoder):
            kind = self.attention if self._resolution(level) in self.attention_resolutions else ""
            return functools.partial(block, widths[level], attention=kind, decoder=decoder)

        x = x.astype(self.dtype)  # [B, H, W, 3]
        if self.low_res:
            x = with_low_res(x, low_res)  # [B, H, W, 6]
        x = ops.space_to_depth(x, self.patch)  # [B, h, w, 3 or 6 patch^2]
        x = _with_one(x)  # [B, h, w, channels + 1]: a channel of ones replaces the biases.
        h = MPConv(widths[0], 3, self.dtype, name="init_conv")(x)  # [B, h, w, C]
        skips = [h]  # Each [B, h, w, C]; the way up pops them in reverse order.
        for level in range(len(widths)):
            if level > 0:
                halve = block(h.shape[-1], resample="down", name=f"down_{level}_resample")
                h = run(halve, h)  # [B, h/2, w/2, C]
                skips.append(h)
            for i in range(self.num_res_blocks):
                h = run(blocks(level, False)(name=f"down_{level}_{i}"), h)  # [B, h, w, C]
                skips.append(h)

        middle = functools.partial(block, widths[deepest], decoder=True)
        h = run(middle(attention=self.attention, name="mid_0"), h)  # [B, h, w, C], deepest level
        h = run(middle(name="mid_1"), h)

        for level in reversed(range(len(widths))):
            if level < deepest:
                double = block(h.shape[-1], resample="up", decoder=True, name=f"up_{level}_resample")
                h = run(double, h)  # [B, 2h, 2w, C]
            for i in range(self.num_res_blocks + 1):
                h = mp_cat(h, skips.pop())  # [B, h, w, C + skip's C]
                h = run(blocks(level, True)(name=f"up_{level}_{i}"), h)  # [B, h, w, C]

        gain = self.param("out_gain", nn.initializers.zeros, ())
        h = MPConv(3 * self.patch**2, 3, self.dtype, name="out_conv")(h, gain)  # [.., 3 patch^2]
        return ops.depth_to_space(h.astype(jnp.float32), self.patch)  # [B, H, W, 3]

    def _conditions(self, time, text, text_mask, low_res_time, fields):
        """Return the embedding of time, text and fields, the context of attention, and its mask.

        Their shapes are [B, E], [B, L, cond_dim] and [B, L]. If attention does not see the text,
        the context is None. A channel of ones is appended to the text tokens. So a dropped text,
        whose tokens are zeros, also becomes a learned vector of magnitude 1.
        """
        widths = [self.embed_dim * m for m in self.channel_mult]
        linear = lambda name: MPConv(max(widths), name=name)
        embed = lambda t, name: linear(name)(mp_fourier(t, widths[0]))  # [B, E], float32
        tokens = normalize(_with_one(normalize(text.astype(jnp.float32))))  # [B, L, D + 1]
        pooled = normalize((tokens * text_mask[:, :, None]).sum(1))  # [B, D + 1]
        emb = embed(time, "time_embed")  # [B, E]
        if self.noise_aug:
            low_res_time = required(low_res_time, "low_res_time", "noise_aug")
            emb = mp_sum(emb, embed(low_res_time, "low_res_time_embed"), 0.5)
        emb = mp_silu(with_fields(mp_sum(emb, linear("text_embed")(pooled), 0.5), fields))
        if self.attention == "self":
            return emb, None, text_mask
        if counts_keys(self.attention_impl):  # Attention does not depend on the order of tokens.
            tokens, text_mask = valid_first(tokens, text_mask)
        to_context = MPConv(self.cond_dim, dtype=self.dtype, name="text_to_cond")
        return emb, to_context(tokens), text_mask  # [B, E], [B, L, cond_dim], [B, L]

    def _resolution(self, level: int) -> int:
        return self.image_size // self.patch >> level

    def check(self, text_width: int = 0) -> None:
        """Raise ValueError if the fields contradict each other. Every text width is accepted."""
        del text_width
        check_attention(self.attention, self.attention_impl, self.dtype, self.head_dim)
        check_low_res(self)
        check_resolutions(self)
        widths = [self.embed_dim * m for m in self.channel_mult]
        attending = [
            width for level, width in enumerate(widths) if self._resolution(level) in self.attention_resolutions
        ]
        check_heads({*attending, widths[-1]}, self.head_dim)  # The middle always has attention.


class Block(nn.Module):
    """Residual block followed by optional attention (EDM2, figure 21)."""

    width: int
    decoder: bool = False
    """Whether the block is on the way up. Blocks on the way down start with pixel norm."""
    resample: str = ""
    """"up" to double or "down" to halve the resolution at the start of the block; "" for neither.
    """
    attention: str = ""
    """Kind of attention: "fused", "cross", "self", or "" for none."""
    head_dim: int = 64
    dropout: float = 0.0
    implementation: str = "auto"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B _ _ _"],
        emb: Float[Array, "B E"],
        context,
        text_mask,
        dropout_keys: Key[Array, "B"] | None = None,
    ):
        """Return the new activations, [B, H, W, width].

        If the block resamples, H and W are twice or half those of x. `context` holds the text
        tokens that attention sees. It may be None if the block does not attend to the text.
        """
        if self.resample == "down":
            x = ops.average_pool_2x2(x)  # [B, H/2, W/2, C]
        if self.resample == "up":
            x = ops.repeat_2x2(x)  # [B, 2H, 2W, C]
        skip = lambda x: x if x.shape[-1] == self.width else self._layer("skip")(x)
        if not self.decoder:
            x = normalize(skip(x))  # [B, H, W, width], so the second `skip` below is the identity.

        h = self._layer("conv1", 3)(mp_silu(x))  # [B, H, W, width]
        gain = self.param("emb_gain", nn.initializers.zeros, ())
        scale = 1 + MPConv(self.width, name="emb")(emb, gain)  # [B, width], float32
        h = mp_silu(h * scale[:, None, None]).astype(self.dtype)
        h = dropout(h, self.dropout, dropout_keys, self.path)
        h = self._layer("conv2", 3)(h)
        x = mp_sum(skip(x), h, _BRANCH)  # [B, H, W, width]

        if self.attention:
            x = mp_sum(x, self._attended(x, context, text_mask), _BRANCH)
        return jnp.clip(x, -_CLIP, _CLIP)

    def _attended(self, x, context, text_mask):
        """Return the output of attention, [B, H, W, C], with the pixels of x as queries.

        The keys are the pixels, the text tokens, or both.
        """
        pixels = x.reshape(len(x), -1, self.width)  # [B, HW, C]
        if self.attention == "cross":
            (q,), keys = self._heads(pixels, 1, "q"), []  # [B, HW, N, K]
        else:
            q, *keys = self._heads(pixels, 3, "qkv")  # [B, HW, N, K] each
        if self.attention == "self":
            return self._out(attend(q, *keys, implementation=self.implementation), x)
        text = self._heads(context, 2, "kv_context")  # [B, L, N, K] each
        if keys:  # [B, HW + L, N, K] each
            text = [jnp.concatenate(pair, axis=1) for pair in zip(keys, text, strict=True)]
        return self._out(attend(q, *text, text_mask, implementation=self.implementation), x)

    def _heads(self, tokens, parts, name):
        """Map T tokens, [B, T, _], to a list of `parts` arrays of heads, [B, T, N, K] each.

        The heads have magnitude 1. The layer that computes them has the name `name`.
        """
        heads = self._layer(name, width=parts * self.width)(tokens)  # [B, T, parts C]
        shape = (*heads.shape[:2], parts, self.width // self.head_dim, self.head_dim)
        heads = normalize(heads.reshape(shape))  # [B, T, parts, N, K]
        return [heads[:, :, i] for i in range(parts)]

    def _out(self, heads, x):
        return self._layer("out")(heads.reshape(x.shape))

    def _layer(self, name, kernel=1, width=None):
        return MPConv(width or self.width, kernel, self.dtype, name=name)


def _with_one(x: Float[Array, "*B C"]) -> Float[Array, "*B C+1"]:
    return jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)
