"""Define Pictures, the interface of decoded data sets, from which the pipeline makes batches."""

import abc
import collections
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float, Int, Shaped, UInt8, UInt64

from diffusion_jax.config import picture_fields
from diffusion_jax.config.settings import Data
from diffusion_jax.data import captions, decoding
from diffusion_jax.data.inventory import PICTURES, Inventory
from diffusion_jax.data.records import HEAD, Record, Records, checked_numbers
from diffusion_jax.data.table import Row, Table

PictureArray = UInt8[np.ndarray, "B H W 3"] | Float[np.ndarray, "B h w _"]  # Pixels or moments.
_MAX_SUBSTITUTES = 1000
_NUM_WARNINGS = 5
_PNG = b"\x89PNG"
_CHUNK = 64  # Number of encoded records that are read and held in memory together.
# The share of damaged records is relative to at least this many records (or to all records of a
# smaller data set), even if fewer were read.
_FEW = 100
_FILTERS = ("min_size", "max_aspect", "min_chars")
_FILTERED = ("too_small", "too_elongated", "short_caption", "left_out")


class Columns(NamedTuple):
    """The pictures of a batch, with what belongs to them."""

    images: PictureArray
    texts: Sequence[Any]
    """A caption, embeddings or captions.Captions for each picture."""
    numbers: Mapping[str, Float[np.ndarray, "B"]]
    """A number for each picture under the name of each field (Field.name)."""
    mask: UInt8[np.ndarray, "B H W"] | None = None
    """With data.loss_mask, the weight of each pixel in the loss, where 255 is 1."""


class Pictures(abc.ABC):
    """Abstract base class of data sets: a thread-safe list of decoded images with their texts."""

    data: Data | None = None
    """The config's data group that sources.open_pictures opened."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    def exclude_substitutes(self, indices: Int[np.ndarray, "N"]) -> None:
        """From now on, never replace an unusable picture by a picture at these sorted indices.

        The base class does nothing, because it replaces no pictures.
        """
        del indices

    def substitute_within(self, groups: Int[np.ndarray, "N"]) -> None:
        """From now on, replace an unusable picture only by pictures of the same group.

        The base class does nothing, because it replaces no pictures.

        Args:
            groups: the group number of each picture of the data set.
        """
        del groups

    def sizes(self, indices: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B 2"]:
        """Return height and width in pixels of the stored pictures, before resizing.

        The size of a damaged picture is (0, 0).

        Raises:
            ValueError: the data set is of a kind whose pictures all have one size. The base class
                always raises this error.
        """
        del indices
        raise self._no_sizes()

    def cropped_to(self, shape: tuple[int, int]) -> "Pictures":
        """Return a view of this data set whose pictures are cropped to `shape`, (height, width).

        Raises:
            ValueError: the data set is of a kind whose pictures all have one size. The base class
                always raises this error.
        """
        del shape
        raise self._no_sizes()

    def _no_sizes(self) -> ValueError:
        name = type(self).__name__
        return ValueError(
            f"all pictures of {name} have one size, so aspect buckets have no use: set data.aspect_buckets=()"
        )

    @abc.abstractmethod
    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[PictureArray, Sequence[Any]]:
        """Return pictures and their texts. The same arguments always give the same result.

        Args:
            indices: indices of the pictures to read.
            places: crop position (x, y) of each picture, from 0 (left, top) to 1 (right, bottom).
                None crops the centre.

        Returns:
            The pictures, uint8 RGB pixels or float VAE moments, and a caption or embeddings for
            each.
        """

    def columns(self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None) -> Columns:
        """Return what `read` returns, and the numbers of data.fields. The base class has none."""
        return Columns(*self.read(indices, places), {})

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        """Return the text of each picture, or "" if the text is damaged.

        If a picture is unusable but its text is valid, this text is returned.
        """
        return self.read(indices)[1]

    def usable(
        self, indices: Int[np.ndarray, "B"]
    ) -> tuple[Int[np.ndarray, "N"], Shaped[np.ndarray, "N ..."], Sequence[Any]]:
        """Return (indices, pictures, texts) of the usable pictures among `indices`.

        Unusable pictures are left out, whereas `read` replaces them by others.
        """
        return indices, *self.read(indices)

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """Return an integer key for each picture.

        Sources whose pictures have names derive the key from the name, so that it stays the same
        when other pictures are added or removed. The base class returns the index.
        """
        return indices.astype(np.uint64)

    def groups(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """Return an integer for each picture, equal for pictures that are held out together.

        The base class returns the keys: each picture is held out alone.
        """
        return self.keys(indices)

    def loss_weights(self, indices: Int[np.ndarray, "B"]) -> Float[np.ndarray, "B"] | None:
        """Return the loss weight of each picture, or None if all weights are equal."""
        del indices

    def files(self) -> list[str]:
        """Return the paths or URLs of the files that hold the pictures, in a fixed order."""
        return []

    def id(self) -> str:
        """Return a digest of the texts that a table holds; "" in the base class."""
        return ""

    def rows(self, indices: Int[np.ndarray, "B"]) -> tuple[Int[np.ndarray, "N"], list[Row]]:
        """Return (indices, rows of a table) of the pictures with a usable text and usable numbers.

        The base class returns all pictures, with their pixels as bytes.
        """
        read = self.columns(indices)
        described = zip(self.names(indices), self.keys(indices).tolist(), read.images, read.texts, strict=True)
        numbers = [{name: float(of[at]) for name, of in read.numbers.items()} for at in range(len(indices))]
        rows = [Row(name, key, image.tobytes(), text) for name, key, image, text in described]
        return indices, [row._replace(numbers=of) for row, of in zip(rows, numbers, strict=True)]

    def names(self, indices: Int[np.ndarray, "B"]) -> list[str]:
        """Return a name for each picture, such as its file's path, for messages."""
        return [f"picture {index}" for index in indices.tolist()]

    def skipped(self) -> dict[str, int]:
        """Return the number of unusable pictures found so far, keyed by reason."""
        return {}

    def inventory(self) -> Inventory:
        """Return the files that were used and left out when the data set was opened.

        The base class returns the number of pictures.
        """
        inventory = Inventory()
        inventory.add(PICTURES, (), len(self))
        return inventory


class TaskShapes(NamedTuple):
    """The shapes of images and texts that a training task expects."""

    size: int
    """Height and width of the pictures in pixels."""
    embeddings: tuple[int, int] | None = None
    """(tokens, width) if the texts are embeddings; None if they are captions."""
    moments: tuple[int, int, int] | None = None
    """(h, w, 2 Z) if the pictures are VAE moments, which are the means and log variances of latents
    with Z channels; None if they are pixels."""


class DecodedPictures(Pictures):
    """A data set decoded from records of encoded images. It counts and replaces unusable records.

    The replacement of an unusable record is drawn at random, seeded with the record's index. So the
    order of the data depends neither on the number of processes nor on restarts.
    """

    def __init__(
        self,
        records: Records,
        make: Callable[..., np.ndarray],
        data: Data,
        size_of: Callable[[bytes], tuple[int, int]] = decoding.size_of,
    ):
        """Wrap a list of encoded records.

        Args:
            records: the records.
            make: `make(image, place=(x, y))` decodes and crops a record's image, or raises
                Unusable. In views made by `cropped_to`, the call has another keyword argument,
                `shape`, the (height, width) of the crop. With data.loss_mask, it also has `mask`,
                the record's mask, and the result has a fourth channel, the loss's weights.
            data: the config's data group, which sets the minimum length of captions (min_chars) and
                the allowed share of damaged records (max_broken).
            size_of: returns height and width of an encoded image, or (0, 0) if it is damaged.
        """
        self._size_of = size_of
        self._records, self._make, self._max_broken = records, make, data.max_broken
        self._filters = {name: getattr(data, name) for name in _FILTERS}
        self._fields, self._masked = picture_fields.read(data.fields), bool(data.loss_mask)
        self._unusable: dict[int, str] = {}
        self._apart, self._groups = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._counts = collections.Counter[str]()
        self._lock = threading.Lock()

    def exclude_substitutes(self, indices: Int[np.ndarray, "N"]) -> None:
        self._apart = indices

    def substitute_within(self, groups: Int[np.ndarray, "N"]) -> None:
        self._groups = groups

    def sizes(self, indices: Int[np.ndarray, "B"]) -> Int[np.ndarray, "B 2"]:
        """Return height and width in pixels from the images' headers; (0, 0) for damaged images."""
        heads = self._records.heads(indices.tolist())
        # The tags of a PNG may follow its pixels. Behind a head that is cut, they cannot be read
        # (the size is then (0, 0)), only found.
        cut = [row for row, head in enumerate(heads) if len(head) == HEAD and head[:4] == _PNG]
        ends = self._records.ends([int(indices[row]) for row in cut]) if cut else []
        for row, end in zip(cut, ends, strict=True):
            heads[row] += end
        sizes = [self._size_of(head) for head in heads]
        # With large metadata, a header can be longer than the head: read the whole file.
        rows = [row for row, size in enumerate(sizes) if size == (0, 0)]
        records = self._records.read([int(indices[row]) for row in rows]) if rows else []
        for row, record in zip(rows, records, strict=True):
            sizes[row] = self._size_of(record.image)
        return np.array(sizes, np.int64).reshape(-1, 2)

    def cropped_to(self, shape: tuple[int, int]) -> "DecodedPictures":
        """Return a view of this data set whose pictures are cropped to `shape`, (height, width).

        A record that is unusable in several views is counted once.
        """
        view = DecodedPictures.__new__(DecodedPictures)
        vars(view).update(vars(self), _make=functools.partial(self._make, shape=shape))
        return view

    def __len__(self) -> int:
        """Return the number of records, including unusable ones."""
        return len(self._records)

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[PictureArray, Sequence[Any]]:
        """Decode pictures and return them with their texts.

        Unusable records are replaced.

        Raises:
            ValueError: no usable replacement was found, or the share of damaged records exceeds
                data.max_broken.
        """
        images, texts, *_ = self.columns(indices, places)
        return images, texts

    def columns(self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None) -> Columns:
        """Decode pictures and return them with their texts and numbers, as `read` does."""
        images, texts, numbers, _ = zip(*self._read(indices, places), strict=True)
        named = {f.name: np.array([of[f.name] for of in numbers]) for f in self._fields}
        pixels = np.stack(images)
        if not self._masked:
            return Columns(pixels, texts, named)
        return Columns(pixels[..., :3], texts, named, pixels[..., 3])

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        return self._records.keys(indices)

    def files(self) -> list[str]:
        return self._records.files()

    def id(self) -> str:
        return self._records.id()

    def rows(self, indices: Int[np.ndarray, "B"]) -> tuple[Int[np.ndarray, "N"], list[Row]]:
        """Return (indices, rows of a table) of the records with a usable text and usable numbers.

        The other records are added to the counts that `skipped` returns. If the records are in a
        table, no image is read.
        """
        usable, rows = [], []
        for index, row in zip(indices.tolist(), self._rows_of(indices), strict=True):
            try:
                text, numbers = self._described(row)
            except decoding.Unusable as error:
                self._count(index, row.name, error)
                continue
            usable.append(index)
            rows.append(row._replace(text=text, numbers=numbers))
        return np.array(usable, np.int64), rows

    def _rows_of(self, indices: Int[np.ndarray, "B"]) -> list[Row]:
        if isinstance(self._records, Table):
            with self._lock:
                self._counts["read"] += len(indices)
            texts = self._records.texts(indices.tolist())
            found = map(self._records.row, indices.tolist())
            return [row._replace(text=text) for row, text in zip(found, texts, strict=True)]
        read = zip(self._fetch(indices.tolist()), self.keys(indices).tolist(), strict=True)
        return [Row(of.name, key, of.image, of.text, (), of.numbers) for of, key in read]

    def names(self, indices: Int[np.ndarray, "B"]) -> list[str]:
        """Return the name of each record; for an unusable record, the name of its replacement."""
        return [name for *_, name in self._read(indices, None)]

    def _read(self, indices: np.ndarray, places: np.ndarray | None) -> list[tuple]:
        """Return (image, text, numbers, name) of each record, or of its replacement."""
        rows = [decoding.CENTRE] * len(indices) if places is None else places.tolist()
        usable = []
        for first in range(0, len(indices), _CHUNK):
            chunk = [int(index) for index in indices[first : first + _CHUNK]]
            readable = sorted({index for index in chunk if index not in self._unusable})
            records = dict(zip(readable, self._fetch(readable), strict=True))
            for index, place in zip(chunk, rows[first : first + _CHUNK], strict=True):
                usable.append(self._usable(index, tuple(place), records))
        return usable

    def usable(
        self, indices: Int[np.ndarray, "B"]
    ) -> tuple[Int[np.ndarray, "N"], Shaped[np.ndarray, "N ..."], Sequence[Any]]:
        """Return (indices, images, texts) of the usable records among `indices`.

        Unusable records are added to the counts that `skipped` returns.
        """
        usable, pairs = [], []
        for index, record in zip(indices.tolist(), self._fetch(indices.tolist()), strict=True):
            try:
                pairs.append(self._picture(record, decoding.CENTRE)[:2])
                usable.append(index)
            except decoding.Unusable as error:
                self._count(index, record.name, error)
        images = np.stack([i for i, _ in pairs]) if pairs else np.zeros((0,), np.uint8)
        images = images[..., :3] if self._masked else images
        return np.array(usable, np.int64), images, [text for _, text in pairs]

    def texts(self, indices: Int[np.ndarray, "B"]) -> Sequence[Any]:
        """Return the caption or embeddings of each record, or "" for a damaged text.

        If the format allows it, the images are not read.
        """
        texts = self._records.texts(indices.tolist())
        return ["" if isinstance(text, decoding.Unusable) else text for text in texts]

    def skipped(self) -> dict[str, int]:
        """Return the number of skipped images, keyed by reason.

        The counts include the unusable images found so far, and what the source left out when it
        was opened.
        """
        with self._lock:
            unusable = collections.Counter(self._unusable.values())
        return dict(unusable + collections.Counter(self._records.left_out()))

    def inventory(self) -> Inventory:
        return self._records.inventory()

    def _usable(self, index: int, place: tuple, records: Mapping[int, Record]) -> tuple:
        draw, original = np.random.default_rng(index), index
        for _ in range(_MAX_SUBSTITUTES):
            if index not in self._unusable:
                record = records[index] if index in records else self._fetch([index])[0]
                try:
                    return *self._picture(record, place), record.name
                except decoding.Unusable as error:
                    self._count(index, record.name, error)
            if len(self._unusable) == len(self):
                break
            index = self._replacement(draw, original)
        filters = ", ".join(f"{name}={value}" for name, value in self._filters.items())
        tries = "" if len(self._unusable) == len(self) else f"in {_MAX_SUBSTITUTES} tries "
        raise ValueError(
            f"no usable record was found {tries}among {len(self)} records: {self.skipped()}. Check "
            f"the files named in the log, and the filters in the config's data group: {filters}"
        )

    def _replacement(self, draw: np.random.Generator, original: int) -> int:
        if len(self._groups):
            return int(draw.choice(np.flatnonzero(self._groups == self._groups[original])))
        while True:
            index = int(draw.integers(len(self)))
            row = np.searchsorted(self._apart, index)
            if row == len(self._apart) or self._apart[row] != index:
                return index

    def _fetch(self, indices: Sequence[int]) -> Sequence[Record]:
        with self._lock:
            self._counts["read"] += len(indices)
        return self._records.read(indices) if indices else []

    def _picture(self, record: Record, place: tuple) -> tuple[np.ndarray, Any, dict[str, float]]:
        text, numbers = self._described(record)
        mask = {"mask": record.mask} if self._masked else {}
        return self._make(record.image, place=place, **mask), text, numbers

    def _described(self, record: Record | Row) -> tuple[Any, dict[str, float]]:
        """Return the text and numbers of a record. Raises Unusable if they are not usable."""
        if isinstance(record.text, decoding.Unusable):
            raise record.text
        text = captions.long_enough(record.text, self._filters["min_chars"])
        return text, checked_numbers(record.numbers, self._fields)

    def _count(self, index: int, name: str, error: decoding.Unusable) -> None:
        with self._lock:
            if index in self._unusable:  # Another thread has counted it.
                return
            self._unusable[index] = error.reason
            self._counts["broken"] += error.reason not in _FILTERED
            num_read, num_broken = min(self._counts["read"], len(self)), self._counts["broken"]
        if len(self._unusable) <= _NUM_WARNINGS:
            logging.warning("skipped %s: %s", name, error)
        # At the start, one damaged record would be a large share of the records read so far.
        if num_broken > self._max_broken * max(num_read, min(_FEW, len(self))):
            raise ValueError(
                f"{num_broken} of {num_read} records are damaged, a larger share than "
                f"data.max_broken={self._max_broken}: {self.skipped()}; the last is {name} "
                f"({error}). Repair or remove them, or raise data.max_broken"
            )
