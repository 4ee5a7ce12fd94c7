"""Records kept from training, for a loss that tells learning from learning by heart."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt64

from diffusion_jax.data.pictures import Mixture, Pictures, Rows

_CHUNK = 2**22  # Numbers hashed at a time: 32 MB.


def split(pictures: Pictures, share: float) -> tuple[Pictures, Pictures]:
    """(for training, held out): about this share of the records, chosen by a hash of their keys.

    The choice is the same in every run and process, and no record's changes when others come or go.
    Of a mixture each part is split, but for pictures of a prior, all of which train. What replaces
    an unusable record in training is never held out.
    """
    if not share:
        return pictures, Subset(pictures, np.zeros(0, np.int64))
    if isinstance(pictures, Mixture):
        if pictures.part_counts:
            (own, *priors) = pictures.parts
            training, apart = split(own, share)
            return Mixture([training, *priors], pictures.weights, pictures.part_counts), apart
        pairs = [split(part, share) for part in pictures.parts]
        training, apart = ([pair[i] for pair in pairs] for i in (0, 1))
        return Mixture(training, pictures.weights), Mixture(apart, pictures.weights)
    chunks = (np.arange(i, min(i + _CHUNK, len(pictures))) for i in range(0, len(pictures), _CHUNK))
    apart = np.concatenate([c[hashed(pictures.keys(c)) < share] for c in chunks])
    pictures.keep_apart(apart)
    return Subset(pictures, apart, others=True), Subset(pictures, apart)


class Subset(Pictures):
    """Some pictures of a list, or all others, in its order."""

    def __init__(self, pictures: Pictures, indices: Int[np.ndarray, "N"], others: bool = False):
        """`indices` are sorted; with `others` it holds what they do not name."""
        self._pictures, self._indices, self._others = pictures, indices, others
        # How many pictures before each of `indices` are in the list of the others.
        self._before = indices - np.arange(len(indices))

    def __len__(self) -> int:
        """The number of pictures."""
        return len(self._pictures) - len(self._indices) if self._others else len(self._indices)

    def _inside(self, indices: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B"]:
        """The whole list's numbers of these."""
        if self._others:
            return indices + np.searchsorted(self._before, indices, side="right")
        return self._indices[indices]

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[Rows, Sequence[Any]]:
        """The pictures of these indices and their texts."""
        return self._pictures.read(self._inside(indices), places)

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        """Their texts."""
        return self._pictures.texts(self._inside(indices))

    def usable(
        self, indices: Int[np.ndarray, "B"]
    ) -> tuple[Int[np.ndarray, "N"], Shaped[np.ndarray, "N ..."], Sequence[Any]]:
        """Those that can be used."""
        inside = self._inside(indices)
        kept, images, texts = self._pictures.usable(inside)
        return indices[np.isin(inside, kept)], images, texts

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """Their keys in the whole list."""
        return self._pictures.keys(self._inside(indices))

    def names(self, indices: Int[np.ndarray, "B"]) -> list[str]:
        """Their names."""
        return self._pictures.names(self._inside(indices))

    def skipped(self) -> dict[str, int]:
        """The number of pictures of the whole list that could not be used so far, by reason."""
        return self._pictures.skipped()


def hashed(keys: UInt64[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Numbers in [0, 1) that are a function of each alone: splitmix64 (Steele et al. 2014)."""
    z = (keys + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
