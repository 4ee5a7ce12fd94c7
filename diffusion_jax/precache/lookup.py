"""Text encoders opened for a config: run in training, or their embeddings looked up in a store."""

import pathlib
from typing import Any

from diffusion_jax.precache import store
from diffusion_jax.settings import Text
from diffusion_jax.text import registry
from diffusion_jax.text.encoder import TextEncoder


def open_encoder(text: Text) -> TextEncoder:
    """The encoder that training conditions on; weights are opened and checked, not read.

    ValueError or FileNotFoundError if there is no such encoder or store, or the store was made in
    another way. Its weights are compared where text.weights is a folder here, and are not needed.
    """
    if not text.store:
        return registry.make_encoder(text)
    identity = rule(text)
    opened = store.Store(text.store)
    store.check_identity(text.store, opened.identity, identity)
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
    encoder = registry.make_encoder(text)
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
    kind = registry.ENCODERS[text.encoder]
    if not kind.reads_captions:
        readers = [name for name, other in registry.ENCODERS.items() if other.reads_captions]
        raise ValueError(
            f"text.store is {text.store!r} and text.encoder is {text.encoder!r}, which reads no "
            f"captions: leave text.store empty, or choose from {', '.join(readers)}"
        )
    fields = [field for field in kind.fields if field != "weights"]
    return {"encoder": text.encoder, **{field: getattr(text, field) for field in fields}}
