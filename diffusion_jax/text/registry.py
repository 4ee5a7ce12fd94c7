"""The text encoders by their names in configs, run in training or looked up in a store."""

import importlib
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from diffusion_jax import settings
from diffusion_jax.settings import Text
from diffusion_jax.text.encoder import TextEncoder


class Kind(NamedTuple):
    """A module of this package whose `encoder` makes a TextEncoder, and the arguments of that."""

    module: str
    fields: tuple[str, ...]
    """The fields of `Text` that it takes: with its weights they decide what becomes of a text."""
    options: Mapping[str, str] = MappingProxyType({})
    reads_captions: bool = True


_CLIP = ("weights", "width", "max_tokens", "dtype")
ENCODERS: Mapping[str, Kind] = {
    "hashed": Kind("hashed", ("width", "max_tokens")),
    "precomputed": Kind("precomputed", ("width", "max_tokens"), reads_captions=False),
    "t5": Kind("t5", ("weights", "width", "max_tokens", "read_tokens", "dtype")),
    "clip": Kind("clip", _CLIP, {"layer": "last"}),
    "clip_penultimate": Kind("clip", _CLIP, {"layer": "penultimate"}),
}


def check(text: Text) -> None:
    """ValueError for values that cannot be; weights and stores are not opened."""
    settings.one_of("text.encoder", text.encoder, ENCODERS)
    settings.one_of("text.dtype", text.dtype, ("bfloat16", "float32"))
    settings.positive(text__width=text.width, text__max_tokens=text.max_tokens)
    settings.within(0, 1, text__drop_prob=text.drop_prob)


def make_encoder(text: Text) -> TextEncoder:
    """The encoder of this name; its module is imported here, its weights are opened, not read."""
    kind = ENCODERS[text.encoder]
    module = importlib.import_module(f"diffusion_jax.text.{kind.module}")
    return module.encoder(**{f: getattr(text, f) for f in kind.fields}, **kind.options)


def open_encoder(text: Text) -> TextEncoder:
    """What training conditions on; weights are opened and checked, not read.

    ValueError or FileNotFoundError if there is no such encoder or store, or the store was made in
    another way. Its weights are compared where text.weights is a folder here, and are not needed.
    """
    if not text.store:
        return make_encoder(text)
    from diffusion_jax.precache import store  # Only a text with a store needs it.

    wanted = rule(text)
    opened = store.Store(text.store)
    store.check_identity(text.store, opened.identity, wanted)
    if text.weights and pathlib.Path(text.weights).is_dir():
        open_online(text)
    return store.encoder(opened)


def open_online(text: Text) -> TextEncoder:
    """The encoder itself, for texts that are in no store, such as the prompts of sampling.

    ValueError or FileNotFoundError if there is none, or it is not the one that made text.store,
    as far as that is still there.
    """
    if text.store and not text.weights and "dtype" in rule(text):
        raise ValueError(
            f"the embeddings in {text.store} were made by {text.encoder!r}, which new texts need "
            "too: say where its weights are with text.weights (in sampling --text_weights=FOLDER)"
        )
    encoder = make_encoder(text)
    if not text.store:
        return encoder
    from diffusion_jax.precache import store

    if (pathlib.Path(text.store) / store.MANIFEST).is_file():
        stored = store.read_manifest(pathlib.Path(text.store))["identity"]
        store.check_identity(text.store, stored, identity(text, encoder))
    return encoder


def identity(text: Text, encoder: TextEncoder) -> dict[str, Any]:
    """All that decides what `encoder`, opened by `text`, makes of a caption."""
    from diffusion_jax.precache import store

    return {**rule(text), **store.fingerprint(encoder)}


def rule(text: Text) -> dict[str, Any]:
    """The encoder's name, and the fields that decide what it makes of a caption.

    ValueError if it reads no captions.
    """
    kind = ENCODERS[text.encoder]
    if not kind.reads_captions:
        readers = [name for name, other in ENCODERS.items() if other.reads_captions]
        raise ValueError(
            f"text.store is {text.store!r} and text.encoder is {text.encoder!r}, which reads no "
            f"captions: leave text.store empty, or choose from {', '.join(readers)}"
        )
    fields = [field for field in kind.fields if field != "weights"]
    return {"encoder": text.encoder, **{field: getattr(text, field) for field in fields}}
