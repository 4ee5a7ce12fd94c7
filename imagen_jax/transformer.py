"""Plain transformer on large patches of pixels (JiT, Li & He 2025, arXiv 2511.13720), with text.

A patch goes through a narrow linear layer, the bottleneck, before it becomes a token. The network
predicts the image, because images lie near a low-dimensional manifold, and noise does not. Text and
image are two streams of tokens that attend to each other (MMDiT, Esser et al. 2024, arXiv
2403.03206). Train the network with diffusion.predicts "x0", diffusion.weight "flow" and
diffusion.noise "lognormal", which makes the times t = sigma / (1 + sigma) logit-normal.

There are three differences from JiT: as in MMDiT, the layers use layer norm and GELU; positions
are not rotary; and text tokens replace class tokens.

Images are NHWC. In the shapes, B is the batch size, H and W are the height and width in pixels, and
C is the width of the tokens and of the embedding of time and text. There are
S = (H / patch) * (W / patch) image tokens, L text tokens, whose embeddings have width D, and N
attention heads of width K.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from diffusion_jax.config.ranges import Count, Width
from diffusion_jax.nn import ops
from diffusion_jax.nn.attention import attend, counts_keys, valid_first
from diffusion_jax.nn.layers import FromHeads, ToHeads, dense, with_remat
from diffusion_jax.nn.picture_fields import with_fields
from imagen_jax.attention import check_heads, check_implementation
from imagen_jax.conditioning import TextEmbed, TimeEmbed, check_low_res, required, with_low_res
from imagen_jax.layers import Network

_MLP_RATIO = 4  # Width of the hidden layer of a feed-forward layer, in multiples of C.


class Transformer(Network):
    """Plain transformer on large patches of pixels (unet.kind "transformer")."""

    patch: Count = 16
    """Side in pixels of the patches that become image tokens. JiT uses a sixteenth of the image's
    side."""
    embed_dim: Width = 768
    """Width of the tokens and of the embedding of time and text."""
    depth: Count = 12
    """Number of blocks. Each has attention and two feed-forward layers, one for the image and one
    for the text."""
    bottleneck: Count = 128
    """Width of the linear layer between the pixels of a patch and its token."""
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
        **fields: Float[Array, "B 2"],
    ) -> Float[Array, "B H W 3"]:
        """Return the network's raw output F, in float32.

        `time` is the preconditioner's c_noise. `fields` are those of nn/picture_fields.py.
        """
        emb, text, text_mask = self._conditions(time, text, text_mask, low_res_time, fields)
        x = x.astype(self.dtype)  # [B, H, W, 3]
        if self.low_res:
            x = with_low_res(x, low_res)  # [B, H, W, 6]
        x = ops.space_to_depth(x, self.patch)  # [B, H/patch, W/patch, 3 or 6 patch^2]
        rows, columns = x.shape[1:3]
        x = dense(x, self.bottleneck, "patch_in", bias=False, dtype=self.dtype)
        x = dense(x, self.embed_dim, "patch_out", dtype=self.dtype)  # [B, H/patch, W/patch, C]
        x = x.reshape(len(x), rows * columns, self.embed_dim)  # [B, S, C]
        image = ops.add_broadcast(x, positions(rows, columns, self.embed_dim))

        block = functools.partial(
            with_remat(JointBlock, self.remat, self.remat_keeps),
            head_dim=self.head_dim,
            implementation=self.attention_impl,
            dtype=self.dtype,
        )
        for i in range(self.depth):
            joint = block(last=i == self.depth - 1, name=f"block_{i}")
            image, text = joint(image, text, emb, text_mask)  # [B, S, C], [B, L, C]

        shift, scale = modulation(emb, 2, "out_emb", self.dtype)
        image = modulated(image, shift, scale, self.dtype)
        out = dense(image, 3 * self.patch**2, "out", zero=True, dtype=self.dtype)
        out = out.astype(jnp.float32).reshape(len(x), rows, columns, -1)  # [.., 3 patch^2]
        return ops.depth_to_space(out, self.patch)  # [B, H, W, 3]

    def _conditions(self, time, text, text_mask, low_res_time, fields):
        """Return the embedding of time, text and fields, the text tokens, and their mask.

        Their shapes are [B, C], [B, L, C] and [B, L].

        The text tokens get no position embeddings, because the text encoder has already encoded the
        order of words.
        """
        embed = lambda name: TimeEmbed(self.embed_dim // 4, dtype=self.dtype, name=name)
        emb = embed("time_embed")(time)  # [B, C]
        if self.noise_aug:
            low_res_time = required(low_res_time, "low_res_time", "noise_aug")
            emb += embed("low_res_time_embed")(low_res_time)
        text = text.astype(self.dtype)
        total = text.sum(1, where=text_mask[:, :, None], dtype=jnp.float32)  # [B, D]
        mean = total / jnp.maximum(text_mask.sum(1, keepdims=True), 1)  # Over the valid tokens.
        emb += TextEmbed(self.embed_dim, self.dtype, name="text_embed")(mean)
        emb = with_fields(emb, fields)
        if counts_keys(self.attention_impl):  # Attention does not depend on the order of tokens.
            text, text_mask = valid_first(text, text_mask)
        return emb, dense(text, self.embed_dim, "text_in", dtype=self.dtype), text_mask

    def check(self, text_width: int = 0) -> None:
        """Raise ValueError if the fields contradict each other. Every text width is accepted."""
        del text_width
        check_implementation(self.attention_impl, self.dtype, self.head_dim)
        check_low_res(self)
        check_heads({self.embed_dim}, self.head_dim)
        if self.image_size % self.patch:
            raise ValueError(
                f"unet.image_size {self.image_size} does not divide into patches of {self.patch}: "
                "choose a unet.patch that divides it"
            )
        if self.embed_dim % 8:
            raise ValueError(
                f"unet.embed_dim is {self.embed_dim}: it must be a multiple of 8, because the time "
                "is embedded in embed_dim / 4 channels, in pairs of a cosine and a sine"
            )


class JointBlock(nn.Module):
    """Transformer block over two streams of tokens, image and text, each with its own weights.

    Attention runs over the tokens of both streams. The embedding scales and shifts the norms and
    gates the residual branches (adaLN-zero, Peebles & Xie 2023). At initialisation, the gates are
    0, so the block is the identity.
    """

    head_dim: int
    last: bool = False
    """Whether this is the last block. It does not change the text tokens, because nothing uses them
    after it."""
    implementation: str = "auto"
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        image: Float[Array, "B S C"],
        text: Float[Array, "B L C"],
        emb: Float[Array, "B C"],
        text_mask: Bool[Array, "B L"],
    ) -> tuple[Float[Array, "B S C"], Float[Array, "B L C"]]:
        """Return the new image and text tokens."""
        of_image = modulation(emb, 6, "image_emb", self.dtype)  # [B, C] each
        of_text = modulation(emb, 2 if self.last else 6, "text_emb", self.dtype)
        q, k, v = self._heads(image, of_image, "image")  # [B, S, N, K] each
        *text_q, text_k, text_v = self._heads(text, of_text, "text")  # [B, L, N, K] each
        q = jnp.concatenate([q, *text_q], axis=1)  # [B, S + L, N, K], in the last block [B, S, ..]
        k, v = (jnp.concatenate(pair, axis=1) for pair in ((k, text_k), (v, text_v)))
        out = attend(q, k, v, text_mask, implementation=self.implementation)
        size = image.shape[1]
        image = self._residuals(image, out[:, :size], of_image, "image")
        if not self.last:
            text = self._residuals(text, out[:, size:], of_text, "text")
        return image, text

    def _heads(self, tokens, modulations, name):
        """Compute the queries, keys and values of one stream, [B, T, N, K] each for T tokens.

        Return the list [q, k, v], or [k, v] for the text in the last block. `name` is the stream,
        "image" or "text". The first two of the `modulations` are the shift and scale of the norm.
        """
        shift, scale = modulations[:2]
        parts = 2 if self.last and name == "text" else 3
        layer = ToHeads(
            parts,
            tokens.shape[-1] // self.head_dim,
            self.head_dim,
            dtype=self.dtype,
            name=f"{name}_kv" if parts == 2 else f"{name}_qkv",
        )
        *queries, k, v = layer(modulated(tokens, shift, scale, self.dtype))
        norm = lambda part: nn.RMSNorm(1e-6, dtype=self.dtype, name=f"{name}_{part}_norm")
        return [*(norm("q")(q) for q in queries), norm("k")(k), v]

    def _residuals(self, tokens, out, modulations, name):
        """Apply the two residual branches of a block to the tokens of one stream, [B, T, C].

        The first branch is attention: `out`, [B, T, N, K], holds its N heads for the T tokens. The
        second is a feed-forward layer. Each branch is multiplied by a gate and added to the tokens.
        The last four of the `modulations` are the gate of the first branch, and the shift, scale
        and gate of the second. `name` is the stream, "image" or "text".
        """
        gate, shift, scale, mlp_gate = modulations[2:]
        width = tokens.shape[-1]
        out = FromHeads(width, dtype=self.dtype, name=f"{name}_out")(out)  # [B, T, C]
        tokens = tokens + (gate[:, None] * out).astype(self.dtype)
        h = modulated(tokens, shift, scale, self.dtype)
        h = nn.gelu(dense(h, _MLP_RATIO * width, f"{name}_mlp1", dtype=self.dtype))
        h = dense(h, width, f"{name}_mlp2", dtype=self.dtype)
        return tokens + (mlp_gate[:, None] * h).astype(self.dtype)


def modulation(emb: Float[Array, "B C"], parts: int, name: str, dtype: DTypeLike) -> list[Float[Array, "B C"]]:
    """Map the embedding to `parts` float32 vectors per image, with a layer initialised to zero.

    The layer has the name `name`.
    """
    out = dense(nn.silu(emb), parts * emb.shape[-1], name, zero=True, dtype=dtype)
    return jnp.split(out.astype(jnp.float32), parts, axis=-1)


def modulated(
    x: Float[Array, "B T C"], shift: Float[Array, "B C"], scale: Float[Array, "B C"], dtype: DTypeLike
) -> Float[Array, "B T C"]:
    """Apply layer norm, then multiply by 1 + scale and add shift."""
    normal = jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6)
    return (normal * (1 + scale[:, None]) + shift[:, None]).astype(dtype)


def positions(rows: int, columns: int, width: int) -> Float[Array, "{rows}*{columns} {width}"]:
    """Return an embedding of the position of each patch. The patches are ordered row by row.

    The first half of an embedding holds sinusoids of the patch's column number, and the second half
    sinusoids of its row number.
    """
    of = lambda length: ops.sinusoid(jnp.arange(length, dtype=jnp.float32), width // 2)
    shape = (rows, columns, width // 2)
    across = jnp.broadcast_to(of(columns), shape)
    down = jnp.broadcast_to(of(rows)[:, None], shape)
    return jnp.concatenate([across, down], axis=-1).reshape(rows * columns, width)
