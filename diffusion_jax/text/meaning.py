"""Find the phrases whose meaning is nearest to that of a word, with MiniLM's sentence vectors."""

import functools
import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from diffusion_jax.text import bert

LARGEST = 5_000
"""The largest number of phrases that callers should use: a CPU takes milliseconds per phrase."""
_LOCK = threading.Lock()  # While one thread computes the vectors, the others wait for them.
_LEAST = 0.45  # If the cosine of two vectors is smaller, their meanings differ too much.
_BATCH, _WIDTH, _MAX_TOKENS = 32, 384, 8


class Meanings(NamedTuple):
    """Functions that look up a word in MiniLM and in a fixed set of phrases."""

    nearest: Callable[[str, int], list[str]]
    """Maps a word and a number n to the n phrases nearest to it in meaning, the nearest first.

    Phrases that differ too much in meaning are left out, so there may be fewer than n.
    """
    is_word: Callable[[str], bool]
    """Returns whether a word is so frequent in English that MiniLM has a token for it."""


def available() -> bool:
    """Return whether the package with MiniLM's weights is installed."""
    return importlib.util.find_spec(bert.PACKAGE) is not None


def among(phrases: frozenset[str]) -> Meanings:
    """Return the functions that look up a word, for a set of phrases to compare words with.

    The first call for a set of phrases takes seconds, because it reads MiniLM's weights and
    computes the phrases' vectors.
    """
    with _LOCK:
        return _among(phrases)


@functools.lru_cache(maxsize=4)
def _among(phrases: frozenset[str]) -> Meanings:
    encoder = bert.encoder("", width=_WIDTH, max_tokens=_MAX_TOKENS, dtype=np.float32)

    frozen = jax.tree.map(jnp.asarray, encoder.frozen)

    @jax.jit
    def encode(frozen, batch):
        states, mask = encoder.encode(frozen, batch)
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return mean / jnp.linalg.norm(mean, axis=1, keepdims=True)

    def vectors(texts: Sequence[str]) -> Float[np.ndarray, "N 384"]:
        padded = [*texts, *[""] * (-len(texts) % _BATCH)]
        batches = [padded[i : i + _BATCH] for i in range(0, len(padded), _BATCH)]
        return np.concatenate([encode(frozen, encoder.tokenize(b)) for b in batches])[: len(texts)]

    known = sorted(phrases)
    of_known = vectors(known)

    def nearest(word: str, n: int) -> list[str]:
        cosines = of_known @ vectors([word])[0]
        best = np.argsort(-cosines, kind="stable")[:n]
        return [known[i] for i in best if cosines[i] >= _LEAST]

    def is_word(word: str) -> bool:
        return int(encoder.tokenize([word])["text_mask"].sum()) == 3  # [CLS], the word and [SEP].

    return Meanings(nearest, is_word)
