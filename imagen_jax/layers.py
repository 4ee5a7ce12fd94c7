"""Layers that Imagen's UNets share: the residual block, convolutions that change the resolution.

NHWC; B batch, H W pixels, C channels, E time embedding.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffusion_jax.nn import ops
from diffusion_jax.nn.layers import GroupNorm, conv, dense, uniform


class ResBlock(nn.Module):
    """norm -> SiLU -> conv, twice; the embedding scales and shifts the second norm."""

    width: int
    resample: str = ""
    """"up" and "down" change the resolution by 2 between the first SiLU and convolution."""
    scale_shift: bool = True
    always_project: bool = False
    """The shortcut is a 1x1 convolution even where the width stays."""
    skip_scale: float = 1.0
    dropout: float = 0.0
    train: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B _ _ _"], emb: Float[Array, "B E"]):
        """Returns [B, H, W, width]."""
        h = GroupNorm(silu=True, name="norm1")(x)  # [B, H, W, C]
        if self.resample == "down":
            h, x = ops.average_pool_2x2(h), ops.average_pool_2x2(x)  # [B, H/2, W/2, C]
        if self.resample == "up":
            h, x = (ConvTranspose(self.dtype, name=f"up_{n}")(y) for n, y in (("h", h), ("x", x)))
        h = conv(h, self.width, "conv1", kernel=3, dtype=self.dtype)  # [B, H, W, width]
        if self.scale_shift:
            emb = dense(nn.silu(emb), 2 * self.width, "emb", dtype=self.dtype)
            scale, shift = jnp.split(emb.astype(jnp.float32), 2, axis=-1)  # [B, width] each
            h = GroupNorm(silu=True, name="norm2")(h, scale, shift)
        else:
            emb = dense(nn.silu(emb), self.width, "emb", dtype=self.dtype)
            h = GroupNorm(silu=True, name="norm2")(ops.add_broadcast(h, emb[:, None, None]))
        h = nn.Dropout(self.dropout, deterministic=not self.train)(h)
        h = conv(h, self.width, "conv2", kernel=3, zero=True, dtype=self.dtype)
        if self.always_project or x.shape[-1] != self.width:
            x = dense(x, self.width, "skip", dtype=self.dtype)
        return self.skip_scale * x + h


class HalvingConv(nn.Module):
    """Learned downsampling by 2, the width kept, by ops.conv_4x4_halving."""

    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]):
        """Returns [B, H / 2, W / 2, C]."""
        c = x.shape[-1]
        kernel = self.param("kernel", uniform(16 * c), (4, 4, c, c))
        bias = self.param("bias", uniform(16 * c), (c,))
        return ops.conv_4x4_halving(x, kernel.astype(self.dtype), bias)


class ConvTranspose(nn.Module):
    """Learned upsampling by 2, the width kept, by ops.conv_transpose_4x4."""

    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]):
        """Returns [B, 2 H, 2 W, C]."""
        c = x.shape[-1]
        kernel = self.param("kernel", uniform(16 * c), (4, 4, c, c))
        bias = self.param("bias", uniform(16 * c), (c,))
        return ops.conv_transpose_4x4(x, kernel.astype(self.dtype), bias)


def check_resolutions(unet: Any) -> None:
    """ValueError unless its levels halve the image evenly and reach its attention's resolutions."""
    levels = len(unet.channel_mult)
    unit = unet.patch * 2 ** (levels - 1)
    if unet.image_size % unit:
        raise ValueError(
            f"unet.image_size {unet.image_size} does not divide into patches of {unet.patch} and "
            f"{levels - 1} halvings: take a multiple of {unit}, or fewer levels"
        )
    reached = [unet.image_size // unet.patch >> level for level in range(levels)]
    for resolution in unet.attention_resolutions:
        if resolution not in reached:
            raise ValueError(
                f"unet.attention_resolutions holds {resolution}, which a UNet of image_size "
                f"{unet.image_size} and {levels} levels never reaches: choose from {reached}"
            )


def check_width(name: str, width: int) -> None:
    """ValueError unless group normalisation divides `width`."""
    if width < 32 or width % 32:
        raise ValueError(
            f"unet.{name} is {width}: group normalisation has 32 groups, so take a multiple of 32"
        )
