"""The text encoders by their names in configs, run in training or looked up in a store."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diffusion_jax.precache import store
from diffusion_jax.text import clip, hashed, precomputed, t5
from diffusion_jax.text.encoder import TextEncoder


class Text(NamedTuple):
    """The text encoder, and how often training drops the text.

    `weights` (a folder or a Hugging Face name), `read_tokens` (what T5 reads of a text, of which
    `max_tokens` are kept) and `dtype` are for pretrained encoders alone. Where `store` is not
    empty, captions are looked up in this store of the encoder's embeddings.
    """

    encoder: str
    weights: str
    store: str
    width: int
    max_tokens: int
    read_tokens: int
    dtype: str
    drop_prob: float


ENCODERS: Mapping[str, Callable[[Text], TextEncoder]] = {
    "hashed": lambda t: hashed.encoder(t.width, t.max_tokens),
    "precomputed": lambda t: precomputed.encoder(t.width, t.max_tokens),
    "t5": lambda t: t5.encoder(
        t.weights,
        width=t.width,
        max_tokens=t.max_tokens,
        read_tokens=t.read_tokens,
        dtype=t.dtype,
    ),
    "clip": lambda t: clip.encoder(
        t.weights, width=t.width, max_tokens=t.max_tokens, layer="last", dtype=t.dtype
    ),
    "clip_penultimate": lambda t: clip.encoder(
        t.weights, width=t.width, max_tokens=t.max_tokens, layer="penultimate", dtype=t.dtype
    ),
}
# The fields that decide, beside weights and tokenizer, what an encoder makes of a caption.
_RULES = {
    "hashed": ("width", "max_tokens"),
    "t5": ("width", "max_tokens", "read_tokens", "dtype"),
    "clip": ("width", "max_tokens", "dtype"),
    "clip_penultimate": ("width", "max_tokens", "dtype"),
}


def open_encoder(text: Text) -> TextEncoder:
    """What training conditions on; weights are opened and checked, not read.

    ValueError or FileNotFoundError if there is no such encoder or store, or the store was made in
    another way. Its weights are compared where text.weights is a folder here, and are not needed.
    """
    if not text.store:
        return ENCODERS[text.encoder](text)
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
    encoder = ENCODERS[text.encoder](text)
    if text.store and (pathlib.Path(text.store) / store.MANIFEST).is_file():
        stored = store.read_manifest(pathlib.Path(text.store))["identity"]
        store.check_identity(text.store, stored, identity(text, encoder))
    return encoder


def identity(text: Text, encoder: TextEncoder) -> store.Identity:
    """All that decides what `encoder`, opened by `text`, makes of a caption."""
    return {**rule(text), **store.fingerprint(encoder)}


def rule(text: Text) -> dict[str, Any]:
    """The encoder's name, and the fields that decide what it makes of a caption.

    ValueError if it reads no captions.
    """
    if text.encoder not in _RULES:
        raise ValueError(
            f"text.store is {text.store!r} and text.encoder is {text.encoder!r}, which reads no "
            f"captions: leave text.store empty, or choose from {', '.join(_RULES)}"
        )
    return {"encoder": text.encoder, **{f: getattr(text, f) for f in _RULES[text.encoder]}}
