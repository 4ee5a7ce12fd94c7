"""UNet of Stable Diffusion 1.x, 2.x and MLPerf: residual blocks and transformers over latents.

With equal weights, it computes the same numbers as LDM's openaimodel (Rombach et al. 2022).

Arrays are NHWC. In the shapes, B is the batch size, H and W are the height and width of latents, h
and w those at a level, C is the number of channels of a level, and E = 4 * width is the width of
the time embedding. There are L text tokens of width D, T query tokens, and N attention heads of
width K.
"""

import functools
from collections.abc import Sequence
from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffusion_jax.config import named
from diffusion_jax.config.ranges import DTYPES, Count, Interval, Multiples, WholeNumber, Width
from diffusion_jax.nn import ops
from diffusion_jax.nn.attention import IMPLEMENTATIONS, attend
from diffusion_jax.nn.layers import (
    KEEPS,
    FromHeads,
    GroupNorm,
    ToHeads,
    blocks_per_level,
    conv,
    dense,
    geglu,
    layer_norm,
    with_remat,
)
from diffusion_jax.nn.picture_fields import with_fields

INPAINTING, PIX2PIX = "inpainting", "InstructPix2Pix"


class UNet(nn.Module):
    """Stable Diffusion's UNet. The defaults are those of 2.0."""

    width: Width = 320
    """Number of channels of the first convolution."""
    channel_mult: Multiples = (1, 2, 4, 4)
    """Number of channels of each level, in multiples of `width`. Each level but the deepest halves
    the resolution."""
    num_res_blocks: Annotated[int | Sequence[int], Interval("(0, inf)")] = 2
    """Number of residual blocks of each level on the way down; the way up has one more."""
    attention_levels: Annotated[Sequence[int], Interval("[0, inf)"), [()]] = (0, 1, 2)
    """Levels with transformers; level 0 has the full resolution."""
    transformer_depth: Count = 1
    """Number of blocks in each transformer."""
    num_heads: WholeNumber = 0
    """Number of attention heads (8 in 1.x). If it is 0, `head_dim` determines the number."""
    head_dim: Count = 64
    """Width of an attention head. It has no effect if `num_heads` is not 0."""
    linear_projections: bool = True
    """Whether checkpoint files store the first and last layer of a transformer as linear layers, as
    in 2.x (True), or as 1x1 convolutions, as in 1.x (False). The network computes the same numbers.
    """
    norm_groups: Count = 32
    """Number of groups of the norms in residual blocks and before the output (16 in MLPerf). The
    group norms of transformers always have 32 groups."""
    in_channels: Count = 4
    """Number of channels of the input. It is `out_channels` for a UNet that reads only the latents,
    2 * out_channels + 1 for inpainting, and 2 * out_channels for InstructPix2Pix."""
    out_channels: Count = 4
    """Number of channels of the prediction, which must equal those of the latents."""
    remat: bool = False
    """Whether to recompute activations in the backward pass. This saves memory and costs time."""
    remat_keeps: Annotated[str, KEEPS] = "nothing"
    """With `remat`, which outputs to store instead of recomputing them: none ("nothing"), those of
    attention ("attention"), those of attention, convolutions and linear layers ("products"), or the
    same as "products" but in host memory ("offloaded")."""
    attention_impl: Annotated[str, IMPLEMENTATIONS] = "auto"
    """The implementation of attention. All give the same numbers up to rounding; "auto" chooses the
    fastest for the device. Heads wider than 128 use "xla" instead of "cudnn"."""
    dtype: Annotated[DTypeLike, DTYPES] = jnp.float32
    """The dtype of activations; weights are float32."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B H W _"],
        time: Float[Array, "B"],
        text: Float[Array, "B L D"],
        picture: Float[Array, "B H W _"] | None = None,
        **fields: Float[Array, "B 2"],
    ) -> Float[Array, "B H W {self.out_channels}"]:
        """Return the network's raw output F, in float32.

        Args:
            x: The noisy latents, scaled by the preconditioner's c_in.
            time: Timesteps from 0 to 999, possibly fractional.
            text: The text context. Attention has no mask, so it sees every token.
            picture: Further channels of the input, which show a picture (sd_jax/editing.py).
            **fields: Named numbers of each image (nn/picture_fields.py).

        Raises:
            ValueError: The height or width of x is not a multiple of 2^(levels - 1).
        """
        self._check_size(x.shape[1], x.shape[2])
        emb = ops.sinusoid(time, self.width).astype(self.dtype)  # [B, width]
        emb = dense(emb, 4 * self.width, "time_dense1", dtype=self.dtype)  # [B, E]
        emb = dense(nn.silu(emb), 4 * self.width, "time_dense2", dtype=self.dtype)
        emb = with_fields(emb, fields)
        emb = nn.silu(emb)  # LDM applies SiLU in each residual block, with the same result.
        text = text.astype(self.dtype)
        res = functools.partial(with_remat(ResBlock, self.remat, self.remat_keeps), self.norm_groups, dtype=self.dtype)
        attend = functools.partial(
            with_remat(Transformer, self.remat, self.remat_keeps),
            self.transformer_depth,
            self.num_heads,
            self.head_dim,
            self.attention_impl,
            self.dtype,
        )

        widths = [self.width * m for m in self.channel_mult]
        blocks = blocks_per_level(self.num_res_blocks, len(widths))
        if picture is not None:
            x = jnp.concatenate([x, picture], axis=-1)  # [B, H, W, in_channels]
        h = conv(x.astype(self.dtype), self.width, "init_conv", kernel=3, dtype=self.dtype)
        skips = [h]  # Each [B, h, w, C]; the way up pops them in reverse order.
        for level, width in enumerate(widths):
            for i in range(blocks[level]):
                h = res(width, name=f"down_{level}_{i}_res")(h, emb)  # [B, h, w, C]
                if level in self.attention_levels:
                    h = attend(name=f"down_{level}_{i}_attn")(h, text)
                skips.append(h)
            if level < len(widths) - 1:
                name = f"down_{level}_resample"
                h = conv(h, width, name, kernel=3, stride=2, dtype=self.dtype)  # [B, h/2, w/2, C]
                skips.append(h)

        h = res(widths[-1], name="mid_res_0")(h, emb)  # [B, h, w, C] of the deepest level
        h = attend(name="mid_attn")(h, text)
        h = res(widths[-1], name="mid_res_1")(h, emb)

        for level, width in reversed(list(enumerate(widths))):
            for i in range(blocks[level] + 1):
                h = jnp.concatenate([h, skips.pop()], axis=-1)  # [B, h, w, C + skip's C]
                h = res(width, name=f"up_{level}_{i}_res")(h, emb)  # [B, h, w, C]
                if level in self.attention_levels:
                    h = attend(name=f"up_{level}_{i}_attn")(h, text)
            if level > 0:
                h = ops.repeat_2x2(h)  # [B, 2h, 2w, C]
                h = conv(h, width, f"up_{level}_resample", kernel=3, dtype=self.dtype)

        h = GroupNorm(self.norm_groups, silu=True, name="out_norm")(h)
        h = conv(h, self.out_channels, "out_conv", kernel=3, zero=True, dtype=self.dtype)
        return h.astype(jnp.float32)  # [B, H, W, out_channels]

    def _check_size(self, height, width):
        unit = 2 ** (len(self.channel_mult) - 1)
        if height % unit or width % unit:
            raise ValueError(
                f"latents of height {height} and width {width} cannot be halved "
                f"{len(self.channel_mult) - 1} times: choose multiples of {unit}"
            )


class ResBlock(nn.Module):
    """Residual block of the UNet: norm, SiLU and convolution, twice.

    The time embedding is added before the second norm.
    """

    norm_groups: int
    width: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W _"], emb: Float[Array, "B E"]):
        """Return the output of the block, [B, H, W, width].

        `emb` is the time embedding, to which the caller has already applied SiLU.
        """
        h = GroupNorm(self.norm_groups, silu=True, name="norm1")(x)
        h = conv(h, self.width, "conv1", kernel=3, dtype=self.dtype)  # [B, H, W, width]
        emb = dense(emb, self.width, "emb", dtype=self.dtype)
        h = ops.add_broadcast(h, emb[:, None, None])  # [B, H, W, width]
        h = GroupNorm(self.norm_groups, silu=True, name="norm2")(h)
        h = conv(h, self.width, "conv2", kernel=3, zero=True, dtype=self.dtype)
        if x.shape[-1] != self.width:
            x = dense(x, self.width, "skip", dtype=self.dtype)  # [B, H, W, width]
        return x + h


class Transformer(nn.Module):
    """Transformer over pixels: `depth` blocks of self-attention, cross-attention and gated MLP."""

    depth: int
    num_heads: int
    head_dim: int
    implementation: str = "auto"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], text: Float[Array, "B L D"]):
        """Return x plus the output of the transformer's layers, [B, H, W, C].

        Inside, each layer also adds its output to its input.
        """
        c = x.shape[-1]
        heads = self.num_heads or c // self.head_dim
        attend = functools.partial(Attention, heads, self.implementation, self.dtype)
        h = x.reshape(len(x), -1, c)  # [B, HW, C]
        h = dense(GroupNorm(eps=1e-6, name="norm")(h), c, "in", dtype=self.dtype)
        for i in range(self.depth):
            normed = layer_norm(h, f"self_norm_{i}", dtype=self.dtype)
            h = h + attend(name=f"self_{i}")(normed, normed)  # [B, HW, C]
            normed = layer_norm(h, f"cross_norm_{i}", dtype=self.dtype)
            h = h + attend(name=f"cross_{i}")(normed, text)  # [B, HW, C]
            normed = layer_norm(h, f"ff_norm_{i}", dtype=self.dtype)
            gated = geglu(normed, 4 * c, f"ff_in_{i}", dtype=self.dtype)  # [B, HW, 4 C]
            h = h + dense(gated, c, f"ff_out_{i}", dtype=self.dtype)  # [B, HW, C]
        return x + dense(h.reshape(x.shape), c, "out", zero=True, dtype=self.dtype)  # [B, H, W, C]


class Attention(nn.Module):
    """Multi-head attention from every token of x to every token of `tokens`, without a mask."""

    num_heads: int
    implementation: str = "auto"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T C"], tokens: Float[Array, "B L D"]):
        """Return the attention's output [B, T, C]. Only the output layer has a bias."""
        c = x.shape[-1]
        head_dim = c // self.num_heads
        layer = functools.partial(ToHeads, 1, self.num_heads, head_dim, False, self.dtype)
        (q,), (k,), (v,) = (
            layer(name=name)(y) for y, name in ((x, "q"), (tokens, "k"), (tokens, "v"))
        )  # [B, T, N, K], [B, L, N, K], [B, L, N, K]
        # cuDNN does not support heads wider than 128, which occur only at low resolutions.
        too_wide = self.implementation == "cudnn" and head_dim > 128
        out = attend(q, k, v, implementation="xla" if too_wide else self.implementation)
        return FromHeads(c, dtype=self.dtype, name="out")(out)  # [B, T, C]


def sees(in_channels: int, latent_channels: int) -> str:
    """Return what a UNet with `in_channels` input channels sees besides the noisy latents.

    INPAINTING means a mask and the masked picture, PIX2PIX a picture to edit, and "" nothing, or
    inputs that this project does not support.
    """
    more = in_channels - latent_channels
    return {latent_channels + 1: INPAINTING, latent_channels: PIX2PIX}.get(more, "")


def transformer_widths(unet: UNet) -> set[int]:
    """Return the widths of all transformers, including the one in the middle of the UNet."""
    return {unet.width * unet.channel_mult[level] for level in (*unet.attention_levels, -1)}


def check(unet: UNet) -> None:
    """Raise ValueError if a UNet's fields contradict each other."""
    levels = len(unet.channel_mult)
    blocks_per_level(unet.num_res_blocks, levels)
    for level in unet.attention_levels:
        if not 0 <= level < levels:
            raise ValueError(
                f"unet.attention_levels holds {level}, but unet.channel_mult has the levels 0 "
                f"to {levels - 1}: choose from these"
            )
    for mult in (1, *unet.channel_mult):
        if unet.norm_groups < 1 or unet.width * mult % unet.norm_groups:
            raise ValueError(
                f"unet.norm_groups {unet.norm_groups} does not divide the width "
                f"{unet.width * mult} of a level: choose a divisor of this width"
            )
    for width in transformer_widths(unet):
        _check_heads(unet, width)
    named.one_of("unet.attention_impl", unet.attention_impl, IMPLEMENTATIONS)
    if unet.attention_impl == "cudnn" and jnp.dtype(unet.dtype).itemsize != 2:
        raise ValueError(
            "unet.attention_impl is 'cudnn', which needs a 16-bit dtype, but unet.dtype is "
            f"{jnp.dtype(unet.dtype).name}: set unet.dtype='bfloat16' or unet.attention_impl='xla'"
        )


def _check_heads(unet: UNet, width: int) -> None:
    if width % 32:
        raise ValueError(
            f"the width of a transformer is {width}: it must be a multiple of 32, the number of "
            "groups in group normalisation, so change unet.width or unet.channel_mult"
        )
    field = "num_heads" if unet.num_heads else "head_dim"
    value = getattr(unet, field)
    if value < 1 or width % value:
        raise ValueError(
            f"unet.{field} {value} does not divide the width {width} of a level with "
            "attention: choose a divisor of this width"
        )
    head_dim = width // unet.num_heads if unet.num_heads else unet.head_dim
    if unet.attention_impl == "cudnn" and head_dim % 8:
        raise ValueError(
            "unet.attention_impl is 'cudnn', which needs heads whose width is a multiple of 8, but "
            f"unet.{field} {value} gives width {head_dim}: change unet.{field}, or set "
            "unet.attention_impl='xla'"
        )
