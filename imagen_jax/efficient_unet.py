"""Efficient UNet of Imagen's super-resolution models (Saharia et al. 2022, appendix B.1).

On the way down, each level but the deepest first halves the resolution and then applies its
residual blocks. On the way up, it applies its residual blocks first and then doubles the
resolution. So no residual block works at the full resolution. With equal weights, the network
computes the same numbers as NVIDIA NeMo's EfficientUNetModel.

Images are NHWC. In the shapes, B is the batch size, H and W are the height and width of the images,
h and w those at a level, C is the number of channels of a level, and E the width of the time
embedding. There are L text tokens of width D, and T tokens in the context of attention.
"""

import functools
from collections.abc import Sequence
from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from diffusion_jax.config.ranges import Count, Counts, Interval, Multiples, WholeNumber, Width
from diffusion_jax.nn.layers import conv, dense, with_remat
from imagen_jax.attention import BLOCKS, check_attention, check_heads
from imagen_jax.conditioning import Conditioned, check_conditioning, condition, with_low_res
from imagen_jax.layers import ConvTranspose, ResBlock, check_width, unit


class EfficientUNet(Conditioned):
    """Imagen's efficient UNet for super-resolution models (unet.kind "efficient").

    The text tokens that attention sees have the width of the text embeddings.
    """

    embed_dim: Width = 128
    channel_mult: Multiples = (1, 2, 4, 8, 8)
    """Number of channels of each level, in multiples of `embed_dim`. Each level but the deepest
    halves the resolution."""
    num_res_blocks: Counts = (2, 4, 8, 8, 8)
    """Number of residual blocks of each level, both on the way down and on the way up. The blocks
    of level 0 work at half of the full resolution."""
    attention_levels: Annotated[Sequence[int], Interval("[0, inf)"), [()]] = (3, 4)
    """Levels with attention after their residual blocks, both on the way down and on the way up."""
    num_heads: WholeNumber = 0
    """Number of attention heads. If it is 0, `head_dim` determines the number."""
    init_kernel: Count = 3
    """Side of the first convolution's kernel in pixels; it must be odd."""
    scale_skips: bool = True
    """Whether to scale the shortcuts of residual blocks by 1 / sqrt(2)."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B H W 3"],
        time: Float[Array, "B"],
        text: Float[Array, "B L D"],
        text_mask: Bool[Array, "B L"],
        low_res: Float[Array, "B _ _ 3"] | None = None,
        low_res_time: Float[Array, "B"] | None = None,
        **fields: Float[Array, "B 2"],
    ) -> Float[Array, "B H W 3"]:
        """Return the network's raw output F, in float32.

        `time` is the preconditioner's c_noise. `fields` are those of nn/picture_fields.py.
        """
        cond_dim = text.shape[-1]
        check_text_width(self, cond_dim)
        # [B, E], [B, T, D], [B, T]
        emb, context, text_mask = condition(self, time, text, text_mask, low_res_time, cond_dim, fields)
        res = functools.partial(
            with_remat(ResBlock, self.remat, self.remat_keeps),
            scale_shift=self.scale_shift,
            always_project=True,
            skip_scale=0.5**0.5 if self.scale_skips else 1.0,
            dtype=self.dtype,
        )

        def blocks(h, level, width, name):
            for i in range(self.num_res_blocks[level]):
                h = res(width, name=f"{name}_{level}_{i}_res")(h, emb)
            if level in self.attention_levels:
                h = self._attention(width, f"{name}_{level}_attn")(h, context, text_mask)
            return h  # [B, h, w, width]

        x = with_low_res(x.astype(self.dtype), low_res)  # [B, H, W, 6]
        widths = [self.embed_dim * m for m in self.channel_mult]
        deepest = len(widths) - 1
        h = conv(x, widths[0], "init_conv", kernel=self.init_kernel, dtype=self.dtype)
        skips = []  # Each [B, h, w, C], one per level.
        for level, width in enumerate(widths):
            if level < deepest:
                # [B, h/2, w/2, C]
                h = conv(h, h.shape[-1], f"down_{level}_resample", kernel=4, stride=2, padding=(1, 1), dtype=self.dtype)
            h = blocks(h, level, width, "down")  # [B, h, w, width]
            skips.append(h)

        # The blocks of a level output the width of the next shallower level, so that its skip can
        # be added to them.
        h = blocks(skips.pop(), deepest, widths[max(deepest - 1, 0)], "up")
        for level in reversed(range(deepest)):
            h = blocks(h + skips.pop(), level, widths[max(level - 1, 0)], "up")  # [B, h, w, C]
            h = ConvTranspose(self.dtype, name=f"up_{level}_resample")(h)  # [B, 2h, 2w, C]
        return dense(h, 3, "out_conv", dtype=self.dtype).astype(jnp.float32)  # [B, H, W, 3]

    @property
    def low_res(self) -> bool:
        """True, because this network always needs a small image as input."""
        return True

    def check(self, text_width: int) -> None:
        """Raise ValueError if the fields contradict each other or do not fit the text width."""
        check_layers(self)
        check_text_width(self, text_width)
        if self.image_size % unit(self):
            raise ValueError(
                f"unet.image_size {self.image_size} cannot be halved {len(self.channel_mult) - 1} "
                f"times: choose a multiple of {unit(self)}, or fewer levels in unet.channel_mult"
            )

    def _attention(self, width, name):
        block = with_remat(BLOCKS[self.attention], self.remat, self.remat_keeps)
        head_dim = width // self.num_heads if self.num_heads else self.head_dim
        return block(head_dim, self.attention_impl, self.dtype, name=name)


def check_layers(unet: EfficientUNet) -> None:
    """Raise ValueError if the network's layers cannot be built from its fields."""
    check_conditioning(unet)
    levels = len(unet.channel_mult)
    if len(unet.num_res_blocks) != levels or min(unet.num_res_blocks, default=0) < 1:
        raise ValueError(
            f"unet.num_res_blocks {tuple(unet.num_res_blocks)} must hold a number above 0 for each "
            f"of the {levels} levels of unet.channel_mult {tuple(unet.channel_mult)}"
        )
    if not set(unet.attention_levels) <= set(range(levels)):
        raise ValueError(
            f"unet.attention_levels is {tuple(unet.attention_levels)}: choose from the levels 0 to "
            f"{levels - 1} of unet.channel_mult"
        )
    for mult in unet.channel_mult:
        check_width(f"embed_dim * {mult}", unet.embed_dim * mult)
    if unet.init_kernel % 2 == 0:
        raise ValueError(f"unet.init_kernel is {unet.init_kernel}: it must be odd")
    # On the way up, the blocks of a level have the width of the next shallower level.
    widths = [unet.embed_dim * m for m in unet.channel_mult]
    widths = [widths[i] for level in unet.attention_levels for i in (level, max(level - 1, 0))]
    if unet.num_heads:
        for width in widths:
            if unet.num_heads < 0 or width % unet.num_heads:
                raise ValueError(
                    f"unet.num_heads {unet.num_heads} does not divide the width {width} of a level "
                    "with attention: choose a divisor of this width, or set it to 0 and set "
                    "unet.head_dim"
                )
        head_dims = {width // unet.num_heads for width in widths}
    else:
        check_heads(widths, unet.head_dim)
        head_dims = {unet.head_dim}
    for head_dim in head_dims:
        check_attention(unet.attention, unet.attention_impl, unet.dtype, head_dim)


def check_text_width(unet: EfficientUNet, text_width: int) -> None:
    """Raise ValueError if attention cannot normalise text embeddings of this width."""
    if unet.attention != "self" and unet.attention_levels and (text_width < 1 or text_width % 32):
        raise ValueError(
            f"text.width is {text_width}, but with unet.attention={unet.attention!r} an "
            "EfficientUNet normalises the text in 32 groups: choose a multiple of 32, or set "
            "unet.attention='self'"
        )
