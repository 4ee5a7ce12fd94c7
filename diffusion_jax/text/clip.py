"""CLIP's two towers (Radford et al. 2021): OpenAI's with quick GELU, OpenCLIP's with exact GELU.

Pre-norm transformers with biases; the text's attention is causal and sees no padding mask.
Letters: B batch, L tokens, D width, E width of the space that text and image share.
"""

import os
import pathlib
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from diffusion_jax.text import clip_weights, tokenize
from diffusion_jax.text.encoder import Batch, TextEncoder, check_fits
from diffusion_jax.text.transformer import ACTIVATIONS, Linear, attend, mask_bias
from diffusion_jax.weights import pretrained, torch_weights


class TextOutputs(NamedTuple):
    """The representations of a text; those that are not used are not computed under jit."""

    layers: list[Float[Array, "B L D"]]
    """The embeddings, then the output of each layer."""
    last: Float[Array, "B L D"]
    """The last layer, normalised: what Stable Diffusion 1 attends to."""
    penultimate: Float[Array, "B L D"]
    """The last layer but one, normalised alike: Stable Diffusion 2."""
    pooled: Float[Array, "B D"]
    """`last` where the text ends."""
    projected: Float[Array, "B E"] | None
    """`pooled` in the space shared with images, not normalised; None without a projection."""


class ImageOutputs(NamedTuple):
    """The representations of an image; P are its patches and one token for the whole."""

    layers: list[Float[Array, "B P D"]]
    last: Float[Array, "B P D"]
    """The last layer, not normalised, as Hugging Face gives it."""
    pooled: Float[Array, "B D"]
    """The first token of the last layer, normalised."""
    projected: Float[Array, "B E"] | None


class TextTower(nn.Module):
    """Token ids to `TextOutputs`, in float32."""

    vocab_size: int
    max_tokens: int
    width: int
    mlp_width: int
    num_heads: int
    num_layers: int
    projection: int | None
    """E; None for weights without one."""
    activation: str
    end_id: int | None
    """A text ends at the first of these ids; None: at its largest id, as OpenAI's own code does."""
    eps: float = 1e-5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, ids: Int[Array, "B L"], mask: Array | None = None) -> TextOutputs:
        """`mask` [B, L], not 0 at valid tokens, hides padding; CLIP was trained without."""
        length = ids.shape[1]
        init = nn.initializers.normal(0.02)
        table = self.param("token_embedding", init, (self.vocab_size, self.width))
        positions = self.param("position_embedding", init, (self.max_tokens, self.width))
        bias = mask_bias(jnp.tril(jnp.ones((1, 1, length, length))))  # [1, 1, L, L]
        if mask is not None:
            bias = jnp.minimum(bias, mask_bias(mask)[:, None, None])  # [B, 1, L, L]
        h = table[ids].astype(jnp.float32) + positions[:length].astype(jnp.float32)  # [B, L, D]
        layers = _layers(self, h, bias)
        norm = _norm(self.eps, "final_norm")
        last = norm(layers[-1])
        at = ids.argmax(1) if self.end_id is None else (ids == self.end_id).argmax(1)  # [B]
        pooled = last[jnp.arange(len(ids)), at]  # [B, D]
        penultimate = norm(layers[-2])
        return TextOutputs(layers, last, penultimate, pooled, _projected(self, pooled))


class ImageTower(nn.Module):
    """Normalised images (see metrics) to `ImageOutputs`, in float32."""

    image_size: int
    patch: int
    width: int
    mlp_width: int
    num_heads: int
    num_layers: int
    projection: int | None
    activation: str
    eps: float = 1e-5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, images: Float[Array, "B H W 3"]) -> ImageOutputs:
        """One token a patch, in rows, after one that stands for the image."""
        init = nn.initializers.normal(0.02)
        p, tokens = self.patch, (self.image_size // self.patch) ** 2 + 1
        first = self.param("class_embedding", init, (self.width,)).astype(jnp.float32)
        positions = self.param("position_embedding", init, (tokens, self.width))
        kernel = self.param("patch_kernel", init, (p, p, 3, self.width)).astype(self.dtype)
        b, rows, columns = len(images), images.shape[1] // p, images.shape[2] // p
        # A convolution of size and stride p: every patch by itself through one linear layer.
        patches = images.astype(self.dtype).reshape(b, rows, p, columns, p, 3)
        h = jnp.einsum("byixjc,ijcd->byxd", patches, kernel, preferred_element_type=jnp.float32)
        h = h.reshape(b, rows * columns, self.width)  # [B, HW/p^2, D]
        h = jnp.concatenate([jnp.broadcast_to(first, (b, 1, self.width)), h], axis=1)  # [B, P, D]
        h = _norm(self.eps, "first_norm")(h + positions.astype(jnp.float32))
        layers = _layers(self, h, None)
        pooled = _norm(self.eps, "final_norm")(layers[-1][:, 0])  # [B, D]
        return ImageOutputs(layers, layers[-1], pooled, _projected(self, pooled))


def encoder(
    weights: str | os.PathLike[str],
    *,
    width: int,
    max_tokens: int = 77,
    layer: str = "last",
    dtype: DTypeLike = jnp.bfloat16,
) -> TextEncoder:
    """A CLIP text tower as Stable Diffusion conditions on it, from a folder or a Hub name.

    All `max_tokens` positions count as tokens, padding too: CLIP encodes it like the rest, and
    Stable Diffusion was trained to attend to it. `layer` is "last" (Stable Diffusion 1, and 2 in
    Hugging Face's files, which lack the last layer) or "penultimate" (2 in OpenCLIP's files).
    """
    if layer not in ("last", "penultimate"):
        raise ValueError(f"layer is {layer!r}: choose 'last' or 'penultimate'")
    folder = pretrained.locate(weights)
    opened = clip_weights.open_clip(folder)
    tower, table = text_tower(opened, dtype, skip=int(layer == "penultimate"))
    tokenizer = open_tokenizer(folder, opened.pads_with_0)
    check_fits("CLIP", folder, tower, tokenizer.vocab_size, width)
    if max_tokens > tower.max_tokens:
        raise ValueError(
            f"text.max_tokens is {max_tokens}, and the CLIP in {folder} has only "
            f"{tower.max_tokens} positions: set text.max_tokens={tower.max_tokens}"
        )
    state = clip_weights.tower_state(opened, table)
    frozen = torch_weights.to_stored(state, table, abstract_params(tower), dtype)
    return of_tower(tower, frozen, tokenizer, max_tokens)


def open_tokenizer(folder: pathlib.Path, pads_with_0: bool) -> tokenize.Tokenize:
    """The tokenizer in a folder, or beside it as in diffusers' text_encoder and tokenizer."""
    beside = folder.parent / "tokenizer"
    folder = beside if folder.name == "text_encoder" and beside.is_dir() else folder
    return tokenize.clip(folder, open_clip=pads_with_0)


def of_tower(
    tower: TextTower, frozen: Any, tokenizer: tokenize.Tokenize, max_tokens: int = 77
) -> TextEncoder:
    """An encoder that gives the tower's last layer; `frozen` is the tower's params."""

    def encode(frozen: Any, batch: Batch):
        ids = jnp.asarray(batch["text_ids"])
        outputs: Any = tower.apply(frozen, ids)
        return outputs.last, jnp.ones(ids.shape, bool)

    def to_ids(texts):
        return {"text_ids": tokenizer(texts, max_tokens)["text_ids"]}

    def cut_off(texts):
        return tokenizer.cut_off(texts, max_tokens)

    return TextEncoder("clip", tower.width, max_tokens, to_ids, frozen, encode, cut_off=cut_off)


def text_tower(
    clip: clip_weights.Clip, dtype: DTypeLike = jnp.float32, skip: int = 0
) -> tuple[TextTower, list[torch_weights.Entry]]:
    """The text tower of opened weights without its last `skip` layers, and its parameters' names.

    ValueError if they have none.
    """
    shared, state = _shared_fields(clip, clip_weights.TEXT, skip), clip.state
    embeddings = f"{clip_weights.TEXT}.embeddings"
    vocab_size, width = state[f"{embeddings}.token_embedding.weight"].shape
    tower = TextTower(
        vocab_size=vocab_size,
        max_tokens=state[f"{embeddings}.position_embedding.weight"].shape[0],
        width=width,
        end_id=clip.towers[clip_weights.TEXT].end_id,
        dtype=dtype,
        **shared,
    )
    return tower, clip_weights.table(abstract_params(tower), clip_weights.TEXT)


def image_tower(
    clip: clip_weights.Clip, dtype: DTypeLike = jnp.float32
) -> tuple[ImageTower, list[torch_weights.Entry]]:
    """The image tower of opened weights, and the names of its parameters; ValueError if none."""
    shared, state = _shared_fields(clip, clip_weights.VISION), clip.state
    embeddings = f"{clip_weights.VISION}.embeddings"
    width, _, patch, _ = state[f"{embeddings}.patch_embedding.weight"].shape
    side = round((state[f"{embeddings}.position_embedding.weight"].shape[0] - 1) ** 0.5)
    tower = ImageTower(
        image_size=side * patch,
        patch=patch,
        width=width,
        dtype=dtype,
        **shared,
    )
    return tower, clip_weights.table(abstract_params(tower), clip_weights.VISION)


def cosine(images: Float[Array, "I E"], texts: Float[Array, "T E"]) -> Float[Array, "I T"]:
    """The CLIP score of every image with every text: the cosine of their projections, -1 to 1."""
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return jnp.einsum("ie,te->it", unit(images), unit(texts), precision="highest")


def abstract_params(tower: TextTower | ImageTower) -> Any:
    """Shapes of the parameters, without making them."""
    if isinstance(tower, TextTower):
        example = jax.ShapeDtypeStruct((1, tower.max_tokens), jnp.int32)
    else:
        example = jax.ShapeDtypeStruct((1, tower.image_size, tower.image_size, 3), jnp.float32)
    return jax.eval_shape(lambda x: tower.init(jax.random.key(0), x), example)


def _layers(tower: TextTower | ImageTower, h: jax.Array, bias: jax.Array | None) -> list[jax.Array]:
    """The input of the first layer, then the output of each, all [B, L, D]."""
    states = [h]
    for i in range(tower.num_layers):
        normed = _norm(tower.eps, f"layer_{i}_attention_norm")(h)
        attention = _Attention(tower.num_heads, tower.dtype, name=f"layer_{i}_attention")
        h = h + attention(normed, bias)
        mlp = _Mlp(tower.mlp_width, tower.activation, tower.dtype, name=f"layer_{i}_mlp")
        h = h + mlp(_norm(tower.eps, f"layer_{i}_mlp_norm")(h))
        states.append(h)
    return states


class _Attention(nn.Module):
    num_heads: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x, bias):
        b, length, width = x.shape
        head = width // self.num_heads
        linear = lambda name: Linear(width, True, self.dtype, name=name)
        split = lambda y: y.reshape(b, length, self.num_heads, head)
        q, k, v = (split(linear(name)(x)) for name in "qkv")  # each [B, L, N, K]
        return linear("out")(attend(q, k, v, bias, scale=head**-0.5, dtype=self.dtype))


class _Mlp(nn.Module):
    width: int
    activation: str
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x):
        h = ACTIVATIONS[self.activation](Linear(self.width, True, self.dtype, name="fc1")(x))
        return Linear(x.shape[-1], True, self.dtype, name="fc2")(h)


def _norm(eps: float, name: str) -> nn.LayerNorm:
    """Layer norm in float32."""
    # Not in one pass: E[x^2] - E[x]^2 loses digits where a few channels are large.
    return nn.LayerNorm(epsilon=eps, use_fast_variance=False, dtype=jnp.float32, name=name)


def _projected(tower: TextTower | ImageTower, pooled: jax.Array) -> jax.Array | None:
    if tower.projection is None:
        return None
    return Linear(tower.projection, False, tower.dtype, name="projection")(pooled)


def _shared_fields(clip: clip_weights.Clip, name: str, skip: int = 0) -> dict[str, Any]:
    """The fields that both kinds of tower have, without the last `skip` layers.

    ValueError if there is no such tower, or its activation is not known.
    """
    if name not in clip.towers:
        raise ValueError(f"these CLIP weights hold no {name}: only {', '.join(clip.towers)}")
    settings = clip.towers[name]
    if settings.activation not in ACTIVATIONS:
        raise ValueError(
            f"the activation {settings.activation!r} of this CLIP is not known: "
            f"known are {', '.join(ACTIVATIONS)}"
        )
    projection = clip.state.get(f"{clip_weights.PROJECTIONS[name]}.weight")
    return {
        "mlp_width": clip.state[f"{name}.encoder.layers.0.mlp.fc1.weight"].shape[0],
        "num_heads": settings.num_heads,
        "num_layers": clip_weights.num_layers(clip.state, name) - skip,
        "projection": None if projection is None or skip else projection.shape[0],
        "activation": settings.activation,
        "eps": settings.eps,
    }
