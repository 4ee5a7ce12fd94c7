"""Open a config's text encoder, which computes embeddings or looks them up in a store."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diffusion_jax import files
from diffusion_jax.config.settings import Text
from diffusion_jax.data import columns
from diffusion_jax.data.captions import Tags, every
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.precache import encode, store
from diffusion_jax.text import precomputed, registry
from diffusion_jax.text.encoder import TextEncoder, read_learned

Tokenize = Callable[[Sequence[str]], dict[str, np.ndarray]]
_TOKENS = 8192  # Tokens per device and batch when encoding prompts.
_CHECKED = 256  # Texts per lookup when checking that a store holds them.
_SAMPLE = 4096  # Captions of the data to check, evenly spread.


def open_encoder(text: Text, embedded: bool = False) -> TextEncoder:
    """Return the text encoder for training. Its weights are opened and checked, but not read.

    If embeddings come with the data or from text.store, the encoder needs no weights. If both
    text.store and text.weights are set and the weights are a folder, the store must have been made
    with these weights.

    Args:
        text: The config's text group.
        embedded: Whether the data set holds embeddings instead of captions.

    Raises:
        ValueError: The weights or the store do not match the config's text group.
        FileNotFoundError: The weights or the store are missing.
    """
    if embedded:
        return precomputed.encoder(text.width, text.max_tokens, text.encoder)
    if not text.store:
        return registry.make_encoder(text)
    opened, wanted = store.Store(files.local(text.store)), rule(text)
    if text.weights and files.path(text.weights).is_dir():
        wanted = identity(text, registry.make_encoder(text))
    columns.check_identity(text.store, opened.identity, wanted, store.KIND)
    return opened.encoder()


def open_online(text: Text) -> TextEncoder:
    """Return the text encoder with its weights, to encode texts whose embeddings are not stored.

    Raises:
        ValueError: The encoder needs weights and text.weights is empty, or text.store was made with
            another encoder or other weights.
        FileNotFoundError: The weights are missing.
    """
    kind = registry.ENCODERS[text.encoder]
    if kind.pretrained and not kind.packaged and not text.weights:
        where = f"in {text.store}" if text.store else "of training"
        raise ValueError(
            f"the embeddings {where} were made by {text.encoder!r}, and new texts need the same "
            f"encoder: give its weights, of width {text.width}, with --text_weights=FOLDER "
            "(sampling and evaluation) or --config.text.weights=FOLDER (training); FOLDER may be "
            "a Hugging Face name"
        )
    encoder = registry.make_encoder(text)
    if text.store and (files.path(text.store) / columns.CARD).is_file():
        stored = columns.read_identity(files.path(text.store), store.KIND)
        columns.check_identity(text.store, stored, identity(text, encoder), store.KIND)
    return encoder


def check_captions(text: Text, encoder: TextEncoder, pictures: Pictures) -> None:
    """Raise ValueError if text.store lacks a caption of the data, such as one that was edited.

    Also raise ValueError if no caption has the word of text.learned_tokens. At most _SAMPLE
    captions are checked, evenly spread over the data. Otherwise, nothing is.
    """
    rows = np.unique(np.linspace(0, len(pictures) - 1, _SAMPLE).astype(np.int64))
    for first in range(0, len(rows) if text.store else 0, _CHECKED):
        texts = itertools.chain(*map(every, pictures.texts(rows[first : first + _CHECKED])))
        encoder.tokenize([one for one in texts if one])  # "" stands for a damaged caption, too.
    if text.learned_tokens:
        word = read_learned(text.learned_tokens).word
        texts = list(itertools.chain(*map(every, pictures.texts(rows))))
        if word in encoder.unused(encoder.tokenize(texts)):
            raise ValueError(
                f"no caption of the data contains {word}, the word of text.learned_tokens: write "
                f"captions such as 'a photo of {word}'"
            )
        data = pictures.data
        if data is not None and data.tag_drop_prob:
            tags = Tags(keep=data.keep_tags)
            for one in texts:
                if any(word.lower() in tag.lower() for tag in tags.split(one)[1]):
                    raise ValueError(
                        f"data.tag_drop_prob={data.tag_drop_prob:g} leaves out {word}, the word of "
                        f"text.learned_tokens, from captions such as {one!r:.60}: write it in the "
                        "first tag and set data.keep_tags=1, or set data.tag_drop_prob=0"
                    )


def open_prompts(text: Text, encoder: TextEncoder, embedded: bool, prompts: Sequence[str]) -> Tokenize:
    """Return a function that maps a list of texts, all from `prompts`, to the inputs of `encoder`.

    If the data set holds embeddings (`embedded`), `encoder` expects embeddings. The prompts are
    then encoded now, so that the text encoder's weights take no memory during training.

    Raises:
        ValueError: The encoder needs weights and text.weights is empty, or text.store lacks a
            prompt.
    """
    if not embedded:
        for first in range(0, len(prompts) if text.store else 0, _CHECKED):
            encoder.tokenize(prompts[first : first + _CHECKED])
        return encoder.tokenize
    distinct = list(dict.fromkeys(prompts))
    rows = encode.on_own_devices(open_online(text), "float32", _TOKENS)(distinct)
    each = np.split(np.asarray(rows.values), np.cumsum(rows.tokens)[:-1])  # [tokens, D] per prompt
    arrays = dict(zip(distinct, each, strict=True))
    return lambda texts: encoder.tokenize([arrays[prompt] for prompt in texts])


def identity(text: Text, encoder: TextEncoder) -> columns.Identity:
    """Return the values that determine the embedding of a text.

    They are the items of `rule(text)`, and the hashes "weights" and "tokenizer" from
    store.fingerprint.
    """
    return {**rule(text), **store.fingerprint(encoder)}


def rule(text: Text) -> dict[str, Any]:
    """Return the encoder's name and those fields of `text` that affect embeddings, keyed by name.

    The field `weights` is not included.
    """
    fields = [field for field in registry.ENCODERS[text.encoder].fields if field != "weights"]
    return {"encoder": text.encoder, **{field: getattr(text, field) for field in fields}}
