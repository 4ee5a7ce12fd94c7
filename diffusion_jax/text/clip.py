"""CLIP's text and image towers (Radford et al. 2021).

Both are pre-norm transformers with biases. OpenAI's models use quick GELU, OpenCLIP's exact GELU.
The text tower's attention is causal and, by default, has no padding mask.

Letters in shapes: B batch, L tokens, P patches + 1, D width, E width of the space that texts and
images share.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from diffusion_jax.files import untrusted
from diffusion_jax.text import clip_weights, prompt_weights, tokenize
from diffusion_jax.text.encoder import LEARNED_WORD, WEIGHTS, TextArrays, TextEncoder, check_fits, read_learned
from diffusion_jax.text.transformer import ACTIVATIONS, Attention, Linear, Mlp, mask_bias
from diffusion_jax.weights import pretrained, torch_weights


class TextOutputs(NamedTuple):
    """Outputs of the text tower. Under jit, unused ones are never computed."""

    layers: list[Float[Array, "B L D"]]
    """The token embeddings, followed by the output of each layer."""
    last: Float[Array, "B L D"]
    """The output of the last layer after the final norm. Stable Diffusion 1 attends to it."""
    penultimate: Float[Array, "B L D"]
    """The output of the second-to-last layer, normalised by the final norm. Stable Diffusion 2
    attends to it."""
    pooled: Float[Array, "B D"]
    """`last` at the end token."""
    projected: Float[Array, "B E"] | None
    """`pooled` projected into the space shared with images. It is not normalised. None if the
    weights have no projection."""


class ImageOutputs(NamedTuple):
    """Outputs of the image tower; P is the number of patches plus one class token."""

    layers: list[Float[Array, "B P D"]]
    """The input of the first layer, followed by the output of each layer."""
    last: Float[Array, "B P D"]
    """The output of the last layer before the final norm, as in Hugging Face's outputs."""
    pooled: Float[Array, "B D"]
    """The class token of `last`, after the final norm."""
    projected: Float[Array, "B E"] | None
    """`pooled` projected into the space shared with texts. It is not normalised. None if the
    weights have no projection."""


class TextTower(nn.Module):
    """A transformer that maps token ids to `TextOutputs` in float32."""

    vocab_size: int
    max_tokens: int
    width: int
    mlp_width: int
    num_heads: int
    num_layers: int
    projection: int | None
    """E, or None if the weights have no projection."""
    activation: str
    end_id: int | None
    """Id of the end token. If it is None, the largest id in each text is taken as its end token, as
    in OpenAI's code."""
    eps: float = 1e-5
    dtype: DTypeLike = jnp.float32
    learned_ids: tuple[int, ...] = ()
    """Ids of tokens whose embeddings are not in the table, but in the parameter LEARNED_WORD. They
    are consecutive numbers, above those of all other tokens."""

    @nn.compact
    def __call__(self, ids: Int[Array, "B L"], mask: Array | None = None) -> TextOutputs:
        """Encode a batch of token ids.

        Args:
            ids: token ids.
            mask: [B, L], nonzero at tokens that other tokens may attend to, so that padding can be
                hidden. None hides no token, as in CLIP's training.
        """
        length = ids.shape[1]
        init = nn.initializers.normal(0.02)
        table = self.param("token_embedding", init, (self.vocab_size, self.width))
        positions = self.param("position_embedding", init, (self.max_tokens, self.width))
        bias = mask_bias(jnp.tril(jnp.ones((1, 1, length, length))))  # [1, 1, L, L]
        if mask is not None:
            bias = jnp.minimum(bias, mask_bias(mask)[:, None, None])  # [B, 1, L, L]
        tokens = table[ids].astype(jnp.float32)  # [B, L, D]
        if self.learned_ids:
            learned = self.param(LEARNED_WORD, init, (len(self.learned_ids), self.width))
            row = ids - self.learned_ids[0]
            tokens = jnp.where((row >= 0)[..., None], learned[jnp.maximum(row, 0)], tokens)
        h = tokens + positions[:length].astype(jnp.float32)
        layers = _layers(self, h, bias)
        norm = _norm(self.eps, "final_norm")
        last = norm(layers[-1])
        end = ids.argmax(1) if self.end_id is None else (ids == self.end_id).argmax(1)  # [B]
        pooled = last[jnp.arange(len(ids)), end]  # [B, D]
        penultimate = norm(layers[-2])
        return TextOutputs(layers, last, penultimate, pooled, _projected(self, pooled))


class ImageTower(nn.Module):
    """A vision transformer that maps images to `ImageOutputs` in float32.

    The images must have CLIP's normalisation.
    """

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
        """Encode images. The outputs hold the class token, then the patches row by row."""
        init = nn.initializers.normal(0.02)
        p, tokens = self.patch, (self.image_size // self.patch) ** 2 + 1
        class_token = self.param("class_embedding", init, (self.width,)).astype(jnp.float32)
        positions = self.param("position_embedding", init, (tokens, self.width))
        kernel = self.param("patch_kernel", init, (p, p, 3, self.width)).astype(self.dtype)
        b, rows, columns = len(images), images.shape[1] // p, images.shape[2] // p
        # A convolution of size and stride p is one linear layer applied to each patch.
        patches = images.astype(self.dtype).reshape(b, rows, p, columns, p, 3)
        h = jnp.einsum("byixjc,ijcd->byxd", patches, kernel, preferred_element_type=jnp.float32)
        h = h.reshape(b, rows * columns, self.width)  # [B, HW/p^2, D]
        class_token = jnp.broadcast_to(class_token, (b, 1, self.width))
        h = jnp.concatenate([class_token, h], axis=1)  # [B, P, D]
        h = _norm(self.eps, "first_norm")(h + positions.astype(jnp.float32))
        layers = _layers(self, h, None)
        pooled = _norm(self.eps, "final_norm")(layers[-1][:, 0])  # [B, D]
        return ImageOutputs(layers, layers[-1], pooled, _projected(self, pooled))


def encoder(
    weights: str | os.PathLike[str],
    *,
    width: int | None = None,
    max_tokens: int | None = 77,
    layer: str = "last",
    dtype: DTypeLike = jnp.bfloat16,
    learned_tokens: str = "",
) -> TextEncoder:
    """Return the CLIP text encoder that Stable Diffusion conditions on.

    The encoder's mask is True at all `max_tokens` positions, including padding: CLIP encodes
    padding like other tokens, and Stable Diffusion was trained to attend to it.

    Args:
        weights: a folder or a Hugging Face name.
        width: the embedding width, which must match the weights; None accepts any width.
        max_tokens: texts are cut or padded to this number of tokens; None stands for the number of
            positions.
        layer: "last" for Stable Diffusion 1, and for Stable Diffusion 2 in Hugging Face's files,
            which omit the last layer; "penultimate" for Stable Diffusion 2 in OpenCLIP's files.
        dtype: the type in which weights are stored and matrix products computed.
        learned_tokens: the config's text.learned_tokens. The parameter `learned_embedding` of the
            frozen weights holds the initial vectors of the word.

    Raises:
        FileNotFoundError: the folder lacks weights, config or tokenizer.
        ValueError: `layer` is unknown, the weights do not match the config or `width`, the
            tokenizer has more tokens than the weights, `max_tokens` exceeds the number of
            positions, or the initial word of `learned_tokens` is not one token.
    """
    if layer not in ("last", "penultimate"):
        raise ValueError(f"layer is {layer!r}: choose 'last' or 'penultimate'")
    folder = pretrained.locate(weights)
    opened = clip_weights.open_clip(folder)
    with untrusted.naming(f"the model in {folder}"):
        tower, table = text_tower(opened, dtype, skip=int(layer == "penultimate"))
        state = clip_weights.tower_state(opened, table)
        frozen = torch_weights.to_stored(state, table, abstract_params(tower), dtype)
    tokenizer = tokenize.clip(folder, open_clip=opened.pads_with_0)
    tower = tower.clone(end_id=tokenizer.end)  # Added tokens may have larger ids.
    check_fits("CLIP", folder, tower, tokenizer.vocab_size, width)
    max_tokens = max_tokens or tower.max_tokens
    if max_tokens > tower.max_tokens:
        raise ValueError(
            f"text.max_tokens is {max_tokens}, but the CLIP in {folder} has only "
            f"{tower.max_tokens} positions: set text.max_tokens={tower.max_tokens}"
        )
    added = {}
    if learned_tokens:
        word, initial, count = read_learned(learned_tokens)
        if len(ids := tokenizer.split([initial])[0]) != 1:
            raise ValueError(
                f"text.learned_tokens is {learned_tokens!r}, but {initial!r} has {len(ids)} "
                "tokens: choose an initial word that is a single token of CLIP"
            )
        embeddings = state[f"{clip_weights.TEXT}.embeddings.token_embedding.weight"]
        vectors = np.repeat(np.asarray(embeddings[ids], np.float32), count, 0)  # [N, D]
        tower, frozen = with_learned(tower, frozen, tokenizer.add_words({word: count}), vectors)
        added[word] = tower.learned_ids[0], "text.learned_tokens"
    return of_tower(tower, frozen, tokenizer, max_tokens)._replace(added=added)


def with_learned(tower: TextTower, params: Any, ids: Sequence[int], vectors: np.ndarray) -> tuple[TextTower, Any]:
    """Return a tower and its parameters, in which tokens with new `ids` have these embeddings."""
    if tower.learned_ids:
        vectors = np.concatenate([np.asarray(params["params"][LEARNED_WORD]), vectors])
    params = {**params, "params": {**params["params"], LEARNED_WORD: vectors}}
    return tower.clone(learned_ids=(*tower.learned_ids, *ids)), params


def of_tower(tower: TextTower, frozen: Any, tokenizer: tokenize.TextTokenizer, max_tokens: int = 77) -> TextEncoder:
    """Return a TextEncoder whose embeddings are the `last` output of a text tower.

    `frozen` holds the parameters of `tower`.
    """

    def encode(frozen: Any, batch: TextArrays):
        ids = jnp.asarray(batch["text_ids"])
        if WEIGHTS in batch:
            chunks = ids.reshape(-1, max_tokens)  # [B, N L] -> [B N, L]
            last = cast(TextOutputs, tower.apply(frozen, chunks)).last
            weights = jnp.asarray(batch[WEIGHTS]).reshape(chunks.shape)
            last = prompt_weights.weighted(last, weights).reshape(*ids.shape, -1)  # [B, N L, D]
        else:
            last = all_outputs(frozen, batch).last
        return last, jnp.ones(ids.shape, bool)

    def all_outputs(frozen: Any, batch: TextArrays) -> TextOutputs:
        return cast(TextOutputs, tower.apply(frozen, jnp.asarray(batch["text_ids"])))

    def to_ids(texts):
        return {"text_ids": tokenizer(texts, max_tokens)["text_ids"]}

    def cut_off(texts):
        return tokenizer.cut_off(texts, max_tokens)

    def add_words(frozen, vectors):
        counts = {word: len(rows) for word, rows in vectors.items()}
        ids = tokenizer.add_words(counts)
        new, params = with_learned(tower, frozen, ids, np.concatenate([*vectors.values()]))
        first = (ids[0] + np.cumsum([0, *counts.values()])).tolist()
        origin = "a file of --embedding"
        added = {word: (id, origin) for word, id in zip(counts, first, strict=False)}
        return of_tower(new, (), tokenizer, max_tokens)._replace(added=added), params

    return TextEncoder(
        "clip",
        tower.width,
        max_tokens,
        to_ids,
        frozen,
        encode,
        cut_off=cut_off,
        tokenize_weighted=functools.partial(prompt_weights.tokenize, tokenizer, max_tokens),
        outputs=all_outputs,
        add_words=add_words,
    )


def text_tower(
    clip: clip_weights.ClipWeights, dtype: DTypeLike = jnp.float32, skip: int = 0
) -> tuple[TextTower, list[torch_weights.Entry]]:
    """Return the text tower for opened weights, and the table that converts the weights.

    Args:
        clip: the opened weights.
        dtype: the type of the tower's matrix products.
        skip: number of layers to leave out at the end.

    Raises:
        ValueError: the weights have no text tower.
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


def image_tower(clip: clip_weights.ClipWeights) -> tuple[ImageTower, list[torch_weights.Entry]]:
    """Return the image tower for opened weights, and the table that converts the weights.

    Raises:
        ValueError: the weights have no image tower.
    """
    shared, state = _shared_fields(clip, clip_weights.VISION), clip.state
    embeddings = f"{clip_weights.VISION}.embeddings"
    width, _, patch, _ = state[f"{embeddings}.patch_embedding.weight"].shape
    side = round((state[f"{embeddings}.position_embedding.weight"].shape[0] - 1) ** 0.5)
    tower = ImageTower(image_size=side * patch, patch=patch, width=width, **shared)
    return tower, clip_weights.table(abstract_params(tower), clip_weights.VISION)


def abstract_params(tower: TextTower | ImageTower) -> Any:
    """Return the shapes and types of the tower's parameters, without allocating the parameters."""
    if isinstance(tower, TextTower):
        example = jax.ShapeDtypeStruct((1, tower.max_tokens), jnp.int32)
    else:
        example = jax.ShapeDtypeStruct((1, tower.image_size, tower.image_size, 3), jnp.float32)
    return jax.eval_shape(lambda x: tower.init(jax.random.key(0), x), example)


def _layers(tower: TextTower | ImageTower, h: jax.Array, bias: jax.Array | None) -> list[jax.Array]:
    """Return `h`, the input of the first layer, and the output of each layer, all [B, L, D].

    `bias` is added to the attention logits of every layer.
    """
    states = [h]
    for i in range(tower.num_layers):
        normed = _norm(tower.eps, f"layer_{i}_attention_norm")(h)
        attention = Attention(tower.num_heads, tower.dtype, name=f"layer_{i}_attention")
        h = h + attention(normed, bias)
        mlp = Mlp(tower.mlp_width, tower.activation, tower.dtype, name=f"layer_{i}_mlp")
        h = h + mlp(_norm(tower.eps, f"layer_{i}_mlp_norm")(h))
        states.append(h)
    return states


def _norm(eps: float, name: str) -> nn.LayerNorm:
    # The one-pass variance E[x^2] - E[x]^2 loses precision when a few channels are large.
    return nn.LayerNorm(epsilon=eps, use_fast_variance=False, dtype=jnp.float32, name=name)


def _projected(tower: TextTower | ImageTower, pooled: jax.Array) -> jax.Array | None:
    if tower.projection is None:
        return None
    return Linear(tower.projection, False, tower.dtype, name="projection")(pooled)


def _shared_fields(clip: clip_weights.ClipWeights, name: str, skip: int = 0) -> dict[str, Any]:
    """Return the fields that TextTower and ImageTower have in common, for the tower `name`.

    The last `skip` layers are not counted. If `skip` is not 0, there is no projection.

    Raises:
        ValueError: the weights have no tower `name`, or its activation is unknown.
    """
    if name not in clip.towers:
        raise ValueError(f"the CLIP weights have no {name}, only {', '.join(clip.towers)}")
    settings = clip.towers[name]
    if settings.activation not in ACTIVATIONS:
        raise ValueError(
            f"the CLIP weights use the activation {settings.activation!r}, which is not "
            f"supported: it must be one of {', '.join(ACTIVATIONS)}"
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
