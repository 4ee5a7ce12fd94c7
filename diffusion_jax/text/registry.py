"""Build text encoders from their names in configs."""

import importlib
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from diffusion_jax.config import named
from diffusion_jax.config.settings import Text
from diffusion_jax.text.encoder import TextEncoder, read_learned


class EncoderKind(NamedTuple):
    """A kind of text encoder, which the function `encoder` of a module in this package builds."""

    module: str
    """The name of the module."""
    fields: tuple[str, ...]
    """The fields of the config group `text` that are passed to the function `encoder`. Embeddings
    depend only on these fields, on `options` and on the weights."""
    options: Mapping[str, str] = MappingProxyType({})
    """Further arguments of the function `encoder`."""
    packaged: bool = False
    """True if a Python package provides the weights when text.weights is empty."""

    @property
    def pretrained(self) -> bool:
        """True if the encoder has pretrained weights."""
        return "weights" in self.fields


_CLIP = ("weights", "width", "max_tokens", "dtype")
ENCODERS: Mapping[str, EncoderKind] = {
    "hashed": EncoderKind("hashed", ("width", "max_tokens")),
    "t5": EncoderKind("t5", ("weights", "width", "max_tokens", "read_tokens", "dtype")),
    "minilm": EncoderKind("bert", _CLIP, packaged=True),
    "clip": EncoderKind("clip", _CLIP, {"layer": "last"}),
    "clip_penultimate": EncoderKind("clip", _CLIP, {"layer": "penultimate"}),
}

_MODEL_TYPES = {"t5": "t5", "clip": "clip", "clip_text_model": "clip", "bert": "bert"}
"""Maps the field model_type of config.json to a module of this package."""


def check(text: Text) -> None:
    """Check a config's text settings without opening weights or stores.

    Raises:
        ValueError: text.encoder is not a key of ENCODERS, or cannot learn text.learned_tokens.
    """
    if text.encoder == "precomputed":
        raise ValueError(
            "text.encoder is 'precomputed': name the encoder that computed the embeddings, such as "
            "t5. If the embeddings are stored with the images, also set data.text to their field, "
            "such as npy. If they are in a store, also set text.store to its folder"
        )
    named.one_of("text.encoder", text.encoder, ENCODERS)
    if text.learned_tokens and ENCODERS[text.encoder].module != "clip":
        raise ValueError(
            f"text.learned_tokens is {text.learned_tokens!r}, but text.encoder is "
            f"{text.encoder!r}: only CLIP can learn a word"
        )
    if text.learned_tokens:
        read_learned(text.learned_tokens)


def make_encoder(text: Text) -> TextEncoder:
    """Build the text encoder that a config's text group names.

    This imports the encoder's module and opens the encoder's weights. The arrays are read later,
    when they are placed on devices.
    """
    kind = ENCODERS[text.encoder]
    module = importlib.import_module(f"diffusion_jax.text.{kind.module}")
    # Stores of embeddings depend on kind.fields. Words that are learned are never stored.
    learned = {"learned_tokens": text.learned_tokens} if text.learned_tokens else {}
    return module.encoder(**{f: getattr(text, f) for f in kind.fields}, **kind.options, **learned)


def load(
    weights: str | os.PathLike[str], *, max_tokens: int | None = None, dtype: DTypeLike = jnp.float32
) -> TextEncoder:
    """Load a T5, CLIP or BERT, and place its weights on the default device.

    Its embeddings are those of transformers' T5EncoderModel, CLIPTextModel or BertModel, except
    that they are 0 at the padding of T5 and BERT.

    Args:
        weights: a folder of transformers or OpenCLIP, or a Hugging Face name. In a pipeline of
            diffusers, it is the folder text_encoder or text_encoder_2.
        max_tokens: texts are cut or padded to this number of tokens. The default is 512 for T5, and
            otherwise the number of the model's positions.
        dtype: the type in which weights are stored and matrix products computed.

    Raises:
        FileNotFoundError: the folder lacks weights, config or tokenizer.
        ValueError: the weights are of another kind, or damaged, or `max_tokens` is too large.
    """
    from diffusion_jax.weights import pretrained  # Tasks import this module without weights.

    folder = pretrained.locate(weights)
    config = folder / "config.json"
    kind = pretrained.read_json(config).get("model_type", "") if config.is_file() else ""
    if not kind and (folder / "open_clip_config.json").is_file():
        kind = "clip"
    if kind not in _MODEL_TYPES:
        raise ValueError(
            f"model_type is {kind!r} in {config}: text encoders of the types {', '.join(_MODEL_TYPES)} can be loaded"
        )
    module = importlib.import_module(f"diffusion_jax.text.{_MODEL_TYPES[kind]}")
    options = {"read_tokens": max_tokens} if kind == "t5" and max_tokens else {}
    encoder = module.encoder(folder, max_tokens=max_tokens, dtype=dtype, **options)
    return encoder._replace(frozen=jax.tree.map(jnp.asarray, encoder.frozen))
