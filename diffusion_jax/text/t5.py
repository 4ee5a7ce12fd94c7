"""T5's encoder (Raffel et al. 2020), in version 1.0 with ReLU and version 1.1 with a gated GELU.

Blocks are pre-norm with RMS norms and without biases. Attention logits are not scaled. A learned
bias for each head and distance bucket is added to the logits; all layers share it.

Letters in shapes: B batch, L tokens, D width, N heads, K head width.
"""

import functools
import math
import os
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from diffusion_jax.files import untrusted
from diffusion_jax.text import tokenize
from diffusion_jax.text.encoder import TextArrays, TextEncoder, check_fits
from diffusion_jax.text.transformer import ACTIVATIONS, Linear, attend, mask_bias
from diffusion_jax.weights import pretrained, torch_weights
from diffusion_jax.weights.torch_weights import Entry, StateDict


class T5Encoder(nn.Module):
    """T5's encoder, which maps token ids to embeddings.

    Parameters keep the dtype in which they were loaded.
    """

    vocab_size: int
    width: int
    mlp_width: int
    head_dim: int
    num_heads: int
    num_layers: int
    num_buckets: int = 32
    max_distance: int = 128
    activation: str = "relu"
    gated: bool = False
    eps: float = 1e-6
    dtype: DTypeLike = jnp.float32

    def __call__(self, ids: Int[Array, "B L"], mask: Array) -> Float[Array, "B L D"]:
        """Return the output of the last layer after the final norm, in float32.

        `mask` [B, L] is nonzero at valid tokens. Tokens with mask 0 do not affect valid tokens.
        """
        return self.hidden_states(ids, mask)[-1]

    @nn.compact
    def hidden_states(self, ids: Int[Array, "B L"], mask: Array) -> list[Float[Array, "B L D"]]:
        """Return a list: the token embeddings, followed by the output of each layer.

        The output of the last layer is taken after the final norm. `mask` is that of `__call__`.
        """
        length = ids.shape[1]
        init = nn.initializers.normal(1.0)
        table = self.param("token_embedding", init, (self.vocab_size, self.width))
        relative = self.param("relative_bias", init, (self.num_buckets, self.num_heads))
        buckets = distance_buckets(length, self.num_buckets, self.max_distance)
        # The distance key - query of each pair, plus L - 1 so that it is an index into `by_offset`.
        offsets = jnp.arange(length)[None] - jnp.arange(length)[:, None] + length - 1  # [L, L]
        by_offset = relative.astype(jnp.float32)[buckets]  # [2 L - 1, N]
        bias = by_offset[offsets].transpose(2, 0, 1)[None]  # [1, N, L, L]
        bias = bias + mask_bias(mask)[:, None, None]  # [B, N, L, L]

        norm = functools.partial(RMSNorm, self.eps)
        h = table[ids].astype(jnp.float32)  # [B, L, D], as after every layer
        states = [h]
        for i in range(self.num_layers):
            attention = _Attention(self.num_heads, self.head_dim, self.dtype, name=f"block_{i}_attention")
            h = h + attention(norm(name=f"block_{i}_attention_norm")(h), bias)
            mlp = _Mlp(self.mlp_width, self.activation, self.gated, self.dtype, name=f"block_{i}_mlp")
            h = h + mlp(norm(name=f"block_{i}_mlp_norm")(h))
            states.append(h)
        return [*states[:-1], norm(name="final_norm")(states[-1])]


def encoder(
    weights: str | os.PathLike[str],
    *,
    width: int | None = None,
    max_tokens: int | None = None,
    read_tokens: int = 512,
    dtype: DTypeLike = jnp.bfloat16,
) -> TextEncoder:
    """Open T5's weights and tokenizer, and return a text encoder that works as in NeMo's Imagen.

    Texts are cut or padded to `read_tokens` tokens and encoded. Only the first `max_tokens`
    embeddings are returned, with 0 at padding. If a text has more than `max_tokens` tokens, the
    returned embeddings thus depend on later tokens too.

    Args:
        weights: a folder or a Hugging Face name.
        width: the embedding width, which must match the weights; None accepts any width.
        max_tokens: number of embeddings returned per text; None stands for `read_tokens`.
        read_tokens: number of tokens encoded per text, at least `max_tokens`.
        dtype: the type in which weights are stored and matrix products computed.

    Raises:
        FileNotFoundError: the folder lacks weights, config or tokenizer.
        ValueError: the weights do not match config.json or `width`, the tokenizer has more tokens
            than the weights, or `read_tokens` is less than `max_tokens`.
    """
    folder = pretrained.locate(weights)
    state = pretrained.open_weights(folder)
    config = pretrained.read_json(folder / "config.json")
    with untrusted.naming(f"the model in {folder}"):
        model, table = from_state(state, config, dtype)
        frozen = torch_weights.to_stored(used(state), table, abstract_params(model), dtype)
    tokenizer = tokenize.t5(folder)
    check_fits("T5", folder, model, tokenizer.vocab_size, width)
    max_tokens = max_tokens or read_tokens
    if read_tokens < max_tokens:
        raise ValueError(
            f"text.read_tokens is {read_tokens}: it must be at least text.max_tokens, which is "
            f"{max_tokens} (NeMo reads 512 tokens and keeps 128)"
        )

    def encode(frozen: Any, batch: TextArrays):
        ids, mask = jnp.asarray(batch["text_ids"]), jnp.asarray(batch["text_mask"])
        short_mask = mask[:, :max_tokens]
        apply: Any = functools.partial(model.apply, frozen)
        encode_all = lambda: apply(ids, mask)[:, :max_tokens]
        # Most captions are short, and padding does not affect the tokens before it.
        encode_short = lambda: apply(ids[:, :max_tokens], short_mask)
        if ids.shape[1] <= max_tokens:
            text = encode_all()
        else:
            text = jax.lax.cond(mask[:, max_tokens:].any(), encode_all, encode_short)
        return jnp.where(short_mask[..., None], text, 0), short_mask

    to_ids = functools.partial(tokenizer, length=read_tokens)
    cut_off = functools.partial(tokenizer.cut_off, length=max_tokens)
    return TextEncoder("t5", model.width, max_tokens, to_ids, frozen, encode, cut=True, cut_off=cut_off)


def from_state(
    state: StateDict, config: Mapping[str, Any], dtype: DTypeLike = jnp.float32
) -> tuple[T5Encoder, list[Entry]]:
    """Return the network for a Hugging Face state dict, and the table that converts its weights.

    Sizes are read from the arrays' shapes. `config` (config.json) supplies the activation, the
    largest distance of the buckets, and epsilon. `dtype` is the type of matrix products.

    Raises:
        ValueError: the weights are not T5's, or disagree with the config.
    """
    state = used(state)
    relative, q, wi = _REQUIRED
    gated = _mlp_in(0, "wi_0") in state
    missing = [n for n in (_EMBEDDING, relative, q, _mlp_in(0, "wi_0") if gated else wi) if n not in state]
    if missing:
        raise ValueError(
            f"the weights are not a T5 encoder's: their {len(state)} arrays lack "
            f"{', '.join(missing)}. Choose a folder of a T5"
        )
    num_buckets, num_heads = state[relative].shape
    activation, config_gated = _activation(config)
    if gated != config_gated:
        raise ValueError(
            f"config.json specifies {'a gated' if config_gated else 'a plain'} feed-forward layer, "
            f"but the weights have {'a gated' if gated else 'a plain'} one: use the config.json of "
            "these weights"
        )
    model = T5Encoder(
        vocab_size=state[_EMBEDDING].shape[0],
        width=state[_EMBEDDING].shape[1],
        mlp_width=state[_mlp_in(0, "wi_0" if gated else "wi")].shape[0],
        head_dim=state[q].shape[0] // num_heads,
        num_heads=num_heads,
        num_layers=1 + max(int(n.split(".")[2]) for n in state if n.startswith("encoder.block.")),
        num_buckets=num_buckets,
        max_distance=config.get("relative_attention_max_distance", 128),
        activation=activation,
        gated=gated,
        eps=config.get("layer_norm_epsilon", 1e-6),
        dtype=dtype,
    )
    pretrained.check_config(
        config,
        {
            "vocab_size": model.vocab_size,
            "d_model": model.width,
            "d_ff": model.mlp_width,
            "d_kv": model.head_dim,
            "num_heads": model.num_heads,
            "num_layers": model.num_layers,
            "relative_attention_num_buckets": model.num_buckets,
        },
    )
    return model, t5_table(model)


def t5_table(model: T5Encoder) -> list[Entry]:
    """Return the conversion table between the network's parameters and Hugging Face's arrays."""
    name_of = lambda path: torch_weights.rename(path, _RULES)
    return torch_weights.table(abstract_params(model), name_of)


def used(state: StateDict) -> dict[str, np.ndarray]:
    """Return the encoder's arrays from a Hugging Face state dict of T5.

    State dicts may store the token embedding under either of two names; the result always names it
    "shared.weight".
    """
    used = {n: a for n, a in state.items() if n.startswith("encoder.") and n != _ALIAS}
    for name in (_ALIAS, _EMBEDDING):
        if name in state:
            used[_EMBEDDING] = state[name]
    return used


def abstract_params(model: T5Encoder) -> Any:
    """Return the shapes and types of the model's parameters, without allocating the parameters."""
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return jax.eval_shape(lambda t: model.init(jax.random.key(0), t, t), tokens)


def distance_buckets(length: int, num_buckets: int, max_distance: int) -> Int[np.ndarray, "_"]:
    """Return the bucket of each distance key - query, from -(length - 1) to length - 1.

    The upper half of the buckets is for keys after the query. In each half, the first half of the
    buckets holds one distance each. The other buckets are log-spaced up to `max_distance`, and the
    last one also holds all larger distances.
    """
    half = num_buckets // 2
    exact = half // 2
    offset = np.arange(-(length - 1), length)
    distance = np.abs(offset)
    # Distances that are powers of two lie on bucket edges, so rounding decides their bucket. These
    # float32 operations, in this order, round as in transformers.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    spaced = ratio / np.float32(math.log(max_distance / exact)) * np.float32(half - exact)
    bucket = np.where(distance < exact, distance, np.minimum(exact + spaced.astype(int), half - 1))
    return bucket + half * (offset > 0)


class RMSNorm(nn.Module):
    """RMS norm, x / rms(x) * scale, in float32, without subtracting the mean and without a bias."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalise the last axis; `eps` keeps a row of zeros at zero."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],)).astype(jnp.float32)
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + self.eps) * scale


class _Attention(nn.Module):
    num_heads: int
    head_dim: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x, bias):
        split = lambda y: y.reshape(*y.shape[:2], self.num_heads, self.head_dim)
        inner = self.num_heads * self.head_dim
        linear = lambda name: Linear(inner, False, self.dtype, name=name)
        q, k, v = (split(linear(name)(x)) for name in "qkv")  # each [B, L, N, K]
        out = attend(q, k, v, bias, scale=1.0, dtype=self.dtype)  # [B, L, NK]
        return Linear(x.shape[-1], False, self.dtype, name="o")(out)  # [B, L, D]


class _Mlp(nn.Module):
    width: int
    activation: str
    gated: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x):
        linear = lambda name, width=self.width: Linear(width, False, self.dtype, name=name)
        act = ACTIVATIONS[self.activation]
        h = act(linear("wi_0")(x)) * linear("wi_1")(x) if self.gated else act(linear("wi")(x))
        return linear("wo", x.shape[-1])(h)  # [B, L, mlp_width] -> [B, L, D]


_EMBEDDING = "shared.weight"
_ALIAS = "encoder.embed_tokens.weight"
_REQUIRED = (
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "encoder.block.0.layer.0.SelfAttention.q.weight",
    "encoder.block.0.layer.1.DenseReluDense.wi.weight",
)


_RULES = (
    ("token_embedding", _EMBEDDING),
    ("relative_bias", _REQUIRED[0]),
    ("final_norm", "encoder.final_layer_norm"),
    (r"block_(\d+)_attention/(\w)", r"encoder.block.\1.layer.0.SelfAttention.\2"),
    (r"block_(\d+)_attention_norm", r"encoder.block.\1.layer.0.layer_norm"),
    (r"block_(\d+)_mlp/(\w+)", r"encoder.block.\1.layer.1.DenseReluDense.\2"),
    (r"block_(\d+)_mlp_norm", r"encoder.block.\1.layer.1.layer_norm"),
)


def _mlp_in(i: int, name: str) -> str:
    return f"encoder.block.{i}.layer.1.DenseReluDense.{name}.weight"


def _activation(config: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the activation's name, and whether the feed-forward layer is gated, from config.json.

    In config.json, the name "gated-gelu" means GELU's tanh approximation.
    """
    name = config.get("feed_forward_proj", "relu")
    gated, act = name.startswith("gated-"), name.removeprefix("gated-")
    act = "gelu_new" if name == "gated-gelu" else act
    if act not in ACTIVATIONS:
        raise ValueError(
            f"feed_forward_proj in config.json is {name!r}: supported are "
            f"{', '.join(ACTIVATIONS)}, each with or without the prefix gated-"
        )
    return act, gated
