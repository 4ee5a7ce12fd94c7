"""The UNet of Imagen's base models and of the 400M super-resolution model.

Wide residual blocks with attention to pixels and text at chosen resolutions; time and pooled text
shift and scale every block. It follows NVIDIA NeMo's UNetModel number for number. NHWC; B batch,
L text tokens, D their width, E time embedding, C channels, N heads.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from diffusion_jax import ops

ATTENTION = ("fused", "stacked", "self", "cross")
POOLING = ("attention", "mean")


class UNet(nn.Module):
    """F(x, time | text[, low-res image]); the fields are the `unet` group of a config."""

    image_size: int
    patch: int = 1
    """Pixels are gathered into patches of this side first (Hoogeboom et al. 2023), so that
    resolutions count patches; 1 for NeMo's models."""
    embed_dim: int = 256
    channel_mult: Sequence[int] = (1, 2, 3, 4)
    num_res_blocks: int | Sequence[int] = 3
    attention_resolutions: Sequence[int] = (8, 16, 32)
    attention: str = "fused"
    head_dim: int = 64
    cond_dim: int = 512
    text_pooling: str = "attention"
    learned_time_dim: int = 0
    """0: fixed sinusoids; otherwise the (even) number of learned ones."""
    null_token: bool = False
    """Adds one learned token to every text."""
    init_kernel: int = 3
    scale_shift: bool = True
    resblock_updown: bool = False
    conv_resample: bool = True
    """False: average pooling on the way down. The way up always has a convolution."""
    dropout: float = 0.0
    low_res: bool = False
    noise_aug: bool = False
    """The low-res image is noisy, and a second time says how much."""
    remat: bool = False
    attention_impl: str = "xla"
    """See ops.attend."""
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B H W 3"],
        time: Float[Array, "B"],
        text: Float[Array, "B L D"],
        text_mask: Bool[Array, "B L"],
        low_res: Float[Array, "B _ _ 3"] | None = None,
        low_res_time: Float[Array, "B"] | None = None,
        *,
        train: bool = False,
    ) -> Float[Array, "B H W 3"]:
        """`time` is the preconditioner's c_noise; dropout needs train and an rng "dropout"."""
        dense = functools.partial(_dense, dtype=self.dtype)
        emb = TimeEmbed(self.embed_dim, self.learned_time_dim, self.dtype, name="time_embed")(time)
        if self.noise_aug:
            low_res_embed = TimeEmbed(
                self.embed_dim, self.learned_time_dim, self.dtype, name="low_res_time_embed"
            )
            emb += low_res_embed(_given(low_res_time, "low_res_time", "noise_aug"))
        text = text.astype(self.dtype)
        context = dense(text, self.cond_dim, "text_to_cond")  # [B, L, cond_dim]
        if self.text_pooling == "attention":
            pooled = AttentionPool(self.cond_dim, self.dtype, name="text_pool")(text)
        else:
            pooled = context.mean(axis=1)
        emb += TextEmbed(4 * self.embed_dim, self.dtype, name="text_embed")(pooled)
        if self.null_token:
            context, text_mask = self._append_null_token(context, text_mask)
        if self.attention_impl == "cudnn":  # The order of tokens changes nothing else.
            context, text_mask = ops.valid_first(context, text_mask)

        res = functools.partial(
            nn.remat(ResBlock) if self.remat else ResBlock,
            scale_shift=self.scale_shift,
            dropout=self.dropout,
            train=train,
            dtype=self.dtype,
        )
        attend = functools.partial(
            nn.remat(_BLOCKS[self.attention]) if self.remat else _BLOCKS[self.attention],
            head_dim=self.head_dim,
            implementation=self.attention_impl,
            dtype=self.dtype,
        )

        x = x.astype(self.dtype)
        if self.low_res:
            low_res = _given(low_res, "low_res", "low_res").astype(self.dtype)
            low_res = ops.bicubic_upsample(low_res, *x.shape[1:3])
            x = jnp.concatenate([x, low_res], axis=-1)
        x = ops.space_to_depth(x, self.patch)
        widths = [self.embed_dim * m for m in self.channel_mult]
        h = _conv(x, widths[0], "init_conv", kernel=self.init_kernel, dtype=self.dtype)
        skips = [h]
        for level, width in enumerate(widths):
            for i in range(blocks_per_level(self)[level]):
                h = res(width, name=f"down_{level}_{i}_res")(h, emb)
                if attends(self, level):
                    h = attend(name=f"down_{level}_{i}_attn")(h, context, text_mask)
                skips.append(h)
            if level < len(widths) - 1:
                h = self._downsample(h, emb, res, f"down_{level}_resample")
                skips.append(h)

        h = res(h.shape[-1], name="mid_res_0")(h, emb)
        h = attend(name="mid_attn")(h, context, text_mask)
        h = res(h.shape[-1], name="mid_res_1")(h, emb)

        for level, width in reversed(list(enumerate(widths))):
            for i in range(blocks_per_level(self)[level] + 1):
                h = jnp.concatenate([h, skips.pop()], axis=-1)
                h = res(width, name=f"up_{level}_{i}_res")(h, emb)
                if attends(self, level):
                    h = attend(name=f"up_{level}_{i}_attn")(h, context, text_mask)
            if level > 0:
                h = self._upsample(h, emb, res, f"up_{level}_resample")

        h = nn.silu(GroupNorm(name="out_norm")(h))
        channels = 3 * self.patch**2
        h = _conv(h, channels, "out_conv", kernel=self.init_kernel, zero=True, dtype=self.dtype)
        return ops.depth_to_space(h.astype(jnp.float32), self.patch)

    def _append_null_token(self, context, text_mask):
        token = self.param("null_token", nn.initializers.normal(1.0), (1, 1, self.cond_dim))
        token = jnp.broadcast_to(token.astype(self.dtype), (len(context), 1, self.cond_dim))
        context = jnp.concatenate([context, token], axis=1)
        return context, jnp.pad(text_mask, ((0, 0), (0, 1)), constant_values=True)

    def _downsample(self, h, emb, res, name):
        if self.resblock_updown:
            return res(h.shape[-1], resample="down", name=name)(h, emb)
        if self.conv_resample:
            return _conv(h, h.shape[-1], name, kernel=3, stride=2, dtype=self.dtype)
        return ops.average_pool_2x2(h)

    def _upsample(self, h, emb, res, name):
        if self.resblock_updown:
            return res(h.shape[-1], resample="up", name=name)(h, emb)
        return ConvTranspose(self.dtype, name=name)(h)


def blocks_per_level(unet: UNet) -> tuple[int, ...]:
    """`num_res_blocks` written out: one number a level."""
    if isinstance(unet.num_res_blocks, int):
        return (unet.num_res_blocks,) * len(unet.channel_mult)
    return tuple(unet.num_res_blocks)


def attends(unet: UNet, level: int) -> bool:
    """Whether the blocks of a level (0 is the full resolution) have attention."""
    patches = unet.image_size // unet.patch
    return 2**level in {patches // r for r in unet.attention_resolutions}


def example_inputs(unet: UNet, text_width: int) -> dict[str, Any]:
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


def check(unet: UNet) -> None:
    """ValueError for fields that do not go together: cheap, so call it before anything compiles.

    Stricter than `check_layers`: an attention resolution that no level has, which NeMo ignores
    without a word, is surely a mistake in a config.
    """
    check_layers(unet)
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


def check_layers(unet: UNet) -> None:
    """ValueError for fields of which no layers can be made."""
    _one_of("attention", unet.attention, ATTENTION)
    _one_of("text_pooling", unet.text_pooling, POOLING)
    _one_of("attention_impl", unet.attention_impl, ops.ATTENTION)
    levels = len(unet.channel_mult)
    if len(blocks_per_level(unet)) != levels:
        raise ValueError(
            f"unet.num_res_blocks {tuple(blocks_per_level(unet))} has "
            f"{len(blocks_per_level(unet))} entries and unet.channel_mult "
            f"{tuple(unet.channel_mult)} has {levels}: give one a level, or a single number"
        )
    _check_widths(unet)
    _check_heads(unet)
    if unet.learned_time_dim % 2 or unet.learned_time_dim < 0:
        raise ValueError(
            f"unet.learned_time_dim {unet.learned_time_dim} must be even, or 0 for none"
        )
    if unet.init_kernel % 2 == 0:
        raise ValueError(f"unet.init_kernel {unet.init_kernel} must be odd")
    if unet.noise_aug and not unet.low_res:
        raise ValueError(
            "unet.noise_aug needs unet.low_res=True: there is no image to add noise to"
        )


def _check_widths(unet: UNet) -> None:
    widths = {f"embed_dim * {m}": unet.embed_dim * m for m in unet.channel_mult}
    if unet.attention != "self":
        widths["cond_dim"] = unet.cond_dim
    for name, width in widths.items():
        if width < 32 or width % 32:
            raise ValueError(
                f"unet.{name} is {width}: group normalisation has 32 groups, "
                "so take a multiple of 32"
            )


def _check_heads(unet: UNet) -> None:
    attending = [m for level, m in enumerate(unet.channel_mult) if attends(unet, level)]
    for m in {*attending, unet.channel_mult[-1]}:
        if unet.head_dim < 1 or unet.embed_dim * m % unet.head_dim:
            raise ValueError(
                f"unet.head_dim {unet.head_dim} does not divide the width {unet.embed_dim * m} of "
                "a level with attention (the deepest always has it): choose a head_dim that does"
            )
    if unet.attention_impl == "cudnn" and (
        jnp.dtype(unet.dtype).itemsize != 2 or unet.head_dim % 8 or unet.head_dim > 128
    ):
        raise ValueError(
            f"unet.attention_impl 'cudnn' is for 16-bit dtypes and head_dim in multiples of 8 up "
            f"to 128, not for {jnp.dtype(unet.dtype).name} and {unet.head_dim}: change these, or "
            "take 'xla'"
        )


def _one_of(field: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"unet.{field} is {value!r}: choose from {', '.join(known)}")


class ResBlock(nn.Module):
    """norm -> SiLU -> conv, twice; the embedding scales and shifts the second norm."""

    width: int
    resample: str = ""
    """"up" and "down" change the resolution by 2 between the first SiLU and convolution."""
    scale_shift: bool = True
    dropout: float = 0.0
    train: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B _ _ _"], emb: Float[Array, "B E"]):
        """Returns [B, H, W, width]."""
        h = nn.silu(GroupNorm(name="norm1")(x))
        if self.resample == "down":
            h, x = ops.average_pool_2x2(h), ops.average_pool_2x2(x)
        if self.resample == "up":
            h, x = (ConvTranspose(self.dtype, name=f"up_{n}")(y) for n, y in (("h", h), ("x", x)))
        h = _conv(h, self.width, "conv1", kernel=3, dtype=self.dtype)
        if self.scale_shift:
            emb = _dense(nn.silu(emb), 2 * self.width, "emb", dtype=self.dtype)
            scale, shift = jnp.split(emb.astype(jnp.float32), 2, axis=-1)
            h = GroupNorm(name="norm2")(h, scale, shift)
        else:
            emb = _dense(nn.silu(emb), self.width, "emb", dtype=self.dtype)
            h = GroupNorm(name="norm2")(h + emb[:, None, None])
        h = nn.Dropout(self.dropout, deterministic=not self.train)(nn.silu(h))
        h = _conv(h, self.width, "conv2", kernel=3, zero=True, dtype=self.dtype)
        if x.shape[-1] != self.width:
            x = _dense(x, self.width, "skip", dtype=self.dtype)
        return x + h


class SelfAttention(nn.Module):
    """Pixels attend to pixels."""

    head_dim: int
    implementation: str = "xla"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], context=None, text_mask=None):
        """Ignores the text, which the other kinds take in its place."""
        del context, text_mask
        qkv = _dense(GroupNorm(name="norm")(x), 3 * x.shape[-1], "qkv", dtype=self.dtype)
        q, k, v = _heads(qkv, 3, self.head_dim)
        out = ops.attend(q, k, v, implementation=self.implementation)
        return x + _dense(out.reshape(x.shape), x.shape[-1], "out", zero=True, dtype=self.dtype)


class CrossAttention(nn.Module):
    """Pixels attend to text tokens."""

    head_dim: int
    implementation: str = "xla"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], context: Float[Array, "B L D"], text_mask):
        """A text without tokens adds nothing but the bias of the output."""
        c = x.shape[-1]
        (q,) = _heads(_dense(GroupNorm(name="norm")(x), c, "q", dtype=self.dtype), 1, self.head_dim)
        text = GroupNorm(name="norm_context")(context)
        k, v = _heads(_dense(text, 2 * c, "kv", dtype=self.dtype), 2, self.head_dim)
        out = ops.attend(q, k, v, text_mask, implementation=self.implementation)
        return x + _dense(out.reshape(x.shape), c, "out", zero=True, dtype=self.dtype)


class FusedAttention(nn.Module):
    """Pixels attend to pixels and text tokens in one softmax."""

    head_dim: int
    implementation: str = "xla"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], context: Float[Array, "B L D"], text_mask):
        """The pixels are keys through a norm of their own, "norm_self"."""
        c = x.shape[-1]
        (q,) = _heads(_dense(GroupNorm(name="norm")(x), c, "q", dtype=self.dtype), 1, self.head_dim)
        pixels = _dense(GroupNorm(name="norm_self")(x), 2 * c, "kv_self", dtype=self.dtype)
        text = GroupNorm(name="norm_context")(context)
        text = _dense(text, 2 * c, "kv_context", dtype=self.dtype)
        pairs = zip(_heads(pixels, 2, self.head_dim), _heads(text, 2, self.head_dim), strict=True)
        k, v = (jnp.concatenate(pair, axis=1) for pair in pairs)  # [B, HW + L, N, K]
        out = ops.attend(q, k, v, text_mask, implementation=self.implementation)
        return x + _dense(out.reshape(x.shape), c, "out", zero=True, dtype=self.dtype)


class StackedAttention(nn.Module):
    """Self-attention, cross-attention and a gated feed-forward layer: a transformer block."""

    head_dim: int
    implementation: str = "xla"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], context: Float[Array, "B L D"], text_mask):
        """Each of the three adds to its input, and the whole to x."""
        c = x.shape[-1]
        kind = (self.head_dim, self.implementation, self.dtype)
        h = _dense(GroupNorm(name="norm")(x), c, "in", dtype=self.dtype)
        h = SelfAttention(*kind, name="self")(h)
        h = CrossAttention(*kind, name="cross")(h, context, text_mask)
        gated = _dense(GroupNorm(name="ff_norm")(h), 8 * c, "ff_in", dtype=self.dtype)
        value, gate = jnp.split(gated, 2, axis=-1)
        gate = nn.gelu(gate, approximate=False)
        h = h + _dense(value * gate, c, "ff_out", dtype=self.dtype)
        return x + _dense(h, c, "out", zero=True, dtype=self.dtype)


_BLOCKS = {
    "fused": FusedAttention,
    "stacked": StackedAttention,
    "self": SelfAttention,
    "cross": CrossAttention,
}


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
            angles = 2 * jnp.pi * time[:, None] * frequencies
            h = jnp.concatenate([time[:, None], jnp.sin(angles), jnp.cos(angles)], axis=1)
        else:
            h = ops.sinusoid(time, self.width)
        h = nn.silu(_dense(h, 4 * self.width, "dense1", dtype=self.dtype))
        return _dense(h, 4 * self.width, "dense2", dtype=self.dtype)


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
        scores = _dense(text, 1, "score", dtype=self.dtype).astype(jnp.float32)
        weights = jax.nn.softmax(scores, axis=1).astype(self.dtype)
        pooled = _layer_norm((weights * text).sum(1), dtype=self.dtype)
        return _dense(pooled, self.width, "out", dtype=self.dtype)


class TextEmbed(nn.Module):
    """The pooled text on its way to the time embedding that it is added to."""

    width: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, pooled: Float[Array, "B D"]):
        """Returns [B, width]."""
        h = _layer_norm(pooled, dtype=self.dtype)
        h = nn.silu(_dense(h, self.width, "dense1", dtype=self.dtype))
        return _dense(h, self.width, "dense2", dtype=self.dtype)


class GroupNorm(nn.Module):
    """The parameters of ops.group_norm."""

    @nn.compact
    def __call__(self, x: Float[Array, "B *S C"], scale=None, shift=None) -> Float[Array, "B *S C"]:
        """`scale` and `shift`, [B, C], modulate the normalised x."""
        weight = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return ops.group_norm(x, weight, bias, scale, shift)


class ConvTranspose(nn.Module):
    """Learned upsampling by 2, the width kept: the parameters of ops.conv_transpose_4x4."""

    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]):
        """Returns [B, 2 H, 2 W, C]."""
        c = x.shape[-1]
        kernel = self.param("kernel", _uniform(16 * c), (4, 4, c, c))
        bias = self.param("bias", _uniform(16 * c), (c,))
        return ops.conv_transpose_4x4(x, kernel.astype(self.dtype), bias.astype(self.dtype))


def _given(value: Array | None, name: str, field: str) -> Array:
    if value is None:
        raise ValueError(f"a UNet with {field}=True must be given {name}")
    return value


def _uniform(fan_in: int):
    """torch's default for kernels and biases: U(-1, 1) / sqrt(fan_in)."""
    limit = fan_in**-0.5
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(
        key, shape, dtype, -limit, limit
    )


def _layer_norm(x: Array, *, dtype: DTypeLike) -> Array:
    """With torch's epsilon, and a variance that does not cancel where the mean is large."""
    norm = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, dtype=dtype, name="norm")
    return norm(x)


def _dense(x: Array, width: int, name: str, *, zero: bool = False, dtype: DTypeLike) -> Array:
    init = nn.initializers.zeros if zero else _uniform(x.shape[-1])
    return nn.Dense(width, kernel_init=init, bias_init=init, dtype=dtype, name=name)(x)


def _conv(
    x: Array,
    width: int,
    name: str,
    *,
    kernel: int,
    stride: int = 1,
    zero: bool = False,
    dtype: DTypeLike,
) -> Array:
    """Padded by kernel // 2 on both sides; "SAME" pads strided convolutions unlike torch."""
    init = nn.initializers.zeros if zero else _uniform(kernel**2 * x.shape[-1])
    return nn.Conv(
        width,
        (kernel, kernel),
        strides=stride,
        padding=kernel // 2,
        kernel_init=init,
        bias_init=init,
        dtype=dtype,
        name=name,
    )(x)


def _heads(x: Array, parts: int, head_dim: int) -> list[Array]:
    """[B, ..., parts * N * K] -> `parts` arrays [B, tokens, N, K]."""
    x = x.reshape(x.shape[0], -1, parts, x.shape[-1] // (parts * head_dim), head_dim)
    return [x[:, :, part] for part in range(parts)]
