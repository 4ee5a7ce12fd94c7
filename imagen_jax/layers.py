"""The base class and shared layers of Imagen's networks: residual block and resampling.

Images are NHWC. In the shapes, B is the batch size, H and W are the height and width, C is the
number of channels, and E the width of the time embedding.
"""

from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from diffusion_jax.config.ranges import DTYPES, Count, Side
from diffusion_jax.nn import ops
from diffusion_jax.nn.attention import IMPLEMENTATIONS
from diffusion_jax.nn.layers import KEEPS, GroupNorm, conv, dense, dropout, uniform


class Network(nn.Module):
    """Base class of Imagen's UNets and transformer, with the fields that they share."""

    image_size: Side
    """Side of the square training images, in pixels. Pictures are resized and cropped to it."""
    head_dim: Count = 64
    """Width of an attention head. The number of heads is the number of channels / `head_dim`."""
    noise_aug: bool = False
    """Whether noise is added to the small image of a super-resolution model, which makes it robust
    to the errors of the previous stage. The network sees the noise level."""
    remat: bool = False
    """Whether to recompute activations in the backward pass. This saves memory and costs time."""
    remat_keeps: Annotated[str, KEEPS] = "nothing"
    """With `remat`, which outputs to store instead of recomputing them: none ("nothing"), those of
    attention ("attention"), those of attention, convolutions and linear layers ("products"), or the
    same as "products" but in host memory ("offloaded")."""
    attention_impl: Annotated[str, IMPLEMENTATIONS] = "auto"
    """The implementation of attention. All give the same numbers up to rounding; "auto" chooses the
    fastest for the device."""
    dtype: Annotated[DTypeLike, DTYPES] = jnp.float32
    """The dtype of activations; weights are float32."""


class ResBlock(nn.Module):
    """Residual block: norm, SiLU and convolution, twice.

    The embedding of time and text acts on the second norm, as `scale_shift` describes.
    """

    width: int
    resample: str = ""
    """"up" doubles and "down" halves the resolution before the first convolution; "" keeps it."""
    scale_shift: bool = True
    """If True, the embedding scales and shifts the second norm's output. If False, it is added to
    the norm's input."""
    always_project: bool = False
    """Whether the shortcut is a 1x1 convolution even if the width does not change."""
    skip_scale: float = 1.0
    """The factor by which the shortcut is multiplied."""
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "B _ _ _"], emb: Float[Array, "B E"], dropout_keys: Key[Array, "B"] | None = None
    ):
        """Return the new activations, [B, H, W, width].

        If the block resamples, H and W are twice or half those of x. `dropout_keys` is one key per
        image; with None, nothing is dropped.
        """
        h = GroupNorm(silu=True, name="norm1")(x)  # [B, H, W, C]
        if self.resample == "down":
            h, x = ops.average_pool_2x2(h), ops.average_pool_2x2(x)  # [B, H/2, W/2, C]
        if self.resample == "up":  # [B, 2H, 2W, C]
            h, x = (ConvTranspose(self.dtype, name=f"up_{n}")(y) for n, y in (("h", h), ("x", x)))
        h = conv(h, self.width, "conv1", kernel=3, dtype=self.dtype)  # [B, H, W, width]
        if self.scale_shift:
            emb = dense(nn.silu(emb), 2 * self.width, "emb", dtype=self.dtype)  # [B, 2 width]
            scale, shift = jnp.split(emb.astype(jnp.float32), 2, axis=-1)  # [B, width] each
            h = GroupNorm(silu=True, name="norm2")(h, scale, shift)
        else:
            emb = dense(nn.silu(emb), self.width, "emb", dtype=self.dtype)  # [B, width]
            h = GroupNorm(silu=True, name="norm2")(ops.add_broadcast(h, emb[:, None, None]))
        h = dropout(h, self.dropout, dropout_keys, self.path)
        h = conv(h, self.width, "conv2", kernel=3, zero=True, dtype=self.dtype)
        if self.always_project or x.shape[-1] != self.width:
            x = dense(x, self.width, "skip", dtype=self.dtype)  # [B, H, W, width]
        return self.skip_scale * x + h


class ConvTranspose(nn.Module):
    """Transposed 4x4 convolution with stride 2, which keeps the number of channels."""

    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]):
        """Upsample x to [B, 2 H, 2 W, C]."""
        c = x.shape[-1]
        kernel = self.param("kernel", uniform(16 * c), (4, 4, c, c))
        bias = self.param("bias", uniform(16 * c), (c,))
        return ops.conv_transpose_4x4(x, kernel.astype(self.dtype), bias)


def bicubic_upsample(x: Float[Array, "B _ _ C"], height: int, width: int) -> Float[Array, "B H W C"]:
    """Enlarge images to [B, height, width, C] as torch's bicubic interpolate does.

    The cubic kernel has the parameter a = -0.75 (jax.image.resize uses -0.5), pixel centres are at
    half-integers, and edge pixels are repeated. Do not shrink images with this function, because it
    does not antialias.
    """
    if x.shape[1:3] == (height, width):
        return x
    rows = _bicubic_weights(x.shape[1], height)
    columns = _bicubic_weights(x.shape[2], width)
    exact = jax.lax.Precision.HIGHEST
    out = jnp.einsum("hi,wj,bijc->bhwc", rows, columns, x.astype(jnp.float32), precision=exact)
    return out.astype(x.dtype)


def unit(unet: Any) -> int:
    """Return the number of pixels that must divide the height and width of a network's images.

    It is the side of a patch, times 2 for each level at which the resolution is halved.
    """
    halvings = len(getattr(unet, "channel_mult", (1,))) - 1  # A transformer has no levels.
    return getattr(unet, "patch", 1) * 2**halvings


def check_resolutions(unet: Any) -> None:
    """Raise ValueError if the image size or an attention resolution does not fit the levels.

    The image must divide into patches, and their number per side must remain whole when it is
    halved from level to level. Each attention resolution must be the resolution of a level. `unet`
    is a UNet or MagnitudeUNet.
    """
    levels = len(unet.channel_mult)
    if unet.image_size % unit(unet):
        raise ValueError(
            f"unet.image_size is {unet.image_size}, but with unet.patch={unet.patch} and {levels} "
            f"levels it must be a multiple of {unit(unet)}: choose such a size, or fewer levels in "
            "unet.channel_mult"
        )
    resolutions = [unet.image_size // unet.patch >> level for level in range(levels)]
    for resolution in unet.attention_resolutions:
        if resolution not in resolutions:
            raise ValueError(
                f"unet.attention_resolutions holds {resolution}, but no level has this resolution: "
                f"choose from {resolutions}"
            )


def check_width(name: str, width: int) -> None:
    """Raise ValueError unless `width`, a number of channels, is a positive multiple of 32.

    `name` is the UNet's field that sets it, for the message.
    """
    if width < 32 or width % 32:
        raise ValueError(
            f"unet.{name} is {width}: it must be a multiple of 32, the number of groups in group normalisation"
        )


def _bicubic_weights(size_in: int, size_out: int) -> Float[np.ndarray, "O I"]:
    centre = (np.arange(size_out) + 0.5) * size_in / size_out - 0.5
    first = np.floor(centre).astype(int) - 1
    weights = np.zeros((size_out, size_in))
    for tap in range(4):
        distance = np.abs(centre - (first + tap))
        index = np.clip(first + tap, 0, size_in - 1)
        np.add.at(weights, (np.arange(size_out), index), _cubic(distance))
    return weights.astype(np.float32)


def _cubic(d: Float[np.ndarray, "N"], a: float = -0.75) -> Float[np.ndarray, "N"]:
    """Return the cubic kernel of Keys (1981) with parameter `a` at distances d, from 0 to 2."""
    near = (a + 2) * d**3 - (a + 3) * d**2 + 1
    far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    return np.where(d <= 1, near, far)
