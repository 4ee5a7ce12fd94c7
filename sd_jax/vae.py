"""Autoencoder of latent diffusion models: maps images to latents of 1/8 the size, and back.

With equal weights, it computes the same numbers as AutoencoderKL of LDM (Rombach et al. 2022) and
of diffusers. The defaults are the VAE of Stable Diffusion 1.x and 2.x; other fields give those of
SDXL, SD 3, FLUX.1 and others (docs/models.md).

Images are NHWC in [-1, 1]. In the shapes, B is the batch size, and H and W are the height and width
of the images. h and w are the height and width at a level; the deepest level has those of the
latents. C is the number of channels of a level, and Z the number of channels of the latents.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from diffusion_jax.config.ranges import DTYPES, Count, Interval, Multiples, Width
from diffusion_jax.nn import ops
from diffusion_jax.nn.attention import attend
from diffusion_jax.nn.layers import GroupNorm, conv, dense

SCALE = 0.18215
"""Factor by which Stable Diffusion multiplies samples of the VAE, so that the UNet's latents have a
standard deviation of 1."""
Moments = Float[Array, "B h w _"]
"""Parameters of the posterior q(z | image): Z channels of means, then Z channels of log variances.
"""
LatentArray = Float[Array, "B h w Z"]
_SHARED = ("width", "channel_mult", "num_res_blocks", "attention_levels", "mid_attention", "quant_conv", "dtype")


class VAE(nn.Module):
    """The autoencoder of latent diffusion models, which maps images to latents and back."""

    width: Width = 128
    """Number of channels of the first convolution."""
    channel_mult: Multiples = (1, 2, 4, 4)
    """Number of channels of each level, in multiples of `width`. Each level but the deepest halves
    the resolution."""
    num_res_blocks: Count = 2
    """Number of residual blocks of each level of the encoder; the decoder has one more."""
    latent_channels: Count = 4
    """Number of channels of the latents."""
    attention_levels: Annotated[Sequence[int], Interval("[0, inf)"), [()]] = ()
    """Levels whose residual blocks are followed by attention, as in VA-VAE; level 0 has the full
    resolution."""
    mid_attention: bool = True
    """Whether there is attention between the two residual blocks of the deepest level."""
    quant_conv: bool = True
    """Whether 1x1 convolutions follow the encoder and precede the decoder. SD 3 and FLUX.1 have
    none."""
    dtype: Annotated[DTypeLike, DTYPES] = jnp.float32
    """The dtype of activations; weights are float32."""

    def setup(self) -> None:
        """Define the submodules, whose parameters have the keys "encoder" and "decoder"."""
        shape = {name: getattr(self, name) for name in _SHARED}
        self.encoder = Encoder(latent_channels=self.latent_channels, **shape)
        self.decoder = Decoder(**shape)

    def __call__(self, images: Float[Array, "B H W _"], eps: LatentArray) -> tuple[Float[Array, "B H W _"], Moments]:
        """Encode images, and decode the sample mean + std * eps of the posterior.

        Returns:
            The decoded images, and the posterior's moments [B, h, w, 2 Z].
        """
        moments = self.encode(images)
        return self.decode(sample(moments, eps)), moments

    def encode(self, images: Float[Array, "B H W _"]) -> Moments:
        """Return the moments of the posterior of images: means, then log variances.

        Raises:
            ValueError: The height or width of the images is not a multiple of 2^(levels - 1).
        """
        unit = factor(self)
        if images.shape[1] % unit or images.shape[2] % unit:
            raise ValueError(
                f"images of {images.shape[1]} x {images.shape[2]} pixels cannot be encoded: resize "
                f"them to multiples of {unit}"
            )
        return self.encoder(images)

    def decode(self, z: LatentArray) -> Float[Array, "B H W _"]:
        """Decode latents to images in about [-1, 1].

        The caller must first map the UNet's latents to those of the VAE (latents.to_vae).
        """
        return self.decoder(z)


class Encoder(nn.Module):
    """Encoder of the VAE: maps images to the moments of their posterior."""

    width: int
    channel_mult: Sequence[int]
    num_res_blocks: int
    latent_channels: int
    attention_levels: Sequence[int] = ()
    mid_attention: bool = True
    quant_conv: bool = True
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, images: Float[Array, "B H W _"]) -> Moments:
        """Return the moments [B, h, w, 2 Z] of images: Z means, then Z log variances."""
        res = functools.partial(ResBlock, dtype=self.dtype)
        h = images.astype(self.dtype)  # [B, H, W, 3]
        h = conv(h, self.width, "init_conv", kernel=3, dtype=self.dtype)  # [B, H, W, width]
        for level, mult in enumerate(self.channel_mult):
            width = self.width * mult
            for i in range(self.num_res_blocks):
                h = res(width, name=f"down_{level}_{i}_res")(h)  # [B, h, w, C]
                if level in self.attention_levels:
                    h = Attention(dtype=self.dtype, name=f"down_{level}_{i}_attn")(h)
            if level < len(self.channel_mult) - 1:  # [B, h/2, w/2, C]
                name, pad = f"down_{level}_resample", (0, 1)  # Pads only below and to the right.
                h = conv(h, width, name, kernel=3, stride=2, padding=pad, dtype=self.dtype)
        h = _middle(h, self.mid_attention, self.dtype)  # [B, h, w, C]
        h = GroupNorm(eps=1e-6, silu=True, name="out_norm")(h)
        channels = 2 * self.latent_channels
        h = conv(h, channels, "out_conv", kernel=3, dtype=self.dtype)  # [B, h, w, 2 Z]
        h = dense(h, channels, "quant", dtype=self.dtype) if self.quant_conv else h
        return h.astype(jnp.float32)


class Decoder(nn.Module):
    """Decoder of the VAE: maps latents to images."""

    width: int
    channel_mult: Sequence[int]
    num_res_blocks: int
    attention_levels: Sequence[int] = ()
    mid_attention: bool = True
    quant_conv: bool = True
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, z: LatentArray) -> Float[Array, "B H W _"]:
        """Return the images that latents encode. They are not clipped to [-1, 1]."""
        res = functools.partial(ResBlock, dtype=self.dtype)
        h = z.astype(self.dtype)  # [B, h, w, Z]
        h = dense(h, z.shape[-1], "post_quant", dtype=self.dtype) if self.quant_conv else h
        width = self.width * self.channel_mult[-1]
        h = conv(h, width, "init_conv", kernel=3, dtype=self.dtype)  # [B, h, w, C]
        h = _middle(h, self.mid_attention, self.dtype)
        for level, mult in reversed(list(enumerate(self.channel_mult))):
            width = self.width * mult
            for i in range(self.num_res_blocks + 1):
                h = res(width, name=f"up_{level}_{i}_res")(h)  # [B, h, w, C]
                if level in self.attention_levels:
                    h = Attention(dtype=self.dtype, name=f"up_{level}_{i}_attn")(h)
            if level > 0:
                h = ops.repeat_2x2(h)  # [B, 2h, 2w, C]
                h = conv(h, width, f"up_{level}_resample", kernel=3, dtype=self.dtype)
        h = GroupNorm(eps=1e-6, silu=True, name="out_norm")(h)
        h = conv(h, 3, "out_conv", kernel=3, dtype=self.dtype)
        return h.astype(jnp.float32)  # [B, H, W, 3]


class ResBlock(nn.Module):
    """Residual block of the VAE: group norm, SiLU and convolution, twice."""

    width: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W _"]):
        """Return the output of the block, [B, H, W, width]."""
        h = GroupNorm(eps=1e-6, silu=True, name="norm1")(x)  # [B, H, W, C]
        h = conv(h, self.width, "conv1", kernel=3, dtype=self.dtype)  # [B, H, W, width]
        h = GroupNorm(eps=1e-6, silu=True, name="norm2")(h)
        h = conv(h, self.width, "conv2", kernel=3, dtype=self.dtype)
        if x.shape[-1] != self.width:
            x = dense(x, self.width, "skip", dtype=self.dtype)  # [B, H, W, width]
        return x + h


class Attention(nn.Module):
    """Self-attention over pixels with one head, computed for a part of the queries at a time."""

    query_chunk: int = 4096
    """Number of queries to compute at a time. Memory use is proportional to query_chunk * H * W."""
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]):
        """Return x plus the attention's output, [B, H, W, C]."""
        b, c = x.shape[0], x.shape[-1]
        normed = GroupNorm(eps=1e-6, name="norm")(x).reshape(b, -1, c)  # [B, HW, C]
        # [B, HW, 1, C] each, with one head
        q, k, v = (dense(normed, c, name, dtype=self.dtype)[:, :, None] for name in "qkv")
        tokens = q.shape[1]
        attend_rows = lambda rows: attend(rows, k, v, implementation="xla")
        if tokens <= self.query_chunk:
            out = attend_rows(q)  # [B, HW, 1, C]
        else:  # Each query has its own softmax, so the result does not depend on the chunks.
            chunks = -(-tokens // self.query_chunk)
            q = jnp.pad(q, ((0, 0), (0, chunks * self.query_chunk - tokens), (0, 0), (0, 0)))
            q = q.reshape(b, chunks, self.query_chunk, 1, c)
            q = q.swapaxes(0, 1)  # [chunks, B, query_chunk, 1, C]
            out = jax.lax.map(attend_rows, q).swapaxes(0, 1)  # [B, chunks, query_chunk, 1, C]
            out = out.reshape(b, -1, c)[:, :tokens]  # [B, HW, C]
        return x + dense(out.reshape(x.shape), c, "out", dtype=self.dtype)


def factor(vae: VAE) -> int:
    """Return the downsampling factor of a VAE, in pixels per latent: 8 for four levels."""
    return 2 ** (len(vae.channel_mult) - 1)


def mean_and_std(moments: Moments) -> tuple[LatentArray, LatentArray]:
    """Return the mean and the standard deviation of the posterior with the given moments.

    Log variances are clipped to [-30, 20].
    """
    mean, log_variance = jnp.split(moments, 2, axis=-1)
    return mean, jnp.exp(jnp.clip(log_variance, -30, 20) / 2)


def sample(moments: Moments, eps: LatentArray) -> LatentArray:
    """Return mean + std * eps for the posterior with the given moments.

    If `eps` is standard normal, the result is a sample of the posterior. latents.to_unet then
    standardizes it.
    """
    mean, std = mean_and_std(moments)
    return mean + std * eps


def decode_in_slices(decode: Callable[[LatentArray], Any], z: LatentArray, at_once: int) -> Any:
    """Decode latents `z` in slices of at most `at_once` images per device, to save memory.

    The result equals decode(z). Together with Attention.query_chunk, this saves so much memory that
    large images need not be split into tiles, which would leave seams. If `z` is sharded, each
    device must hold consecutive rows, as in a batch sharded over a mesh.
    """
    devices = math.gcd(len(z), jax.device_count())
    per_device = len(z) // devices
    fewest = -(-per_device // at_once)
    slices = next(n for n in range(fewest, per_device + 1) if per_device % n == 0)
    if slices == 1:
        return decode(z)
    # [slices, devices, B / slices / devices, h, w, Z]
    parts = z.reshape(devices, slices, -1, *z.shape[1:]).swapaxes(0, 1)
    images = jax.lax.map(lambda part: decode(part.reshape(-1, *z.shape[1:])), parts)
    # [slices, B / slices, H, W, C] -> [devices, slices, B / slices / devices, H, W, C]
    images = images.reshape(slices, devices, -1, *images.shape[2:]).swapaxes(0, 1)
    return images.reshape(len(z), *images.shape[3:])  # [B, H, W, C]


def check(vae: VAE) -> None:
    """Raise ValueError if a VAE cannot be built from its fields."""
    for mult in (1, *vae.channel_mult):
        if vae.width * mult < 32 or vae.width * mult % 32:
            raise ValueError(
                f"vae.width * {mult} is {vae.width * mult}: it must be a multiple of 32, the "
                "number of groups in group normalisation"
            )
    if min(vae.num_res_blocks, vae.latent_channels) < 1:
        raise ValueError(
            f"vae.num_res_blocks is {vae.num_res_blocks} and vae.latent_channels is "
            f"{vae.latent_channels}: both must be at least 1"
        )
    if any(level not in range(len(vae.channel_mult)) for level in vae.attention_levels):
        raise ValueError(
            f"vae.attention_levels is {tuple(vae.attention_levels)}, but vae.channel_mult has the "
            f"levels 0 to {len(vae.channel_mult) - 1}"
        )


def _middle(h: Array, attention: bool, dtype: DTypeLike) -> Array:
    width = h.shape[-1]
    h = ResBlock(width, dtype, name="mid_res_0")(h)
    h = Attention(dtype=dtype, name="mid_attn")(h) if attention else h
    return ResBlock(width, dtype, name="mid_res_1")(h)
