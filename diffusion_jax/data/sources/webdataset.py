"""Webdataset tars, read at random: their indices make them lists of records (see data.tars)."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Int

from diffusion_jax.data import records, storage, tars
from diffusion_jax.data.pictures import Shapes
from diffusion_jax.data.records import Record, Records
from diffusion_jax.data.tars import Index
from diffusion_jax.settings import Data

_NAME = 100  # Bytes of a member's name at the start of its header.
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
        self._tars, indices, num_broken = _open_all(tars.find(os.fspath(path)), max_broken)
        spans = [_spans(index, images, suffix) for index in indices]
        self._tar_of = np.repeat(np.arange(len(spans)), [len(s) for s in spans])
        self._spans = np.concatenate(spans)  # [N, (image, text), (offset, size)], -1 for no text
        num_truncated = sum(int(index.truncated) for index in indices)
        self._left_out = Counter(truncated_tar=num_truncated, broken_tar=num_broken)
        suffixes = [str(suffix) for index in indices for suffix in np.unique(index.suffix)]
        records.check_any(len(self._spans), os.fspath(path), suffixes, images)
        self._drop_bare(uncaptioned, suffixes)

    def __len__(self) -> int:
        """The number of images that have a text."""
        return len(self._spans)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads both members of each, in one request where they are neighbours."""
        parts = [part for index in indices for part in _parts(self._spans[index])]
        paths = [self._tars[self._tar_of[i]] for i in indices for _ in _parts(self._spans[i])]
        contents = iter(storage.read_ranges(paths, *zip(*parts, strict=True)))
        return [self._record(index, contents) for index in indices]

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """Reads the texts alone; OSError if a tar has gone."""
        paths = [self._tars[self._tar_of[index]] for index in indices]
        offsets, sizes = self._spans[list(indices), 1].T.tolist()
        lasts = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        contents = storage.read_ranges(paths, offsets, lasts)
        return [records.read_text(text, self._text) for text in contents]

    def left_out(self) -> dict[str, int]:
        """Counts of "no_caption", "broken_tar", and "truncated_tar", of which the rest is used."""
        return {reason: n for reason, n in self._left_out.items() if n}

    def _record(self, index: int, contents: Iterator[bytes]) -> Record:
        spans = self._spans[index]
        read = [(first, next(contents)) for first, _ in _parts(spans)]
        image, text = (_cut(read, int(offset), int(size)) for offset, size in spans)
        header = _cut(read, int(spans[0, 0]) - tars.BLOCK, _NAME)
        name = self._full_name(index, header)
        return Record(image, records.read_text(text, self._text), name)

    def _drop_bare(self, uncaptioned: str, suffixes: Sequence[str]) -> None:
        """Takes the records without a text out, or raises ValueError."""
        bare = np.flatnonzero(self._spans[:, 1, 0] < 0)
        first = [self._name(i) for i in bare[:3].tolist()]
        records.check_captions(
            len(bare), first, len(self._spans), self._text, uncaptioned, suffixes
        )
        self._left_out["no_caption"] = len(bare)
        self._tar_of = np.delete(self._tar_of, bare)
        self._spans = np.delete(self._spans, bare, axis=0)

    def _name(self, index: int) -> str:
        """A record's name, read from the tar each time: names of millions would fill memory."""
        first = int(self._spans[index, 0, 0]) - tars.BLOCK
        tar = self._tars[self._tar_of[index]]
        return self._full_name(index, *storage.read_ranges([tar], [first], [first + _NAME]))

    def _full_name(self, index: int, header: bytes) -> str:
        name = header.partition(bytes(1))[0].decode(errors="replace")
        return f"{self._tars[self._tar_of[index]]}/{name}"


def _open_all(paths: list[str], max_broken: float) -> tuple[list[str], list[Index], int]:
    """The tars that can be read, their indices, and how many cannot; ValueError if too many."""
    errors: list[ValueError] = []

    def attempt(path: str) -> Index | None:
        try:
            return tars.load_index(path)
        except ValueError as error:
            errors.append(error)
            logging.warning("left out: %s", error)
            return None

    with ThreadPoolExecutor(8) as threads:  # Reading headers mostly waits for the disk.
        indices = list(threads.map(attempt, paths))
    if errors and (len(errors) > max_broken * len(paths) or len(errors) == len(paths)):
        share = f"{len(errors)} of {len(paths)} tars cannot be read"
        raise ValueError(f"{errors[0]} ({share}, data.max_broken is {max_broken})")
    whole = [path for path, index in zip(paths, indices, strict=True) if index is not None]
    return whole, [index for index in indices if index is not None], len(errors)


def _spans(index: Index, images: Sequence[str], text: str) -> Int[np.ndarray, "N 2 2"]:
    """(offset, size) of image and text for each record that has an image; -1 for no text."""
    num_records = int(index.record.max(initial=-1)) + 1
    spans = np.full((num_records, 2, 2), -1, np.int64)
    for column, suffixes in enumerate((images, (text,))):
        rows = np.isin(index.suffix, suffixes)
        spans[index.record[rows], column] = index.span[rows]
    return spans[spans[:, 0, 0] >= 0]


def _parts(spans: Int[np.ndarray, "2 2"]) -> list[tuple[int, int]]:
    """The ranges (first, last) to read for a record: one, if its members lie together."""
    (image, image_size), (text, text_size) = spans.tolist()
    parts = [(image - tars.BLOCK, image + image_size), (text, text + text_size)]
    first, last = min(parts)[0], max(end for _, end in parts)
    return [(first, last)] if last - first < image_size + text_size + _GAP else parts


def _cut(read: list[tuple[int, bytes]], offset: int, size: int) -> bytes:
    """Bytes of a tar out of the ranges (first, contents) that were read."""
    for first, contents in read:
        if first <= offset <= first + len(contents) and offset + size <= first + len(contents):
            return contents[offset - first : offset - first + size]
    return b""  # The tar has become shorter.
