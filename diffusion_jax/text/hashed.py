"""Hashed words: each word a fixed random vector of signs. Needs no download and no training.

A word is known by its hash alone, so any word of any language has a vector, different ones nearly
at right angles (their cosine is about 1 / sqrt(D)).
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

from diffusion_jax.text.encoder import Batch, TextEncoder

_WORD = re.compile(r"[^\W_]+")


def encoder(width: int, max_tokens: int) -> TextEncoder:
    """A TextEncoder whose batches hold "text_ids" and "text_mask"."""

    def encode(frozen: tuple[()], batch: Batch):
        del frozen  # No weights: a vector is computed from its word's hash.
        ids, mask = jnp.asarray(batch["text_ids"]), jnp.asarray(batch["text_mask"])
        return embeddings(ids, mask, width), mask

    tokenize_to = functools.partial(tokenize, max_tokens=max_tokens)
    lost = functools.partial(cut_off, max_tokens=max_tokens)
    return TextEncoder("hashed", width, max_tokens, tokenize_to, (), encode, cut=True, cut_off=lost)


def tokenize(texts: Sequence[str], max_tokens: int) -> dict[str, np.ndarray]:
    """Lower-case words, the runs of letters and digits, to {"text_ids", "text_mask"}, both [B, L].

    Ids are the words' 32-bit hashes, the same on every machine, and 0 at padded positions.
    """
    ids = np.zeros((len(texts), max_tokens), np.uint32)
    mask = np.zeros((len(texts), max_tokens), bool)
    for row, text in enumerate(texts):
        words = _hashes(text)[:max_tokens]
        ids[row, : len(words)] = words
        mask[row, : len(words)] = True
    return {"text_ids": ids, "text_mask": mask}


def cut_off(texts: Sequence[str], max_tokens: int) -> list[str]:
    """Symbols that are no words, such as emoji, and the words of each text that do not fit."""
    lost = []
    for text in texts:
        symbols = "".join(sign for sign in text if unicodedata.category(sign) == "So")
        beyond = [*_WORD.finditer(text)][max_tokens:]
        lost.append(symbols + (text[beyond[0].start() :] if beyond else ""))
    return lost


def embeddings(
    ids: UInt32[Array, "B L"], mask: Bool[Array, "B L"], width: int
) -> Float[Array, "B L D"]:
    """Unit-variance signs from the word; the second half of them is flipped by position.

    The first half says which word it is wherever it stands. The second half is a product of word
    and position, so that even the mean over tokens tells "dog bites man" from "man bites dog".
    """
    length = ids.shape[1]
    # Positions draw from a key of their own, so that no word's hash can coincide with one.
    key_words, key_positions = jax.random.split(jax.random.key(0))
    words = _signs(key_words, ids.reshape(-1), width).reshape(*ids.shape, width)  # [B, L, D]
    flips = _signs(key_positions, jnp.arange(length, dtype=jnp.uint32), width)  # [L, D]
    flips = jnp.where(jnp.arange(width) < width // 2, 1, flips)
    return jnp.where(mask[..., None], words * flips, 0)


@functools.lru_cache(maxsize=65536)
def _hashes(text: str) -> tuple[int, ...]:
    words = _WORD.findall(text.lower())
    digests = (hashlib.blake2b(word.encode(), digest_size=4).digest() for word in words)
    return tuple(int.from_bytes(digest, "little") for digest in digests)


def _signs(key: jax.Array, ids: UInt32[Array, "N"], width: int) -> Float[Array, "N D"]:
    """A row of +1 and -1 for each id, a function of the id alone: 32 signs from each drawn word."""
    draw = lambda i: jax.random.bits(jax.random.fold_in(key, i), (-(-width // 32),), jnp.uint32)
    bits = jax.vmap(draw)(ids)  # [N, D/32]
    bits = (bits[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1  # [N, D/32, 32]
    return 1 - 2 * bits.reshape(len(ids), -1)[:, :width].astype(jnp.float32)
