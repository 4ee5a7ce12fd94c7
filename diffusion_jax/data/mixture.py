"""Define Mixture, a data set that combines several sources with given weights."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt64

from diffusion_jax.data.inventory import Inventory
from diffusion_jax.data.pictures import Columns, PictureArray, Pictures


class Mixture(Pictures):
    """A concatenation of several sources. The pipeline draws from each according to its weight."""

    def __init__(self, parts: Sequence[Pictures], weights: Sequence[float | int], counts: Sequence[float | int] = ()):
        """Concatenate the sources of a mixture.

        Args:
            parts: the sources.
            weights: how often each source is drawn from, relative to the other sources.
            counts: loss weight of each source's pictures; empty if all weights are equal.
        """
        self.parts, self.lengths = parts, [len(part) for part in parts]
        self.part_counts = tuple(counts)
        self.weights = [float(weight) for weight in weights]
        self._firsts = np.cumsum([0, *self.lengths])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def substitute_within(self, groups: Int[np.ndarray, "N"]) -> None:
        for part, of_part in zip(self.parts, np.split(groups, self._firsts[1:-1]), strict=True):
            part.substitute_within(of_part)

    def sizes(self, indices: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B 2"]:
        """Return the stored height and width of each picture in pixels."""
        sizes = np.zeros((len(indices), 2), np.int64)
        for part, rows, inside in self._split(indices):
            sizes[rows] = part.sizes(inside)
        return sizes

    def cropped_to(self, shape: tuple[int, int]) -> "Mixture":
        parts = [part.cropped_to(shape) for part in self.parts]
        return Mixture(parts, self.weights, self.part_counts)

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[PictureArray, Sequence[Any]]:
        """Read each picture and its text from the source that holds it."""
        images, texts, *_ = self.columns(indices, places)
        return images, texts

    def columns(self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None) -> Columns:
        """Read each picture, its text, numbers and mask from the source that holds it."""
        images: Any = None
        mask: Any = None
        texts: list[Any] = [None] * len(indices)
        numbers = collections.defaultdict[str, Any](lambda: np.full(len(indices), np.nan))
        for part, rows, inside in self._split(indices):
            read, captions, of_part, masks = part.columns(inside, None if places is None else places[rows])
            if images is None:
                images = np.empty((len(indices), *read.shape[1:]), read.dtype)
                mask = None if masks is None else np.empty(images.shape[:3], masks.dtype)
            images[rows] = read
            if mask is not None:
                mask[rows] = masks
            for row, text in zip(rows.tolist(), captions, strict=True):
                texts[row] = text
            for name, values in of_part.items():
                numbers[name][rows] = values
        return Columns(images, texts, numbers, mask)

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        """Return each picture's caption or embeddings, without reading the image if possible."""
        texts: list[Any] = [None] * len(indices)
        for part, rows, inside in self._split(indices):
            for row, text in zip(rows.tolist(), part.texts(inside), strict=True):
                texts[row] = text
        return texts

    def usable(
        self, indices: Int[np.ndarray, "B"]
    ) -> tuple[Int[np.ndarray, "N"], Shaped[np.ndarray, "N ..."], Sequence[Any]]:
        """Return (indices, pictures, texts) of the usable pictures, grouped by source."""
        results = [(rows, inside, *p.usable(inside)) for p, rows, inside in self._split(indices)]
        usable = [indices[rows][np.isin(inside, u)] for rows, inside, u, *_ in results]
        images = [images for *_, images, _ in results if len(images)]
        texts = [text for *_, part_texts in results for text in part_texts]
        return np.concatenate(usable), np.concatenate(images or [np.zeros(0, np.uint8)]), texts

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """Return each picture's key, as defined by the source that holds the picture."""
        keys = np.zeros(len(indices), np.uint64)
        for part, rows, inside in self._split(indices):
            keys[rows] = part.keys(inside)
        return keys

    def files(self) -> list[str]:
        return [file for part in self.parts for file in part.files()]

    def id(self) -> str:
        return " ".join(part.id() for part in self.parts)

    def loss_weights(self, indices: Int[np.ndarray, "B"]) -> Float[np.ndarray, "B"] | None:
        counts = np.array(self.part_counts, np.float32)
        return counts[self._part_numbers(indices)] if self.part_counts else None

    def names(self, indices: Int[np.ndarray, "B"]) -> list[str]:
        """Return each picture's name, as defined by the source that holds the picture."""
        names = [""] * len(indices)
        for part, rows, inside in self._split(indices):
            for row, name in zip(rows.tolist(), part.names(inside), strict=True):
                names[row] = name
        return names

    def skipped(self) -> dict[str, int]:
        """Return the number of unusable pictures by reason, summed over all sources."""
        total = collections.Counter()
        for part in self.parts:
            total.update(part.skipped())
        return dict(total)

    def inventory(self) -> Inventory:
        """Return the files of all sources together."""
        total = Inventory()
        for part in self.parts:
            total.update(part.inventory())
        return total

    def _split(self, indices: np.ndarray) -> Iterator[tuple[Pictures, np.ndarray, np.ndarray]]:
        """Yield (source, positions in `indices`, indices within the source) for each source."""
        parts = self._part_numbers(indices)
        for part in sorted(set(parts.tolist())):
            rows = np.flatnonzero(parts == part)
            yield self.parts[part], rows, indices[rows] - self._firsts[part]

    def _part_numbers(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._firsts, indices, side="right") - 1
