"""Find known words that mean nearly the same as a word, by the sentence vectors of MiniLM."""

import functools
import importlib.util
import threading
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from diffusion_jax.text import bert

LARGEST = 5_000
"""The largest number of known words. Their vectors take some milliseconds each on a CPU."""
_LOCK = threading.Lock()  # While one thread computes the vectors, the others wait for them.
_LEAST = 0.5  # The smallest cosine of the vectors of similar words.
_BATCH, _WIDTH, _MAX_TOKENS = 32, 384, 8
Nearest = Callable[[str, int], list[str]]


def available() -> bool:
    """Return whether the package with MiniLM's weights is installed."""
    return importlib.util.find_spec(bert.PACKAGE) is not None


def among(words: frozenset[str]) -> Nearest:
    """Return a function that maps a word and a number n to the n words of nearest meaning.

    The function returns fewer than n words if the other words differ too much in meaning. The first
    call of `among` for a set of words takes seconds, because it reads MiniLM's weights and computes
    the words' vectors.
    """
    with _LOCK:
        return _among(words)


@functools.lru_cache(maxsize=4)
def _among(words: frozenset[str]) -> Nearest:
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

    known = sorted(words)
    of_known = vectors(known)

    def nearest(word: str, n: int) -> list[str]:
        cosines = of_known @ vectors([word])[0]
        best = np.argsort(-cosines, kind="stable")[:n]
        return [known[i] for i in best if cosines[i] >= _LEAST]

    return nearest
