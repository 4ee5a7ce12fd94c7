"""UNet of Imagen's base models and of the 400M super-resolution model.

The UNet has residual blocks at every resolution, and attention to pixels and text at chosen
resolutions. The time and the pooled text scale and shift a norm of every residual block. With equal
weights, the network computes the same numbers as NVIDIA NeMo's UNetModel.

Images are NHWC. In the shapes, B is the batch size, H and W are the height and width of the images
in pixels, h and w those of a level in patches (halved from level to level), C is the number of
channels of a level, and E the width of the time embedding. There are L text tokens of width D. The
context of attention has T tokens of width K.
"""

import functools
from collections.abc import Sequence
from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from diffusion_jax.config.ranges import Count, Decay, Interval, Multiples
from diffusion_jax.nn import ops
from diffusion_jax.nn.layers import GroupNorm, blocks_per_level, conv, with_remat
from imagen_jax.attention import BLOCKS, check_attention, check_heads
from imagen_jax.conditioning import Conditioned, check_conditioning, condition, with_low_res
from imagen_jax.layers import ConvTranspose, ResBlock, check_resolutions, check_width


class UNet(Conditioned):
    """Imagen's UNet for base models and for small super-resolution models (unet.kind "unet")."""

    patch: Count = 1
    """Side in pixels of the patches that the image is first divided into (Hoogeboom et al. 2023).
    NeMo's models have 1."""
    channel_mult: Multiples = (1, 2, 3, 4)
    """Number of channels of each level, in multiples of `embed_dim`. Each level has half the
    resolution of the previous one."""
    num_res_blocks: Annotated[int | Sequence[int], Interval("(0, inf)")] = 3
    """Number of residual blocks of each level on the way down; the way up has one more."""
    attention_resolutions: Annotated[Sequence[int], Interval("(0, inf)"), [()]] = (8, 16, 32)
    """The levels with attention, given by their resolutions in patches per side. The middle of the
    network always has attention."""
    cond_dim: Count = 512
    """Width of the text tokens that attention sees."""
    init_kernel: Count = 3
    """Side of the kernels of the first and the last convolution, in patches; it must be odd."""
    resblock_updown: bool = False
    """Whether the resolution is halved and doubled by residual blocks (True) or by single layers
    (False)."""
    conv_resample: bool = True
    """Whether the layer that halves the resolution is a convolution (True) or average pooling
    (False). It has no effect if `resblock_updown` is True."""
    dropout: Decay = 0.0
    """Share of the activations in residual blocks that are set to 0 in training."""
    low_res: bool = False
    """Whether the network also sees a small image to enlarge. Super-resolution models set it."""
    residual: bool = False
    """Whether the enlarged small image is added to the output, so that the network learns only the
    difference (use it with diffusion.predicts=x0)."""

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
        emb, context, text_mask = condition(
            self, time, text, text_mask, low_res_time, self.cond_dim, fields
        )  # [B, E], [B, T, K], [B, T]
        res, attend = self._layers(dropout_keys)

        def block(h, level, width, name):
            h = res(width, name=f"{name}_res")(h, emb)
            return attend(name=f"{name}_attn")(h, context, text_mask) if attends(self, level) else h

        if self.low_res:
            x = with_low_res(x, low_res)  # [B, H, W, 6]
        enlarged = x[..., 3:]  # [B, H, W, 3 or 0]; not rounded to self.dtype
        x = x.astype(self.dtype)
        x = ops.space_to_depth(x, self.patch)  # [B, H/patch, W/patch, 3 or 6 patch^2]
        widths = [self.embed_dim * m for m in self.channel_mult]
        blocks = blocks_per_level(self.num_res_blocks, len(widths))
        h = conv(x, widths[0], "init_conv", kernel=self.init_kernel, dtype=self.dtype)
        skips = [h]  # Each [B, h, w, C]; the way up pops them in reverse order.
        for level, width in enumerate(widths):
            for i in range(blocks[level]):
                h = block(h, level, width, f"down_{level}_{i}")  # [B, h, w, C]
                skips.append(h)
            if level < len(widths) - 1:
                h = self._downsample(h, emb, res, f"down_{level}_resample")  # [B, h/2, w/2, C]
                skips.append(h)

        h = res(h.shape[-1], name="mid_res_0")(h, emb)  # [B, h, w, C] of the deepest level
        h = attend(name="mid_attn")(h, context, text_mask)
        h = res(h.shape[-1], name="mid_res_1")(h, emb)

        for level, width in reversed(list(enumerate(widths))):
            for i in range(blocks[level] + 1):
                h = jnp.concatenate([h, skips.pop()], axis=-1)  # [B, h, w, C + skip's C]
                h = block(h, level, width, f"up_{level}_{i}")  # [B, h, w, C]
            if level > 0:
                h = self._upsample(h, emb, res, f"up_{level}_resample")  # [B, 2h, 2w, C]

        h = GroupNorm(silu=True, name="out_norm")(h)  # [B, H/patch, W/patch, C]
        channels = 3 * self.patch**2
        h = conv(h, channels, "out_conv", kernel=self.init_kernel, zero=True, dtype=self.dtype)
        f = ops.depth_to_space(h.astype(jnp.float32), self.patch)  # [B, H, W, 3]
        return f + enlarged if self.residual else f

    def _layers(self, dropout_keys):
        """Return two functions that build residual blocks and attention blocks.

        They are called as res(width, name=...)(h, emb) and attend(name=...)(h, context, mask).
        """
        block = functools.partial(
            with_remat(ResBlock, self.remat, self.remat_keeps),
            scale_shift=self.scale_shift,
            dropout=self.dropout,
            dtype=self.dtype,
        )
        res = lambda *width, **fields: lambda h, emb: block(*width, **fields)(h, emb, dropout_keys)
        attend = functools.partial(
            with_remat(BLOCKS[self.attention], self.remat, self.remat_keeps),
            head_dim=self.head_dim,
            implementation=self.attention_impl,
            dtype=self.dtype,
        )
        return res, attend

    def _downsample(self, h, emb, res, name):
        if self.resblock_updown:
            return res(h.shape[-1], resample="down", name=name)(h, emb)
        if self.conv_resample:
            return conv(h, h.shape[-1], name, kernel=3, stride=2, dtype=self.dtype)
        return ops.average_pool_2x2(h)

    def _upsample(self, h, emb, res, name):
        if self.resblock_updown:
            return res(h.shape[-1], resample="up", name=name)(h, emb)
        return ConvTranspose(self.dtype, name=name)(h)

    def check(self, text_width: int = 0) -> None:
        """Raise ValueError if the fields contradict each other. Every text width is accepted.

        Unlike `check_layers`, this also rejects image sizes that the levels cannot halve, and
        attention resolutions that no level has. NeMo ignores such resolutions, but in a config they
        are a mistake.
        """
        check_layers(self)
        check_resolutions(self)


def attends(unet: UNet, level: int) -> bool:
    """Return whether the blocks of a level have attention. Level 0 has the highest resolution."""
    patches = unet.image_size // unet.patch
    return 2**level in {patches // r for r in unet.attention_resolutions}


def check_layers(unet: UNet) -> None:
    """Raise ValueError if the network's layers cannot be built from its fields."""
    check_attention(unet.attention, unet.attention_impl, unet.dtype, unet.head_dim)
    check_conditioning(unet)
    if unet.residual and not unet.low_res:
        raise ValueError(
            "unet.residual is True, but unet.low_res is False, so there is no small image to add: "
            "set residual=False for a base model, or low_res=True for super-resolution"
        )
    blocks_per_level(unet.num_res_blocks, len(unet.channel_mult))
    widths = [unet.embed_dim * m for m in unet.channel_mult]
    for mult, width in zip(unet.channel_mult, widths, strict=True):
        check_width(f"embed_dim * {mult}", width)
    if unet.attention != "self":
        check_width("cond_dim", unet.cond_dim)
    attending = [width for level, width in enumerate(widths) if attends(unet, level)]
    check_heads({*attending, widths[-1]}, unet.head_dim)  # The middle always has attention.
    if unet.init_kernel % 2 == 0:
        raise ValueError(f"unet.init_kernel is {unet.init_kernel}: it must be odd")
