"""The text encoders by their names in configs."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from diffusion_jax.config import named
from diffusion_jax.config.settings import Text
from diffusion_jax.text.encoder import TextEncoder


class Kind(NamedTuple):
    """A module of this package whose `encoder` makes a TextEncoder, and the arguments of that."""

    module: str
    fields: tuple[str, ...]
    """The fields of `Text` that it takes: with its weights they decide what becomes of a text."""
    options: Mapping[str, str] = MappingProxyType({})
    packaged: bool = False
    """Whether a Python package provides the weights when text.weights is empty."""

    @property
    def pretrained(self) -> bool:
        """Whether it has weights, which others may have run before training."""
        return "weights" in self.fields


_CLIP = ("weights", "width", "max_tokens", "dtype")
ENCODERS: Mapping[str, Kind] = {
    "hashed": Kind("hashed", ("width", "max_tokens")),
    "t5": Kind("t5", ("weights", "width", "max_tokens", "read_tokens", "dtype")),
    "minilm": Kind("bert", _CLIP, packaged=True),
    "clip": Kind("clip", _CLIP, {"layer": "last"}),
    "clip_penultimate": Kind("clip", _CLIP, {"layer": "penultimate"}),
}


def check(text: Text) -> None:
    """ValueError for values that cannot be; weights and stores are not opened."""
    if text.encoder == "precomputed":
        raise ValueError(
            "text.encoder is 'precomputed', which is no encoder: name the one that made the "
            "embeddings, such as t5; that they lie beside the images is said by data.text, such as "
            "npy, and that they are in a store by text.store"
        )
    named.one_of("text.encoder", text.encoder, ENCODERS)


def make_encoder(text: Text) -> TextEncoder:
    """The encoder of this name; its module is imported here, its weights are opened, not read."""
    kind = ENCODERS[text.encoder]
    module = importlib.import_module(f"diffusion_jax.text.{kind.module}")
    return module.encoder(**{f: getattr(text, f) for f in kind.fields}, **kind.options)
