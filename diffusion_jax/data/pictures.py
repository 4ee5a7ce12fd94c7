"""Pictures: what the pipeline batches. Decoded from records, or made on the spot."""

import collections
import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from absl import logging
from jaxtyping import Float, Int, UInt8

from diffusion_jax.data import transforms
from diffusion_jax.data.digits import Digits
from diffusion_jax.data.sources import Folder, Records, TextRecords
from diffusion_jax.data.webdataset import WebDataset

_MAX_SUBSTITUTES = 100
_NUM_WARNINGS = 5


@runtime_checkable
class Pictures(Protocol):
    """Random access to a fixed list of pictures; safe to use from several threads."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[UInt8[np.ndarray, "B H W 3"], Sequence[Any]]:
        """The pictures of these indices and their texts, a function of the arguments alone.

        `places` in [0, 1] says where pictures larger than needed are cut; None means the centre.
        """
        ...

    def skipped(self) -> dict[str, int]:
        """How many things could not be used so far, by reason."""
        ...


@runtime_checkable
class Texts(Protocol):
    """Pictures whose texts can be had without making the pictures."""

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        """The texts of these indices, also of pictures that turn out unusable."""
        ...


def read_texts(pictures: Pictures, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
    """The texts of pictures, without making the pictures where the source can."""
    if isinstance(pictures, Texts):
        return pictures.texts(indices)
    return pictures.read(indices)[1]


def open_pictures(
    kind: str,
    *,
    size: int,
    path: str = "",
    text: str = "txt",
    uncaptioned: str = "error",
    min_size: int = 0,
    resize: int = 0,
    embeddings: tuple[int, int] | None = None,
) -> Pictures:
    """The source that a config names: "digits", "folder", "webdataset" or "synthetic".

    `path`, `text`, `uncaptioned`, `min_size` and `resize` (see Folder and transforms.square) are
    for files;
    `embeddings` (tokens, width) is for synthetic pictures whose texts are precomputed.
    """
    if kind == "digits":
        return Digits(size)
    if kind == "synthetic":
        return Synthetic(size, embeddings)
    readers = {"folder": Folder, "webdataset": WebDataset}
    if kind not in readers:
        known = ", ".join(["digits", *readers, "synthetic"])
        raise ValueError(f"there is no data source {kind!r}: the sources are {known}")
    if not path:  # It would mean the current folder.
        raise ValueError(f"the data source {kind!r} needs data.path: what is it to read?")
    return Decoded(readers[kind](path, text, uncaptioned), size, min_size, resize)


class Decoded:
    """Records made into square pictures; unusable ones are replaced and counted.

    What replaces a record is drawn at random from the rest, but by its number alone: so the order
    of the data is the same for any number of processes, and after a restart.
    """

    def __init__(self, records: Records, size: int, min_size: int = 0, resize: int = 0):
        """`size` is the side of the pictures; see transforms.square for the others."""
        self._records, self._min_size = records, min_size
        self._square = functools.partial(
            transforms.square, size=size, resize=resize, min_size=min_size
        )
        self._unusable: dict[int, str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many records there are, unusable ones among them."""
        return len(self._records)

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[UInt8[np.ndarray, "B H W 3"], Sequence[Any]]:
        """Decodes; ValueError if the substitutes of a record are all unusable too."""
        rows = (
            itertools.repeat(transforms.CENTRE) if places is None else map(tuple, places.tolist())
        )
        usable = [self._usable(int(i), at) for i, at in zip(indices, rows, strict=False)]
        images, texts = zip(*usable, strict=True)
        return np.stack(images), texts

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        """The records' texts; their images are not read where the source can do without."""
        records = self._records
        if isinstance(records, TextRecords):
            return [records.text(i) for i in indices.tolist()]
        return [records[i].text for i in indices.tolist()]

    def skipped(self) -> dict[str, int]:
        """How many different records were met that are unusable, and what the source left out."""
        with self._lock:
            found = collections.Counter(self._unusable.values())
        return {**found, **self._records.left_out()}

    def _usable(self, index: int, place: tuple[float, float]) -> tuple[np.ndarray, Any]:
        draw = np.random.default_rng(index)
        for _ in range(_MAX_SUBSTITUTES):
            if index not in self._unusable:
                record = self._records[index]
                try:
                    image = self._square(record.image, place=place)
                    return image, record.text
                except transforms.Unusable as error:
                    self._count(index, record.name, error)
            index = int(draw.integers(len(self)))
        raise ValueError(
            f"{_MAX_SUBSTITUTES} records drawn one after another are all unusable, of "
            f"{len(self)}: {self.skipped()}. Look at the files named above; data.min_size is "
            f"{self._min_size}"
        )

    def _count(self, index: int, name: str, error: transforms.Unusable) -> None:
        with self._lock:
            self._unusable[index] = error.reason
            if len(self._unusable) <= _NUM_WARNINGS:
                logging.warning("skipped %s: %s", name, error)


class Synthetic:
    """One random batch, again and again: input that costs nothing, for benchmarks."""

    def __init__(self, size: int, embeddings: tuple[int, int] | None = None):
        """Texts are a caption, or arrays of the shape `embeddings` (tokens, width)."""
        self._random = np.random.default_rng(0)
        self._images = np.zeros((0, size, size, 3), np.uint8)
        self._text = "a picture of random noise"
        if embeddings is not None:
            self._text = self._random.standard_normal(embeddings, np.float32)

    def __len__(self) -> int:
        """As many as anyone needs."""
        return 2**31 - 1

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[UInt8[np.ndarray, "B H W 3"], Sequence[Any]]:
        """The same pictures for any indices and places."""
        images = self._images
        if len(images) != len(indices):
            shape = (len(indices), *images.shape[1:])
            images = self._images = self._random.integers(0, 256, shape, np.uint8)
        return images, [self._text] * len(indices)

    def skipped(self) -> dict[str, int]:
        """Nothing."""
        return {}
