"""Read webdataset tars in random order, with a listing of all records (data/listing.py)."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from diffusion_jax.config import picture_fields
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.settings import Data
from diffusion_jax.data import captions, listing, records, storage, tars
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import Inventory
from diffusion_jax.data.pictures import TaskShapes
from diffusion_jax.data.records import Record, Records
from diffusion_jax.files import untrusted

Spans = Sequence[tuple[int, int]]
"""(offset, size) of an image and of each of its texts in a tar, in bytes. A missing text has the
offset 0."""
_GAP = 64 * 2**10  # Reading this many superfluous bytes is cheaper than a second request.


def open_source(data: Data, _: TaskShapes) -> Records:
    """Open the webdataset tars at a config's data.path."""
    return WebDataset(
        records.path_of(data), data.text, data.uncaptioned, data.max_broken,
        fields=picture_fields.read(data.fields),
    )  # fmt: skip


class WebDataset(Records):
    """The images and texts in one or more tars, in the order of the tars and of their members."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        text: str = "txt",
        uncaptioned: str = "error",
        max_broken: float = 0.0,
        images: Sequence[str] = (),
        fields: Sequence[Field] = (),
    ):
        """Open the listing of records in the tars, or build it from the tars' headers.

        Args:
            path: a tar, a folder (searched recursively), NeMo's list of tars (wdinfo.pkl), or a
                pattern such as "shard-{0000..0099}.tar". All of these may be URLs.
            text: suffix of the text files: "txt" or "json:FIELD" for captions, or a suffix such as
                "npy" or "t5.npz" for embeddings. Several places, such as "txt,json:long*0.5", give
                the images several texts.
            uncaptioned: "error" raises ValueError if images lack a text, "drop" leaves them out.
            max_broken: largest allowed share of unreadable tars, and of files that are lost behind
                damaged headers.
            images: suffixes of the files of VAE moments, if the tars hold moments; () for images.
            fields: the numbers of each image, which are fields of the JSON file KEY.json.

        Raises:
            FileNotFoundError: a tar is missing.
            ValueError: too many tars or headers are damaged, there are no images, no image has a
                text, or some images lack a text and `uncaptioned` is not "drop".
        """
        self._parts = records.check_text(text)
        self._fields = fields
        records.check_places(fields, ("json",))
        suffixes = [part.suffix for part in self._parts]
        self._listing = listing.open_listing(
            os.fspath(path),
            images or untrusted.image_suffixes(),
            suffixes,
            "json" if fields else "",
        )
        facts, inventory = self._listing.facts, self._listing.inventory
        self._check_damage(max_broken)
        num_bare, first = inventory.counts["no_caption"], inventory.first.get("no_caption", [])
        num_images = len(self) + num_bare
        kind = f"{', '.join(images)} files" if images else "pictures (jpg, png, webp, ...)"
        try:
            records.check_any(num_images, path, facts["suffixes"], kind)
            records.check_captions(
                num_bare, first, num_images, text, uncaptioned, facts["suffixes"]
            )
        except ValueError as error:
            if not inventory.damaged():
                raise
            raise ValueError(
                f"tars in {path} are damaged: copy or download them again. This may be the cause: "
                f"{error}"
            ) from error

    def __len__(self) -> int:
        return len(self._listing.spans)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Return the records with these indices.

        An image and its text are read together if they are close to each other in the tar.
        """
        places = [self._place(index) for index in indices]
        parts = [(tar, *part) for tar, spans in places for part in _parts(spans)]
        contents = iter(storage.read_ranges(*zip(*parts, strict=True)))
        return [self._record(*place, contents) for place in places]

    def heads(self, indices: Sequence[int]) -> list[bytes]:
        """Return the first HEAD bytes of each image, or the whole image if it is shorter."""
        places = [(tar, *spans[0]) for tar, spans in map(self._place, indices)]
        parts = [(tar, first, first + min(size, records.HEAD)) for tar, first, size in places]
        return storage.read_ranges(*zip(*parts, strict=True))

    def ends(self, indices: Sequence[int]) -> list[bytes]:
        """Return the last HEAD bytes of each image, or the whole image if it is shorter."""
        places = [(tar, *spans[0]) for tar, spans in map(self._place, indices)]
        skipped = [max(0, size - records.HEAD) for *_, size in places]
        parts = [(t, at + n, at + size) for (t, at, size), n in zip(places, skipped, strict=True)]
        return storage.read_ranges(*zip(*parts, strict=True))

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """Return the caption or embeddings of each record, without reading the images.

        Raises OSError for a removed tar.
        """
        texts = slice(1, 1 + len(self._parts))
        places = [(tar, spans[texts]) for tar, spans in map(self._place, indices)]
        parts = [
            (tar, first - tars.BLOCK, first + size)
            for tar, spans in places for first, size in spans if first
        ]  # fmt: skip
        members = iter(storage.read_ranges(*zip(*parts, strict=True)))
        return [self._text([next(members) if o else None for o, _ in s]) for _, s in places]

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """Return a key per record: the hash of its tar's file name, plus its index in the tar."""
        numbers = np.searchsorted(self._listing.firsts, indices, side="right") - 1
        names = [os.path.basename(tar) for tar in self._listing.tars]
        tar_keys = np.array([records.key_of(name) for name in names], np.uint64)
        return tar_keys[numbers] + (indices - self._listing.firsts[numbers]).astype(np.uint64)

    def inventory(self) -> Inventory:
        return self._listing.inventory

    def files(self) -> list[str]:
        return list(self._listing.tars)

    def _check_damage(self, max_broken: float) -> None:
        counts, num_tars = self._listing.inventory.counts, len(self._listing.tars)
        num_broken, lost = counts["broken_tar"], counts["broken_header"]
        if num_broken and (num_broken > max_broken * num_tars or num_broken == num_tars):
            raise ValueError(
                f"{num_broken} of {num_tars} tars cannot be read, and data.max_broken is "
                f"{max_broken}: replace or remove these tars. The first error is: "
                f"{self._listing.facts['error']}"
            )
        if lost > max_broken * (len(self) + lost):
            (first, *_) = self._listing.inventory.first["broken_header"]
            raise ValueError(
                f"damaged headers in tars, such as {first}, hide {lost} files or more, a larger "
                f"share than data.max_broken={max_broken}: copy or download these tars again"
            )

    def _place(self, index: int) -> tuple[str, Spans]:
        """Return the tar of a record, and the (offset, size) of its image and of its texts."""
        tar = int(np.searchsorted(self._listing.firsts, index, side="right")) - 1
        numbers = self._listing.spans[index].tolist()
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return self._listing.tars[tar], [(block * tars.BLOCK, size) for block, size in pairs]

    def _record(self, tar: str, spans: Spans, contents: Iterator[bytes]) -> Record:
        ranges = [(first, next(contents)) for first, _ in _parts(spans)]
        members = [_cut(ranges, *span) if span[0] else None for span in spans]
        name = listing.full_name(tar, (members[0] or b"")[: tars.BLOCK])
        try:
            image, *texts = (None if m is None else tars.contents(m) for m in members)
        except Unusable as error:
            return Record(b"", error, name)
        numbers = (texts.pop() if self._fields else None) or b"{}"
        return Record(
            image or b"", self._join(texts), name, records.read_numbers(numbers, self._fields)
        )

    def _text(self, members: Sequence[bytes | None]) -> Any:
        try:
            return self._join([None if m is None else tars.contents(m) for m in members])
        except Unusable as error:
            return error

    def _join(self, texts: Sequence[bytes | None]) -> Any:
        pairs = zip(self._parts, texts, strict=True)
        read = records.read_text
        return captions.join((read(t, p.text), p.weight) for p, t in pairs if t is not None)


def _parts(spans: Spans) -> list[tuple[int, int]]:
    """Return the byte ranges [first, last) to read for a record: its files with their headers.

    An image and texts that are close to each other share a range.
    """
    ranges = []
    for first, last in sorted((f - tars.BLOCK, f + size) for f, size in spans if f):
        if ranges and first - ranges[-1][1] < _GAP:
            ranges[-1] = ranges[-1][0], max(last, ranges[-1][1])
        else:
            ranges.append((first, last))
    return ranges


def _cut(ranges: list[tuple[int, bytes]], offset: int, size: int) -> bytes:
    """Return a file of `size` bytes at `offset` of a tar, after its header.

    `ranges` holds (offset of the first byte, contents) of each range that was read. If no range
    contains the bytes, the result is b"".
    """
    for first, contents in ranges:
        start, end = offset - tars.BLOCK - first, offset + size - first
        if start >= 0 and end <= len(contents):
            return contents[start:end]
    return b""  # The tar was truncated after it was listed.
