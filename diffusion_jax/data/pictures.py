"""Pictures: what the pipeline batches. Decoded from records, made on the spot, or a mixture."""

import abc
import collections
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float, Int, Shaped, UInt8, UInt64

from diffusion_jax.config.settings import Data
from diffusion_jax.data import transforms
from diffusion_jax.data.records import Record, Records
from diffusion_jax.engines import Portable

Rows = UInt8[np.ndarray, "B H W 3"] | Float[np.ndarray, "B h w _"]  # Pictures, or their moments.
_MAX_SUBSTITUTES = 1000
_NUM_WARNINGS = 5
_CHUNK = 64  # Records that are read together, and so held in memory as files.
_FEW = 100
_FILTERS = ("min_size", "max_aspect", "min_chars")
_FILTERED = ("too_small", "too_elongated", "short_caption")


class Pictures(Portable, abc.ABC):
    """Random access to a fixed list of pictures; safe to use from several threads."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of pictures."""

    def keep_apart(self, indices: Int[np.ndarray, "N"]) -> None:
        """Lets none of these, sorted, stand in for an unusable one; most lists replace none."""
        del indices

    @abc.abstractmethod
    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[Rows, Sequence[Any]]:
        """The pictures of these indices and their texts, a function of the arguments alone.

        `places` in [0, 1] says where pictures larger than needed are cut; None means the centre.
        """

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        """The texts of these indices, also of unusable pictures; "" for damaged texts."""
        return self.read(indices)[1]

    def usable(
        self, indices: Int[np.ndarray, "B"]
    ) -> tuple[Int[np.ndarray, "N"], Shaped[np.ndarray, "N ..."], Sequence[Any]]:
        """Indices, pictures and texts of those that can be used; `read` replaces the others."""
        return indices, *self.read(indices)

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """What stays a picture's own when others come or go: here its number."""
        return indices.astype(np.uint64)

    def counts(self, indices: Int[np.ndarray, "B"]) -> Float[np.ndarray, "B"] | None:
        """How much each counts in the loss; None where all do the same."""
        del indices

    def names(self, indices: Int[np.ndarray, "B"]) -> list[str]:
        """What people know the pictures of these indices by: the files that `read` takes."""
        return [f"picture {index}" for index in indices.tolist()]

    def skipped(self) -> dict[str, int]:
        """The number of pictures that could not be used so far, by reason."""
        return {}


class Shapes(NamedTuple):
    """The shapes of a task's inputs; embeddings and moments stand for texts and pixels."""

    size: int
    """Pixels of a side."""
    embeddings: tuple[int, int] | None = None
    """(tokens, width) of texts that are embeddings; None for captions."""
    moments: tuple[int, int, int] | None = None
    """[h, w, 2 Z] of an autoencoder's moments, float32 in the pictures' place."""


class Decoded(Pictures):
    """Records made into pictures; unusable ones are replaced and counted.

    What replaces a record is drawn at random from the rest, but by its number alone: so the order
    of the data is the same for any number of processes, and after a restart.
    """

    def __init__(self, records: Records, make: Callable[..., np.ndarray], data: Data):
        """`make(image, place=(x, y))` makes a picture of a record's image, or raises Unusable.

        Of `data`, the filter of captions and the share of damaged records count.
        """
        self._records, self._make, self._max_broken = records, make, data.max_broken
        self._filters = {name: getattr(data, name) for name in _FILTERS}
        self._unusable: dict[int, str] = {}
        self._apart = np.zeros(0, np.int64)
        self._num_read = self._num_broken = 0
        self._lock = threading.Lock()

    def keep_apart(self, indices: Int[np.ndarray, "N"]) -> None:
        """These, sorted, replace no other."""
        self._apart = indices

    def __len__(self) -> int:
        """The number of records, unusable ones among them."""
        return len(self._records)

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[Rows, Sequence[Any]]:
        """Decodes; ValueError if no substitute can be used, or too many records are damaged."""
        images, texts, _ = zip(*self._read(indices, places), strict=True)
        return np.stack(images), texts

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """The records'."""
        return self._records.keys(indices)

    def names(self, indices: Int[np.ndarray, "B"]) -> list[str]:
        """The names of records, or of those that took their place."""
        return [name for _, _, name in self._read(indices, None)]

    def _read(self, indices: np.ndarray, places: np.ndarray | None) -> list[tuple[Any, Any, str]]:
        """(image, text, name) of usable records."""
        rows = [transforms.CENTRE] * len(indices) if places is None else places.tolist()
        usable = []
        for first in range(0, len(indices), _CHUNK):
            chunk = [int(index) for index in indices[first : first + _CHUNK]]
            fresh = sorted({index for index in chunk if index not in self._unusable})
            records = dict(zip(fresh, self._fetch(fresh), strict=True))
            for index, place in zip(chunk, rows[first : first + _CHUNK], strict=True):
                usable.append(self._usable(index, tuple(place), records))
        return usable

    def usable(
        self, indices: Int[np.ndarray, "B"]
    ) -> tuple[Int[np.ndarray, "N"], Shaped[np.ndarray, "N ..."], Sequence[Any]]:
        """Indices, pictures and texts without those that cannot be used, which are counted."""
        kept, pairs = [], []
        for index, record in zip(indices.tolist(), self._fetch(indices.tolist()), strict=True):
            try:
                pairs.append(self._picture(record, transforms.CENTRE))
                kept.append(index)
            except transforms.Unusable as error:
                self._count(index, record.name, error)
        images = np.stack([i for i, _ in pairs]) if pairs else np.zeros((0,), np.uint8)
        return np.array(kept, np.int64), images, [text for _, text in pairs]

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        """The records' texts, "" for damaged ones; without the images where the source can."""
        texts = self._records.texts(indices.tolist())
        return ["" if isinstance(text, transforms.Unusable) else text for text in texts]

    def skipped(self) -> dict[str, int]:
        """Counts of the different unusable records met so far, and of what the source left out."""
        with self._lock:
            unusable = collections.Counter(self._unusable.values())
        return {**unusable, **self._records.left_out()}

    def _usable(self, index: int, place: tuple, records: Mapping[int, Record]) -> tuple:
        draw = np.random.default_rng(index)
        for _ in range(_MAX_SUBSTITUTES):
            if index not in self._unusable:
                record = records[index] if index in records else self._fetch([index])[0]
                try:
                    return *self._picture(record, place), record.name
                except transforms.Unusable as error:
                    self._count(index, record.name, error)
            if len(self._unusable) == len(self):
                break
            index = int(draw.integers(len(self)))
            while (at := np.searchsorted(self._apart, index)) < len(self._apart) and (
                self._apart[at] == index
            ):
                index = int(draw.integers(len(self)))
        filters = ", ".join(f"{name}={value}" for name, value in self._filters.items())
        raise ValueError(
            f"all records that were tried are unusable, of {len(self)}: {self.skipped()}. Look at "
            f"the files named above; the filters of the config's data group are {filters}"
        )

    def _fetch(self, indices: Sequence[int]) -> Sequence[Record]:
        with self._lock:
            self._num_read += len(indices)
        return self._records.read(indices) if indices else []

    def _picture(self, record: Record, place: tuple) -> tuple[np.ndarray, Any]:
        if isinstance(record.text, transforms.Unusable):
            raise record.text
        if isinstance(record.text, str):
            transforms.check_caption(record.text, self._filters["min_chars"])
        return self._make(record.image, place=place), record.text

    def _count(self, index: int, name: str, error: transforms.Unusable) -> None:
        with self._lock:
            if index in self._unusable:  # Another thread was faster.
                return
            self._unusable[index] = error.reason
            self._num_broken += error.reason not in _FILTERED
            seen = min(self._num_read, len(self))
        if len(self._unusable) <= _NUM_WARNINGS:
            logging.warning("skipped %s: %s", name, error)
        # Of few records one damaged is a large share of those met so far.
        if self._num_broken > self._max_broken * max(seen, _FEW):
            raise ValueError(
                f"{self._num_broken} of {seen} records are damaged: {self.skipped()}, the last is "
                f"{name} ({error}). data.max_broken is {self._max_broken}"
            )


class Mixture(Pictures):
    """Several sources in one list, one after another; `weights` say how often each is drawn."""

    def __init__(
        self,
        parts: Sequence[Pictures],
        weights: Sequence[float | int],
        counts: Sequence[float | int] = (),
    ):
        """The weights need not add up to 1; `counts` are those of each part's pictures, if any."""
        self.parts, self.lengths = parts, [len(part) for part in parts]
        self.part_counts = tuple(counts)
        self.weights = [float(weight) for weight in weights]
        self._firsts = np.cumsum([0, *self.lengths])

    def __len__(self) -> int:
        """The number of pictures in all parts together."""
        return int(self._firsts[-1])

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[Rows, Sequence[Any]]:
        """The pictures of the parts that hold these indices."""
        images: Any = None
        texts: list[Any] = [None] * len(indices)
        for part, rows, inside in self._split(indices):
            read, captions = part.read(inside, None if places is None else places[rows])
            if images is None:
                images = np.empty((len(indices), *read.shape[1:]), read.dtype)
            images[rows] = read
            for row, text in zip(rows.tolist(), captions, strict=True):
                texts[row] = text
        return images, texts

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        """The texts, without making the pictures where a part can."""
        texts: list[Any] = [None] * len(indices)
        for part, rows, inside in self._split(indices):
            for row, text in zip(rows.tolist(), part.texts(inside), strict=True):
                texts[row] = text
        return texts

    def usable(
        self, indices: Int[np.ndarray, "B"]
    ) -> tuple[Int[np.ndarray, "N"], Shaped[np.ndarray, "N ..."], Sequence[Any]]:
        """Those that the parts can use, part by part."""
        found = [(rows, inside, *p.usable(inside)) for p, rows, inside in self._split(indices)]
        kept = [indices[rows][np.isin(inside, k)] for rows, inside, k, *_ in found]
        images = [images for *_, images, _ in found if len(images)]
        texts = [text for *_, part_texts in found for text in part_texts]
        return np.concatenate(kept), np.concatenate(images or [np.zeros(0, np.uint8)]), texts

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """The keys that the parts give them."""
        keys = np.zeros(len(indices), np.uint64)
        for part, rows, inside in self._split(indices):
            keys[rows] = part.keys(inside)
        return keys

    def counts(self, indices: Int[np.ndarray, "B"]) -> Float[np.ndarray, "B"] | None:
        """Those of the parts that hold these indices."""
        counts = np.array(self.part_counts, np.float32)
        return counts[self._which(indices)] if self.part_counts else None

    def names(self, indices: Int[np.ndarray, "B"]) -> list[str]:
        """The names that the parts give them."""
        names = [""] * len(indices)
        for part, rows, inside in self._split(indices):
            for row, name in zip(rows.tolist(), part.names(inside), strict=True):
                names[row] = name
        return names

    def skipped(self) -> dict[str, int]:
        """Counts of unusable records by reason, summed over the parts."""
        total = collections.Counter()
        for part in self.parts:
            total.update(part.skipped())
        return dict(total)

    def _split(self, indices: np.ndarray) -> Iterator[tuple[Pictures, np.ndarray, np.ndarray]]:
        """Each part that holds some of them: (part, which rows, the part's own indices)."""
        which = self._which(indices)
        for part in sorted(set(which.tolist())):
            rows = np.flatnonzero(which == part)
            yield self.parts[part], rows, indices[rows] - self._firsts[part]

    def _which(self, indices: np.ndarray) -> np.ndarray:
        """The number of the part that holds each."""
        return np.searchsorted(self._firsts, indices, side="right") - 1
