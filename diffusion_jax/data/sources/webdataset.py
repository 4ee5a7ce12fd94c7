"""Webdataset tars, read at random: a list of their records says where each lies (see listing)."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from diffusion_jax.config.settings import Data
from diffusion_jax.data import listing, records, storage, tars
from diffusion_jax.data.pictures import Shapes
from diffusion_jax.data.records import Record, Records

Spans = tuple[tuple[int, int], tuple[int, int]]
"""(offset, size) of an image and of its text."""
_GAP = 64 * 2**10  # To read this much more costs less than a second request.


def open_source(data: Data, _: Shapes) -> Records:
    """The images of a config's tars."""
    return WebDataset(records.path_of(data), data.text, data.uncaptioned, data.max_broken)


class WebDataset(Records):
    """The images of one or many tars, in the order of the tars' names and of their members.

    `path` is a tar, a folder (searched recursively), a list of tars that NeMo wrote (wdinfo.pkl),
    or a pattern of these such as "shard-{0000..0099}.tar"; each may be a URL. `text` is that of
    folder.Folder without its tables; `uncaptioned` likewise. Tars that cannot be read at all are
    left out as long as they are no more than the share `max_broken`. `images` are the suffixes of
    what takes the images' place.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        text: str = "txt",
        uncaptioned: str = "error",
        max_broken: float = 0.0,
        images: Sequence[str] = records.IMAGE_SUFFIXES,
    ):
        """Reads the tars' headers, or the index; FileNotFoundError or ValueError as Folder."""
        self._text = text
        suffix, _ = records.check_text(text)
        self._listing = listing.open_listing(os.fspath(path), images, suffix)
        facts = self._listing.facts
        _check_broken(len(self._listing.tars), facts, max_broken)
        records.check_any(facts["images"], os.fspath(path), facts["suffixes"], images)
        records.check_captions(
            facts["bare"], facts["first"], facts["images"], text, uncaptioned, facts["suffixes"]
        )

    def __len__(self) -> int:
        """The number of images that have a text."""
        return len(self._listing.spans)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads both members of each, in one request where they are neighbours."""
        places = [self._place(index) for index in indices]
        parts = [(tar, *part) for tar, spans in places for part in _parts(spans)]
        contents = iter(storage.read_ranges(*zip(*parts, strict=True)))
        return [self._record(*place, contents) for place in places]

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """Reads the texts alone; OSError if a tar has gone."""
        places = [(tar, *spans[1]) for tar, spans in map(self._place, indices)]
        parts = [(tar, offset, offset + size) for tar, offset, size in places]
        contents = storage.read_ranges(*zip(*parts, strict=True))
        return [records.read_text(text, self._text) for text in contents]

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """Of the name of a record's tar, without its folder, and of its place there."""
        which = np.searchsorted(self._listing.firsts, indices, side="right") - 1
        names = [os.path.basename(tar) for tar in self._listing.tars]
        tars_keys = np.array([records.key_of(name) for name in names], np.uint64)
        return tars_keys[which] + (indices - self._listing.firsts[which]).astype(np.uint64)

    def left_out(self) -> dict[str, int]:
        """Counts of "no_caption", "broken_tar", and "truncated_tar", of which the rest is used."""
        facts = self._listing.facts
        reasons = {"no_caption": "bare", "truncated_tar": "truncated", "broken_tar": "broken"}
        return {reason: facts[name] for reason, name in reasons.items() if facts[name]}

    def _place(self, index: int) -> tuple[str, Spans]:
        """The tar of a record, and the places of its two files there."""
        tar = int(np.searchsorted(self._listing.firsts, index, side="right")) - 1
        image, image_size, text, text_size = self._listing.spans[index].tolist()
        spans = (image * tars.BLOCK, image_size), (text * tars.BLOCK, text_size)
        return self._listing.tars[tar], spans

    def _record(self, tar: str, spans: Spans, contents: Iterator[bytes]) -> Record:
        read = [(first, next(contents)) for first, _ in _parts(spans)]
        image, text = (_cut(read, *span) for span in spans)
        header = _cut(read, spans[0][0] - tars.BLOCK, tars.BLOCK)
        return Record(image, records.read_text(text, self._text), listing.full_name(tar, header))


def _check_broken(num_tars: int, facts: Mapping[str, Any], max_broken: float) -> None:
    """ValueError if more than a share of the tars, or all, cannot be read."""
    broken = facts["broken"]
    if broken and (broken > max_broken * num_tars or broken == num_tars):
        share = f"{broken} of {num_tars} tars cannot be read"
        raise ValueError(f"{facts['error']} ({share}, data.max_broken is {max_broken})")


def _parts(spans: Spans) -> list[tuple[int, int]]:
    """The ranges (first, last) to read for a record: one, if its members lie together."""
    (image, image_size), (text, text_size) = spans
    parts = [(image - tars.BLOCK, image + image_size), (text, text + text_size)]
    first, last = min(parts)[0], max(end for _, end in parts)
    return [(first, last)] if last - first < image_size + text_size + _GAP else parts


def _cut(read: list[tuple[int, bytes]], offset: int, size: int) -> bytes:
    """Bytes of a tar out of the ranges (first, contents) that were read."""
    for first, contents in read:
        if first <= offset <= first + len(contents) and offset + size <= first + len(contents):
            return contents[offset - first : offset - first + size]
    return b""  # The tar has become shorter.
