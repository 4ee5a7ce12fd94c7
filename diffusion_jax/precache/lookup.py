"""Text encoders opened for a config: run in training, or their embeddings taken from elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diffusion_jax.config.settings import Text
from diffusion_jax.machine import files
from diffusion_jax.precache import encode, store
from diffusion_jax.text import precomputed, registry
from diffusion_jax.text.encoder import TextEncoder

Tokenize = Callable[[Sequence[str]], dict[str, np.ndarray]]
_TOKENS = 8192  # Of prompts that a device encodes at once.
_CHECKED = 256  # Prompts that are looked up at once, to see that they are there.


def open_encoder(text: Text, embedded: bool = False) -> TextEncoder:
    """The encoder that training conditions on; weights are opened and checked, not read.

    Where its embeddings come with the data (`embedded`) or from text.store, none is opened, and its
    weights are not needed; they are compared with the store's where text.weights is a folder here.
    ValueError or FileNotFoundError if there is no such encoder or store, or the store was made in
    another way.
    """
    if embedded:
        return precomputed.encoder(text.width, text.max_tokens, text.encoder)
    if not text.store:
        return registry.make_encoder(text)
    opened, wanted = store.Store(files.local(text.store)), rule(text)
    if text.weights and files.path(text.weights).is_dir():
        wanted = identity(text, registry.make_encoder(text))
    store.check_identity(text.store, opened.identity, wanted)
    return store.encoder(opened)


def open_online(text: Text) -> TextEncoder:
    """The encoder itself, for texts that no data hold, such as the prompts of sampling.

    ValueError or FileNotFoundError if there is none, or it is not the one that made text.store,
    as far as that is still there.
    """
    kind = registry.ENCODERS[text.encoder]
    if kind.pretrained and not kind.packaged and not text.weights:
        made = f"in {text.store}" if text.store else "of training"
        raise ValueError(
            f"the embeddings {made} were made by {text.encoder!r}, which new texts need too: say "
            f"where its weights are, those {text.width} wide, with --text_weights=FOLDER to sample "
            "and evaluate, --config.text.weights=FOLDER to train; a Hugging Face name will do. "
            "Pickles become such a folder by\n  python -m diffusion_jax.text convert FOLDER OUT"
        )
    encoder = registry.make_encoder(text)
    if text.store and (files.path(text.store) / store.MANIFEST).is_file():
        stored = store.read_manifest(files.path(text.store))["identity"]
        store.check_identity(text.store, stored, identity(text, encoder))
    return encoder


def open_prompts(
    text: Text, encoder: TextEncoder, embedded: bool, prompts: Sequence[str]
) -> Tokenize:
    """How training, which `encoder` conditions, reads prompts of these, in any order and number.

    Where embeddings come with the data, those of the prompts are made here and now by the encoder
    itself, which is on the devices no longer than that; so that its place is free in training.
    ValueError if it is not to be had, or a prompt is not in text.store.
    """
    if not embedded:
        for first in range(0, len(prompts) if text.store else 0, _CHECKED):
            encoder.tokenize(prompts[first : first + _CHECKED])
        return encoder.tokenize
    different = list(dict.fromkeys(prompts))
    rows = encode.on_own_devices(open_online(text), "float32", _TOKENS)(different)
    each = np.split(np.asarray(rows.values), np.cumsum(rows.tokens)[:-1])  # [tokens, D] of each
    arrays = dict(zip(different, each, strict=True))
    return lambda texts: encoder.tokenize([arrays[prompt] for prompt in texts])


def identity(text: Text, encoder: TextEncoder) -> store.Identity:
    """All that decides what `encoder`, opened by `text`, makes of a caption."""
    return {**rule(text), **store.fingerprint(encoder)}


def rule(text: Text) -> dict[str, Any]:
    """The encoder's name, and the fields that decide what it makes of a caption."""
    fields = [field for field in registry.ENCODERS[text.encoder].fields if field != "weights"]
    return {"encoder": text.encoder, **{field: getattr(text, field) for field in fields}}
