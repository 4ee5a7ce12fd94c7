"""Pictures: what the pipeline batches. Decoded from records, or made on the spot."""

import collections
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from absl import logging
from jaxtyping import Float, Int, UInt8

from diffusion_jax.data import columns, moments, transforms
from diffusion_jax.data.arrayrecord import ArrayRecords
from diffusion_jax.data.digits import Digits
from diffusion_jax.data.sources import Folder, Record, Records, TextRecords
from diffusion_jax.data.webdataset import WebDataset
from diffusion_jax.settings import MOMENTS

Rows = UInt8[np.ndarray, "B H W 3"] | Float[np.ndarray, "B h w _"]  # Pictures, or their moments.
_MAX_SUBSTITUTES = 1000
_NUM_WARNINGS = 5
_CHUNK = 64  # Records that are read together, and so held in memory as files.
_FEW = 100
_FILTERED = ("too_small", "too_elongated", "short_caption")


@runtime_checkable
class Pictures(Protocol):
    """Random access to a fixed list of pictures; safe to use from several threads."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[Rows, Sequence[Any]]:
        """The pictures of these indices and their texts, a function of the arguments alone.

        `places` in [0, 1] says where pictures larger than needed are cut; None means the centre.
        """
        ...

    def skipped(self) -> dict[str, int]:
        """How many things could not be used so far, by reason."""
        ...


class Filters(NamedTuple):
    """Which records are used; the fields are those of a config's data group."""

    min_size: int = 0
    """Pixels of the smaller side."""
    max_aspect: float = 0.0
    """The larger side by the smaller; 0 for any."""
    min_chars: int = 0
    """Characters of a caption."""
    max_broken: float = 1.0
    """The share of damaged records that does not end the run; the filters above do not count."""


@runtime_checkable
class Texts(Protocol):
    """Pictures whose texts can be had without making the pictures."""

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        """The texts of these indices, also of unusable pictures; "" for damaged texts."""
        ...


def read_texts(pictures: Pictures, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
    """The texts of pictures, without making the pictures where the source can."""
    if isinstance(pictures, Texts):
        return pictures.texts(indices)
    return pictures.read(indices)[1]


def usable(
    pictures: Pictures, indices: Int[np.ndarray, "B"]
) -> tuple[Int[np.ndarray, "N"], np.ndarray, Sequence[Any]]:
    """Indices, pictures and texts of those that can be used; `read` gives others in their place."""
    if isinstance(pictures, Decoded):
        return pictures.usable(indices)
    return indices, *pictures.read(indices)


def open_pictures(
    kind: str,
    *,
    size: int,
    path: str = "",
    text: str = "txt",
    uncaptioned: str = "error",
    resize: int = 0,
    filters: Filters = Filters(),  # noqa: B008 (it cannot be changed)
    mixture: Sequence[Any] = (),
    embeddings: tuple[int, int] | None = None,
    shape: tuple[int, int, int] | None = None,
) -> Pictures:
    """The source that a config names: in SOURCES, "digits", "synthetic", "moments" or "mixture".

    `path`, `text`, `uncaptioned` (see sources.Folder), `resize` (see transforms.square) and
    `filters` are for files; `mixture` holds (weight, kind, path, text) of each part of a mixture;
    `embeddings` (tokens, width) is for synthetic pictures whose texts are precomputed, `shape`
    [h, w, 2 Z] for moments, which are float32 in the pictures' place.
    """
    if kind == "mixture":
        check_mixture(mixture)
        one = functools.partial(
            open_pictures,
            size=size,
            uncaptioned=uncaptioned,
            resize=resize,
            filters=filters,
            embeddings=embeddings,
            shape=shape,
        )
        parts = [one(kind, path=path, text=text) for _, kind, path, text in mixture]
        return Mixture(parts, [weight for weight, *_ in mixture])
    if kind == "digits":
        return Digits(size)
    if kind == "synthetic":
        return Synthetic(size, embeddings)
    if kind not in (*SOURCES, MOMENTS):
        known = ", ".join(["digits", *SOURCES, "synthetic", MOMENTS, "mixture"])
        raise ValueError(f"there is no data source {kind!r}: the sources are {known}")
    if not path:  # It would mean the current folder.
        raise ValueError(f"the data source {kind!r} needs data.path: what is it to read?")
    if kind == MOMENTS:
        images = (moments.SUFFIX,)
        records = WebDataset(path, text, uncaptioned, filters.max_broken, images)
        # Without a shape only texts can be read.
        return Decoded(records, functools.partial(moments.read, shape=shape or (0, 0, 0)), filters)
    square = functools.partial(
        transforms.square,
        size=size,
        resize=resize,
        min_size=filters.min_size,
        max_aspect=filters.max_aspect,
    )
    return Decoded(SOURCES[kind](path, text, uncaptioned, filters), square, filters)


SOURCES: Mapping[str, Callable[[str, str, str, Filters], Records]] = {
    "folder": lambda path, text, uncaptioned, _: Folder(path, text, uncaptioned),
    "webdataset": lambda path, text, uncaptioned, filters: WebDataset(
        path, text, uncaptioned, filters.max_broken
    ),
    "arrayrecord": lambda path, text, *_: ArrayRecords(path, text),
    "arrow": lambda path, text, *_: columns.Arrow(path, text),
    "tfds": lambda path, text, *_: columns.Tfds(path, text),
}


def check_mixture(mixture: Sequence[Any]) -> None:
    """ValueError unless it is parts (weight, kind, path, text) with weights above 0."""
    for part in mixture:
        whole = isinstance(part, tuple | list) and len(part) == 4
        if not whole or not isinstance(part[0], int | float) or part[0] <= 0:
            raise ValueError(
                f"data.mixture holds {part!r}: each part is (weight, source, path, text), "
                "such as (0.5, 'webdataset', 'shards', 'txt'), with a weight above 0"
            )
        if part[1] == "mixture":
            raise ValueError("data.mixture holds a mixture: write its parts in its place")
    if not mixture:
        raise ValueError("the data source 'mixture' needs data.mixture: its parts")


class Decoded:
    """Records made into pictures; unusable ones are replaced and counted.

    What replaces a record is drawn at random from the rest, but by its number alone: so the order
    of the data is the same for any number of processes, and after a restart.
    """

    def __init__(
        self,
        records: Records,
        make: Callable[..., np.ndarray],
        filters: Filters = Filters(),  # noqa: B008
    ):
        """`make(image, place=(x, y))` makes a picture of a record's image, or raises Unusable."""
        self._records, self._make, self._filters = records, make, filters
        self._unusable: dict[int, str] = {}
        self._num_read = self._num_broken = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many records there are, unusable ones among them."""
        return len(self._records)

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[Rows, Sequence[Any]]:
        """Decodes; ValueError if no substitute can be used, or too many records are damaged."""
        rows = [transforms.CENTRE] * len(indices) if places is None else places.tolist()
        usable = []
        for first in range(0, len(indices), _CHUNK):
            chunk = [int(index) for index in indices[first : first + _CHUNK]]
            fresh = sorted({index for index in chunk if index not in self._unusable})
            records = dict(zip(fresh, self._fetch(fresh), strict=True))
            for index, place in zip(chunk, rows[first : first + _CHUNK], strict=True):
                usable.append(self._usable(index, tuple(place), records))
        images, texts = zip(*usable, strict=True)
        return np.stack(images), texts

    def usable(
        self, indices: Int[np.ndarray, "B"]
    ) -> tuple[Int[np.ndarray, "N"], np.ndarray, Sequence[Any]]:
        """Indices, pictures and texts without those that cannot be used, which are counted."""
        kept, made = [], []
        for index, record in zip(indices.tolist(), self._fetch(indices.tolist()), strict=True):
            try:
                made.append(self._picture(record, transforms.CENTRE))
                kept.append(index)
            except transforms.Unusable as error:
                self._count(index, record.name, error)
        images = np.stack([image for image, _ in made]) if made else np.zeros((0,), np.uint8)
        return np.array(kept, np.int64), images, [text for _, text in made]

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        """The records' texts, "" for damaged ones; without the images where the source can."""
        records = self._records
        if isinstance(records, TextRecords):
            texts = records.texts(indices.tolist())
        else:
            texts = [record.text for record in records.read(indices.tolist())]
        return ["" if isinstance(text, transforms.Unusable) else text for text in texts]

    def skipped(self) -> dict[str, int]:
        """How many different records were met that are unusable, and what the source left out."""
        with self._lock:
            found = collections.Counter(self._unusable.values())
        return {**found, **self._records.left_out()}

    def _usable(self, index: int, place: tuple, records: Mapping[int, Record]) -> tuple:
        draw = np.random.default_rng(index)
        for _ in range(_MAX_SUBSTITUTES):
            if index not in self._unusable:
                record = records[index] if index in records else self._fetch([index])[0]
                try:
                    return self._picture(record, place)
                except transforms.Unusable as error:
                    self._count(index, record.name, error)
            if len(self._unusable) == len(self):
                break
            index = int(draw.integers(len(self)))
        raise ValueError(
            f"all records that were tried are unusable, of {len(self)}: {self.skipped()}. Look at "
            f"the files named above; the filters of the config's data group are {self._filters}"
        )

    def _fetch(self, indices: Sequence[int]) -> Sequence[Record]:
        with self._lock:
            self._num_read += len(indices)
        return self._records.read(indices) if indices else []

    def _picture(self, record: Record, place: tuple) -> tuple[np.ndarray, Any]:
        if isinstance(record.text, transforms.Unusable):
            raise record.text
        if isinstance(record.text, str):
            transforms.check_caption(record.text, self._filters.min_chars)
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
        if self._num_broken > self._filters.max_broken * max(seen, _FEW):
            raise ValueError(
                f"{self._num_broken} of {seen} records are damaged: {self.skipped()}, the last is "
                f"{name} ({error}). data.max_broken is {self._filters.max_broken}"
            )


class Mixture:
    """Several sources in one list, one after another; `weights` say how often each is drawn."""

    def __init__(self, parts: Sequence[Pictures], weights: Sequence[float | int]):
        """The weights need not add up to 1."""
        self._parts = parts
        self.lengths, self.weights = (
            [len(part) for part in parts],
            [float(weight) for weight in weights],
        )
        self._firsts = np.cumsum([0, *self.lengths])

    def __len__(self) -> int:
        """How many pictures there are in all parts together."""
        return int(self._firsts[-1])

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[Rows, Sequence[Any]]:
        """The pictures of the parts that hold these indices."""
        images: Any = None
        texts: list[Any] = [None] * len(indices)
        for part, rows, inside in self._split(indices):
            read, captions = part.read(inside, None if places is None else places[rows])
            images = (
                np.empty((len(indices), *read.shape[1:]), read.dtype) if images is None else images
            )
            images[rows] = read
            for row, text in zip(rows.tolist(), captions, strict=True):
                texts[row] = text
        return images, texts

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        """Their texts; see read_texts."""
        texts: list[Any] = [None] * len(indices)
        for part, rows, inside in self._split(indices):
            for row, text in zip(rows.tolist(), read_texts(part, inside), strict=True):
                texts[row] = text
        return texts

    def skipped(self) -> dict[str, int]:
        """The sums of the parts."""
        total = collections.Counter()
        for part in self._parts:
            total.update(part.skipped())
        return dict(total)

    def _split(self, indices: np.ndarray) -> Iterator[tuple[Pictures, np.ndarray, np.ndarray]]:
        """Each part that holds some of them: (part, which rows, the part's own indices)."""
        which = np.searchsorted(self._firsts, indices, side="right") - 1
        for part in sorted(set(which.tolist())):
            rows = np.flatnonzero(which == part)
            yield self._parts[part], rows, indices[rows] - self._firsts[part]


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
