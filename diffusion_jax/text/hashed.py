"""A text encoder that maps words to fixed random signs. It needs no download and no training.

The vector of a word depends only on the word's hash and position, so every word of every language
has a vector. Vectors of different words are nearly orthogonal: the absolute value of their cosine
is about 1 / sqrt(D), where D is the width.
"""

import functools
import hashlib
import re
import unicodedata
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from diffusion_jax.text.encoder import TextArrays, TextEncoder

_WORD = re.compile(r"[^\W_]+")


def encoder(width: int, max_tokens: int) -> TextEncoder:
    """Return a text encoder that maps each word to a vector of fixed random signs.

    The signs are computed from the word's hash and position. Batches hold the arrays of
    `tokenize`: "text_ids" and "text_mask".
    """

    def encode(frozen: tuple[()], batch: TextArrays):
        del frozen  # There are no weights: vectors are computed from hashes.
        ids, mask = jnp.asarray(batch["text_ids"]), jnp.asarray(batch["text_mask"])
        return embeddings(ids, mask, width), mask

    tokenize_to = functools.partial(tokenize, max_tokens=max_tokens)
    ignored = functools.partial(cut_off, max_tokens=max_tokens)
    return TextEncoder("hashed", width, max_tokens, tokenize_to, (), encode, cut=True, cut_off=ignored)


def words(text: str) -> list[str]:
    """Split a text into lower-case words. A word is a run of letters and digits."""
    return _WORD.findall(text.lower())


def tokenize(texts: Sequence[str], max_tokens: int) -> dict[str, np.ndarray]:
    """Split texts into lower-case words and return {"text_ids", "text_mask"}, both [B, L].

    The id of a word is its 32-bit hash, which is the same on every machine. The mask is True at
    words. At padding, the id is 0 and the mask is False.
    """
    ids = np.zeros((len(texts), max_tokens), np.uint32)
    mask = np.zeros((len(texts), max_tokens), bool)
    for row, text in enumerate(texts):
        hashes = _hashes(text)[:max_tokens]
        ids[row, : len(hashes)] = hashes
        mask[row, : len(hashes)] = True
    return {"text_ids": ids, "text_mask": mask}


def cut_off(texts: Sequence[str], max_tokens: int) -> list[str]:
    """Return the part of each text that the encoder ignores.

    The ignored part consists of all symbols such as emoji, followed by the text after the first
    `max_tokens` words. Punctuation between the first words is ignored too, but not returned.
    """
    ignored = []
    for text in texts:
        symbols = "".join(sign for sign in text if unicodedata.category(sign) == "So")
        surplus = [*_WORD.finditer(text)][max_tokens:]
        ignored.append(symbols + (text[surplus[0].start() :] if surplus else ""))
    return ignored


def embeddings(ids: UInt32[Array, "B L"], mask: Bool[Array, "B L"], width: int) -> Float[Array, "B L D"]:
    """Return the embeddings of words, given their ids. Values are +1 or -1, and 0 at padding.

    The first half of an embedding depends on the word alone. The second half is the product of
    signs of the word and signs of the position. Even the mean over tokens thus distinguishes "dog
    bites man" from "man bites dog".
    """
    length = ids.shape[1]
    # Positions have a separate key, so that no word's hash coincides with a position.
    key_words, key_positions = jax.random.split(jax.random.key(0))
    signs = _signs(key_words, ids.reshape(-1), width).reshape(*ids.shape, width)  # [B, L, D]
    flips = _signs(key_positions, jnp.arange(length, dtype=jnp.uint32), width)  # [L, D]
    flips = jnp.where(jnp.arange(width) < width // 2, 1, flips)
    return jnp.where(mask[..., None], signs * flips, 0)


@functools.lru_cache(maxsize=65536)
def _hashes(text: str) -> tuple[int, ...]:
    digests = (hashlib.blake2b(word.encode(), digest_size=4).digest() for word in words(text))
    return tuple(int.from_bytes(digest, "little") for digest in digests)


def _signs(key: jax.Array, ids: UInt32[Array, "N"], width: int) -> Float[Array, "N D"]:
    """Return a row of random signs, +1 or -1, for each id. A row depends on key and id alone."""
    # Each random 32-bit integer yields 32 signs.
    draw = lambda i: jax.random.bits(jax.random.fold_in(key, i), (-(-width // 32),), jnp.uint32)
    bits = jax.vmap(draw)(ids)  # [N, D/32]
    bits = (bits[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1  # [N, D/32, 32]
    return 1 - 2 * bits.reshape(len(ids), -1)[:, :width].astype(jnp.float32)
