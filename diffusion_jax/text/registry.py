"""Build text encoders from their names in configs."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

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
