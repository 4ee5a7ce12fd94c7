"""Split data sets into training and held-out pictures.

A loss that is higher on held-out pictures than on training pictures reveals memorisation.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt64

from diffusion_jax.data.inventory import Inventory
from diffusion_jax.data.mixture import Mixture
from diffusion_jax.data.pictures import Columns, PictureArray, Pictures

_CHUNK = 2**22  # Number of keys hashed at a time: 32 MB.


def split(pictures: Pictures, share: float) -> tuple[Pictures, Pictures]:
    """Split pictures into (training, held out) by a hash of their groups, by default their keys.

    `share`, a number in [0, 1], is the approximate share of held-out pictures. With 1, both results
    are all pictures, to measure a model without training. The choice is the same in every run and
    process. If the keys are derived from names, the choice for a record does not change when other
    records are added or removed. A held-out record never replaces an unusable record in training.
    In a mixture, each source is split, but all pictures of data.prior are used for training.
    """
    if not share:
        return pictures, Subset(pictures, np.zeros(0, np.int64))
    if isinstance(pictures, Mixture):
        if pictures.part_counts:
            (subject, *priors) = pictures.parts
            training, heldout = split(subject, share)
            return Mixture([training, *priors], pictures.weights, pictures.part_counts), heldout
        pairs = [split(part, share) for part in pictures.parts]
        training, heldout = ([pair[i] for pair in pairs] for i in (0, 1))
        return Mixture(training, pictures.weights), Mixture(heldout, pictures.weights)
    if share == 1:
        return pictures, pictures
    chunks = (np.arange(i, min(i + _CHUNK, len(pictures))) for i in range(0, len(pictures), _CHUNK))
    heldout = np.concatenate([c[hashed(pictures.groups(c)) < share] for c in chunks])
    pictures.exclude_substitutes(heldout)
    return Subset(pictures, heldout, others=True), Subset(pictures, heldout)


class Subset(Pictures):
    """A subset of another data set's pictures, in the same order."""

    def __init__(self, pictures: Pictures, indices: Int[np.ndarray, "N"], others: bool = False):
        """Select the pictures at these sorted indices, or, with `others`, all except these."""
        self._pictures, self._indices, self._others = pictures, indices, others
        # For each of `indices`, the number of smaller indices that are not in `indices`.
        self._before = indices - np.arange(len(indices))

    def __len__(self) -> int:
        return len(self._pictures) - len(self._indices) if self._others else len(self._indices)

    def _inside(self, indices: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B"]:
        if self._others:
            return indices + np.searchsorted(self._before, indices, side="right")
        return self._indices[indices]

    def substitute_within(self, groups: Int[np.ndarray, "N"]) -> None:
        """Replace unusable pictures only by pictures of the same group in this subset.

        In the complete data set, the pictures outside of the subset form one more group.
        """
        of_all = np.full(len(self._pictures), -1, np.int64)
        of_all[self._inside(np.arange(len(self)))] = groups
        self._pictures.substitute_within(of_all)

    def sizes(self, indices: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B 2"]:
        return self._pictures.sizes(self._inside(indices))

    def cropped_to(self, shape: tuple[int, int]) -> "Subset":
        return Subset(self._pictures.cropped_to(shape), self._indices, self._others)

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[PictureArray, Sequence[Any]]:
        return self._pictures.read(self._inside(indices), places)

    def columns(self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None) -> Columns:
        return self._pictures.columns(self._inside(indices), places)

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        return self._pictures.texts(self._inside(indices))

    def usable(
        self, indices: Int[np.ndarray, "B"]
    ) -> tuple[Int[np.ndarray, "N"], Shaped[np.ndarray, "N ..."], Sequence[Any]]:
        """Return (indices, pictures, texts) of the usable pictures among `indices`."""
        inside = self._inside(indices)
        usable, images, texts = self._pictures.usable(inside)
        return indices[np.isin(inside, usable)], images, texts

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        return self._pictures.keys(self._inside(indices))

    def files(self) -> list[str]:
        """Return the files of the complete data set."""
        return self._pictures.files()

    def id(self) -> str:
        return self._pictures.id()

    def names(self, indices: Int[np.ndarray, "B"]) -> list[str]:
        return self._pictures.names(self._inside(indices))

    def skipped(self) -> dict[str, int]:
        """Return the number of unusable pictures found in the complete data set, by reason."""
        return self._pictures.skipped()

    def inventory(self) -> Inventory:
        """Return the files of the complete data set."""
        return self._pictures.inventory()


def hashed(keys: UInt64[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Hash each key to a number in [0, 1) with splitmix64 (Steele et al. 2014)."""
    z = (keys + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
