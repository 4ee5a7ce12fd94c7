"""Webdataset tars, read at random: an index of where each member lies makes them lists of records.

Members `a/0001.jpg` and `a/0001.txt` of one tar are a record: their names agree up to the first dot
of the last part. Each tar's index is kept beside it (`shard.tar.index.npz`), or in the user's cache
where that folder cannot be written, and made anew when the tar's size or time changes.
"""

import functools
import hashlib
import io
import os
import pathlib
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Int

from diffusion_jax import files
from diffusion_jax.data import sources
from diffusion_jax.data.sources import Record
from diffusion_jax.text import precomputed

_INDEX_VERSION = 1
_BLOCK = 512  # Tars are made of blocks, a member's header in the one before its contents.


class Index(NamedTuple):
    """Every file of a tar, in its order."""

    record: Int[np.ndarray, "M"]
    """Members of one record have one number."""
    suffix: np.ndarray
    """Text [M], such as "jpg"."""
    span: Int[np.ndarray, "M 2"]
    """Where the contents begin, and how many bytes they have."""
    truncated: np.ndarray
    """bool []: the tar ends in the middle of a member."""


class WebDataset:
    """The images of one or many tars, in the order of the tars' names and of their members.

    `path` is a tar, a folder (searched recursively) or a pattern such as "shard-{0000..0099}.tar".
    `text` and `uncaptioned` are those of sources.Folder.
    """

    def __init__(self, path: str | os.PathLike[str], text: str = "txt", uncaptioned: str = "error"):
        """Reads the tars' headers, or the index; FileNotFoundError or ValueError as Folder."""
        self._text = text
        precomputed.check_suffix(text)
        self._tars = _find(os.fspath(path))
        with ThreadPoolExecutor(8) as threads:  # Reading headers mostly waits for the disk.
            indices = list(threads.map(load_index, self._tars))
        spans = [_spans(index, text) for index in indices]
        self._tar_of = np.repeat(np.arange(len(spans)), [len(s) for s in spans])
        self._spans = np.concatenate(spans)  # [N, (image, text), (offset, size)], -1 for no text
        self._left_out = Counter(truncated_tar=sum(int(index.truncated) for index in indices))
        suffixes = [str(suffix) for index in indices for suffix in np.unique(index.suffix)]
        sources.check_any(len(self._spans), os.fspath(path), suffixes)
        self._drop_bare(uncaptioned, suffixes)

    def __len__(self) -> int:
        """How many images have a text."""
        return len(self._spans)

    def __getitem__(self, index: int) -> Record:
        """Reads both members; OSError if the tar has gone."""
        with self._tars[self._tar_of[index]].open("rb") as tar:
            name = _image_name(tar, self._spans[index])
            image, text = (_read(tar, *span) for span in self._spans[index].tolist())
        text_name = f"{name.rpartition('.')[0]}.{self._text}"
        return Record(image, sources.read_text(text, text_name), name)

    def text(self, index: int) -> Any:
        """Reads the text alone; OSError if the tar has gone."""
        with self._tars[self._tar_of[index]].open("rb") as tar:
            contents = _read(tar, *self._spans[index, 1].tolist())
        return sources.read_text(contents, f"{tar.name}.{self._text}")

    def left_out(self) -> dict[str, int]:
        """Counts of "no_caption" and of "truncated_tar", whose whole members are still used."""
        return {reason: n for reason, n in self._left_out.items() if n}

    def _drop_bare(self, uncaptioned: str, suffixes: Sequence[str]) -> None:
        """Takes the records without a text out, or raises ValueError."""
        bare = np.flatnonzero(self._spans[:, 1, 0] < 0)
        first = [self._name(i) for i in bare[:3].tolist()]
        sources.check_captions(
            len(bare), first, len(self._spans), self._text, uncaptioned, suffixes
        )
        self._left_out["no_caption"] = len(bare)
        self._tar_of = np.delete(self._tar_of, bare)
        self._spans = np.delete(self._spans, bare, axis=0)

    def _name(self, index: int) -> str:
        with self._tars[self._tar_of[index]].open("rb") as tar:
            return _image_name(tar, self._spans[index])


def load_index(tar: pathlib.Path) -> Index:
    """The saved index if it is of this very file, else a new one, which is saved."""
    stamp = np.array([_INDEX_VERSION, tar.stat().st_size, tar.stat().st_mtime_ns])
    places = [tar.with_name(f"{tar.name}.index.npz"), _cache_folder() / f"{_digest(tar)}.npz"]
    for place in places:
        if (index := _load(place, stamp)) is not None:
            return index
    index = scan(tar)
    _save(index, stamp, places)
    return index


def scan(path: pathlib.Path) -> Index:
    """Reads the headers of a tar; ValueError if it is compressed or no tar."""
    records: dict[str, int] = {}
    rows = []
    size, truncated = path.stat().st_size, False
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                key, suffix = _split(member.name)
                if member.isfile() and member.offset_data + member.size <= size and key:
                    row = records.setdefault(key, len(records))
                    rows.append((row, suffix, member.offset_data, member.size))
    except tarfile.ReadError as error:
        if not rows:
            raise ValueError(
                f"{path} is no plain tar ({error}): unpack it if compressed"
            ) from error
        truncated = True
        logging.warning(
            "%s ends too early (%s): its %d whole files are used", path, error, len(rows)
        )
    record, suffixes, offsets, sizes = zip(*rows, strict=True) if rows else ((), (), (), ())
    spans = np.stack([offsets, sizes], axis=1).astype(np.int64)
    return Index(np.array(record, np.int64), np.array(suffixes, str), spans, np.array(truncated))


def expand(pattern: str) -> list[str]:
    """Braces as in a shell: "{a,b}" are alternatives, "{08..11}" numbers of two digits."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if numbers:
        first, last = numbers.groups()
        parts = [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    else:
        parts = match[1].split(",")
    return [
        before + part + after
        for before in [pattern[: match.start()]]
        for part in parts
        for after in expand(pattern[match.end() :])
    ]


def _find(path: str) -> list[pathlib.Path]:
    tars = [pathlib.Path(name) for name in expand(path)]
    sources.check_exists(tars, "webdataset")
    if len(tars) == 1 and tars[0].is_dir():
        root = tars[0]
        tars = sorted(root.rglob("*.tar"))
        if not tars:
            raise ValueError(f"no .tar in {root}: image files are read by the source 'folder'")
    return tars


def _split(name: str) -> tuple[str, str]:
    """Key and suffix of a member; no key for hidden files (macOS writes ._a.jpg)."""
    folder, _, file = name.rpartition("/")
    stem = file.partition(".")[0]
    return (f"{folder}/{stem}" if stem else ""), sources.suffix_of(file)


def _spans(index: Index, text: str) -> Int[np.ndarray, "N 2 2"]:
    """(offset, size) of image and text for each record that has an image; -1 for no text."""
    num_records = int(index.record.max(initial=-1)) + 1
    spans = np.full((num_records, 2, 2), -1, np.int64)
    for column, wanted in enumerate((sources.IMAGE_SUFFIXES, (text,))):
        rows = np.isin(index.suffix, wanted)
        spans[index.record[rows], column] = index.span[rows]
    return spans[spans[:, 0, 0] >= 0]


def _read(tar: io.BufferedReader, offset: int, size: int) -> bytes:
    tar.seek(offset)
    return tar.read(size)


def _image_name(tar: io.BufferedReader, spans: Int[np.ndarray, "2 2"]) -> str:
    """Read from the header in the tar when it is wanted: names of millions would fill memory."""
    name = _read(tar, int(spans[0, 0]) - _BLOCK, 100).rstrip(bytes(1))
    return f"{tar.name}/{name.decode(errors='replace')}"


def _load(place: pathlib.Path, stamp: np.ndarray) -> Index | None:
    try:
        # Through memory: np.load leaves a damaged file open.
        with np.load(io.BytesIO(place.read_bytes()), allow_pickle=False) as saved:
            if np.array_equal(saved["stamp"], stamp):
                return Index(*(saved[name] for name in Index._fields))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # Absent, or not written by us: it is made anew.
    return None


def _save(index: Index, stamp: np.ndarray, places: list[pathlib.Path]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, stamp=stamp, **index._asdict())
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            return files.write_whole(place, buffer.getvalue())
        except OSError:
            continue  # A read-only folder: the next place, or else scan again next time.
    logging.warning("no index can be kept at %s: every start reads all headers again", places)


def _digest(tar: pathlib.Path) -> str:
    return hashlib.sha256(str(tar.resolve()).encode()).hexdigest()[:32]


@functools.cache
def _cache_folder() -> pathlib.Path:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "diffusion_jax" / "tar_index"
