"""The autoencoder of Stable Diffusion (KL-f8): images to latents an eighth as large, and back.

It follows LDM's AutoencoderKL (Rombach et al. 2022) number for number. Images are in [-1, 1], NHWC;
B batch, H W pixels (h w at a level, latents at last), C channels, Z channels of the latents.
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

from diffusion_jax.config.ranges import DTYPES, Count, Counts
from diffusion_jax.nn import ops
from diffusion_jax.nn.attention import attend
from diffusion_jax.nn.layers import GroupNorm, conv, dense

SCALE = 0.18215
"""One over the deviation of latents: what a UNet sees is SCALE times a sample."""
Moments = Float[Array, "B h w _"]
"""2 Z channels."""
Latents = Float[Array, "B h w Z"]


class VAE(nn.Module):
    """Encoder and decoder; the fields are the `vae` group of a config."""

    width: Count = 128
    channel_mult: Counts = (1, 2, 4, 4)
    num_res_blocks: Count = 2
    """On the way down; the way up has one more a level."""
    latent_channels: Count = 4
    image_channels: Count = 3
    query_chunk: Count = 4096
    """Queries that attend at a time; memory grows with this times the number of pixels / 64."""
    dtype: Annotated[DTypeLike, DTYPES] = jnp.float32

    def setup(self) -> None:
        """The two halves: params["encoder"] and params["decoder"]."""
        shape = (self.width, self.channel_mult, self.num_res_blocks)
        self.encoder = Encoder(*shape, self.latent_channels, self.query_chunk, self.dtype)
        self.decoder = Decoder(*shape, self.image_channels, self.query_chunk, self.dtype)

    def __call__(
        self, images: Float[Array, "B H W _"], eps: Latents
    ) -> tuple[Float[Array, "B H W _"], Moments]:
        """The reconstruction through a sample of the posterior, and the moments."""
        moments = self.encode(images)
        return self.decode(sample(moments, eps)), moments

    def encode(self, images: Float[Array, "B H W _"]) -> Moments:
        """Means, then log variances, on the channel axis; ValueError for sizes that do not halve.

        `moments` for moments to store, `sample` and `latents` for what these mean.
        """
        unit = factor(self)
        if images.shape[1] % unit or images.shape[2] % unit:
            raise ValueError(
                f"images of {images.shape[1]} x {images.shape[2]} pixels have no latents: take "
                f"multiples of {unit}"
            )
        return self.encoder(images)

    def decode(self, z: Latents) -> Float[Array, "B H W _"]:
        """Images, about in [-1, 1], of latents that are not scaled."""
        return self.decoder(z)


class Encoder(nn.Module):
    """The VAE's encoder: images to the moments of their posterior, an eighth as large."""

    width: int
    channel_mult: Sequence[int]
    num_res_blocks: int
    latent_channels: int
    query_chunk: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, images: Float[Array, "B H W _"]) -> Moments:
        """Pads below and to the right where it halves, unlike the UNet."""
        res = functools.partial(ResBlock, dtype=self.dtype)
        h = images.astype(self.dtype)  # [B, H, W, 3]
        h = conv(h, self.width, "init_conv", kernel=3, dtype=self.dtype)  # [B, H, W, width]
        for level, mult in enumerate(self.channel_mult):
            width = self.width * mult
            for i in range(self.num_res_blocks):
                h = res(width, name=f"down_{level}_{i}_res")(h)  # [B, h, w, C]
            if level < len(self.channel_mult) - 1:
                name, pad = f"down_{level}_resample", (0, 1)  # [B, h/2, w/2, C]
                h = conv(h, width, name, kernel=3, stride=2, padding=pad, dtype=self.dtype)
        h = _middle(h, self.query_chunk, self.dtype)  # [B, h, w, C]
        h = GroupNorm(eps=1e-6, silu=True, name="out_norm")(h)
        moments = 2 * self.latent_channels  # [B, h, w, 2 Z]
        h = conv(h, moments, "out_conv", kernel=3, dtype=self.dtype)
        return dense(h, moments, "quant", dtype=self.dtype).astype(jnp.float32)


class Decoder(nn.Module):
    """The VAE's decoder: latents to images."""

    width: int
    channel_mult: Sequence[int]
    num_res_blocks: int
    image_channels: int
    query_chunk: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, z: Latents) -> Float[Array, "B H W _"]:
        """Returns images that are not clipped."""
        res = functools.partial(ResBlock, dtype=self.dtype)
        h = dense(z.astype(self.dtype), z.shape[-1], "post_quant", dtype=self.dtype)  # [B, h, w, Z]
        width = self.width * self.channel_mult[-1]
        h = conv(h, width, "init_conv", kernel=3, dtype=self.dtype)
        h = _middle(h, self.query_chunk, self.dtype)  # [B, h, w, C]
        for level, mult in reversed(list(enumerate(self.channel_mult))):
            width = self.width * mult
            for i in range(self.num_res_blocks + 1):
                h = res(width, name=f"up_{level}_{i}_res")(h)  # [B, h, w, C]
            if level > 0:
                h = ops.repeat_2x2(h)  # [B, 2h, 2w, C]
                h = conv(h, width, f"up_{level}_resample", kernel=3, dtype=self.dtype)
        h = GroupNorm(eps=1e-6, silu=True, name="out_norm")(h)
        h = conv(h, self.image_channels, "out_conv", kernel=3, dtype=self.dtype)
        return h.astype(jnp.float32)  # [B, H, W, 3]


class ResBlock(nn.Module):
    """norm -> SiLU -> conv, twice."""

    width: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W _"]):
        """Returns [B, H, W, width]."""
        h = GroupNorm(eps=1e-6, silu=True, name="norm1")(x)
        h = conv(h, self.width, "conv1", kernel=3, dtype=self.dtype)
        h = GroupNorm(eps=1e-6, silu=True, name="norm2")(h)
        h = conv(h, self.width, "conv2", kernel=3, dtype=self.dtype)
        if x.shape[-1] != self.width:
            x = dense(x, self.width, "skip", dtype=self.dtype)
        return x + h


class Attention(nn.Module):
    """Pixels attend to pixels with one head, `query_chunk` at a time: exact, in less memory."""

    query_chunk: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]):
        """Returns x + the attention's output, [B, H, W, C]."""
        b, c = x.shape[0], x.shape[-1]
        normed = GroupNorm(eps=1e-6, name="norm")(x).reshape(b, -1, c)  # [B, HW, C]
        # [B, HW, 1, C] each: one head.
        q, k, v = (dense(normed, c, name, dtype=self.dtype)[:, :, None] for name in "qkv")
        tokens = q.shape[1]
        rows = lambda some: attend(some, k, v, implementation="xla")
        if tokens <= self.query_chunk:
            out = rows(q)
        else:  # The rows of one softmax do not see each other: rows(q), some rows at a time.
            chunks = -(-tokens // self.query_chunk)
            q = jnp.pad(q, ((0, 0), (0, chunks * self.query_chunk - tokens), (0, 0), (0, 0)))
            q = q.reshape(b, chunks, self.query_chunk, 1, c).swapaxes(
                0, 1
            )  # [chunks, B, rows, ...]
            out = jax.lax.map(rows, q).swapaxes(0, 1).reshape(b, -1, c)[:, :tokens]
        return x + dense(out.reshape(x.shape), c, "out", dtype=self.dtype)


def factor(vae: VAE) -> int:
    """Pixels on a side of a latent: 8 with four levels."""
    return 2 ** (len(vae.channel_mult) - 1)


def mean_and_std(moments: Moments) -> tuple[Latents, Latents]:
    """Mean and deviation of the posterior; log variances beyond -30 and 20 count as these."""
    mean, log_variance = jnp.split(moments, 2, axis=-1)
    return mean, jnp.exp(jnp.clip(log_variance, -30, 20) / 2)


def sample(moments: Moments, eps: Latents) -> Latents:
    """A draw from the posterior, not scaled; `eps` is standard normal."""
    mean, std = mean_and_std(moments)
    return mean + std * eps


def decode_in_slices(decode: Callable[[Latents], Any], z: Latents, at_once: int) -> Any:
    """decode(z), in the memory of about `at_once` images a device: the same numbers.

    With VAE.query_chunk, it is how large images are decoded: no tiles, hence no seams. Rows of z
    that follow each other are taken to lie on one device, as in a batch over a mesh.
    """
    devices = math.gcd(len(z), jax.device_count())
    own = len(z) // devices
    slices = next(n for n in range(-(-own // at_once), own + 1) if own % n == 0)
    if slices == 1:
        return decode(z)
    parts = z.reshape(devices, slices, -1, *z.shape[1:]).swapaxes(0, 1)
    images = jax.lax.map(lambda part: decode(part.reshape(-1, *z.shape[1:])), parts)
    images = images.reshape(slices, devices, -1, *images.shape[2:]).swapaxes(0, 1)
    return images.reshape(len(z), *images.shape[3:])


def check(vae: VAE) -> None:
    """ValueError for fields of which no layers can be made."""
    for mult in (1, *vae.channel_mult):
        if vae.width * mult < 32 or vae.width * mult % 32:
            raise ValueError(
                f"vae.width * {mult} is {vae.width * mult}: group normalisation has 32 groups, so "
                "take a multiple of 32"
            )
    if min(vae.num_res_blocks, vae.latent_channels, vae.query_chunk) < 1:
        raise ValueError(
            f"vae.num_res_blocks {vae.num_res_blocks}, latent_channels {vae.latent_channels} and "
            f"query_chunk {vae.query_chunk} must be at least 1"
        )


def _middle(h: Array, query_chunk: int, dtype: DTypeLike) -> Array:
    width = h.shape[-1]
    h = ResBlock(width, dtype, name="mid_res_0")(h)
    h = Attention(query_chunk, dtype, name="mid_attn")(h)
    return ResBlock(width, dtype, name="mid_res_1")(h)
