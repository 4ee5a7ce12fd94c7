"""Webdataset tars, read at random: an index of where each member lies makes them lists of records.

Members `a/0001.jpg` and `a/0001.txt` of one tar are a record: their names agree up to the first dot
of the last part. Each tar's index is kept beside it (`shard.tar.index.npz`), or in the user's cache
where that folder cannot be written, and made anew when the tar's size or time changes. Tars lie on
a disk or in an object store (see storage).
"""

import functools
import hashlib
import io
import os
import pathlib
import pickle
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Int

from diffusion_jax.data import sources, storage
from diffusion_jax.data.sources import Record
from diffusion_jax.machine import files

KEY = "__key__"
_INDEX_VERSION = 2
_BLOCK = 512  # Tars are made of blocks, a member's header in the one before its contents.
_NAME = 100  # Bytes of a name at the start of a header.
_GAP = 64 * 2**10  # To read this much more costs less than a second request.
_WDINFO = ".pkl"


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

    `path` is a tar, a folder (searched recursively), a list of tars that NeMo wrote (wdinfo.pkl),
    or a pattern of these such as "shard-{0000..0099}.tar"; each may be a URL. `text` is that of
    sources.Folder without its tables; `uncaptioned` likewise. Tars that cannot be read at all are
    left out as long as they are no more than the share `max_broken`. `images` are the suffixes of
    what takes the images' place.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        text: str = "txt",
        uncaptioned: str = "error",
        max_broken: float = 0.0,
        images: Sequence[str] = sources.IMAGE_SUFFIXES,
    ):
        """Reads the tars' headers, or the index; FileNotFoundError or ValueError as Folder."""
        self._text = text
        suffix, _ = sources.check_text(text)
        self._tars, indices, num_broken = _open_all(find(os.fspath(path)), max_broken)
        spans = [_spans(index, images, suffix) for index in indices]
        self._tar_of = np.repeat(np.arange(len(spans)), [len(s) for s in spans])
        self._spans = np.concatenate(spans)  # [N, (image, text), (offset, size)], -1 for no text
        num_truncated = sum(int(index.truncated) for index in indices)
        self._left_out = Counter(truncated_tar=num_truncated, broken_tar=num_broken)
        suffixes = [str(suffix) for index in indices for suffix in np.unique(index.suffix)]
        sources.check_any(len(self._spans), os.fspath(path), suffixes, images)
        self._drop_bare(uncaptioned, suffixes)

    def __len__(self) -> int:
        """How many images have a text."""
        return len(self._spans)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads both members of each, in one request where they are neighbours."""
        parts = [part for index in indices for part in _parts(self._spans[index])]
        tars = [self._tars[self._tar_of[i]] for i in indices for _ in _parts(self._spans[i])]
        contents = iter(storage.read_ranges(tars, *zip(*parts, strict=True)))
        return [self._record(index, contents) for index in indices]

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """Reads the texts alone; OSError if a tar has gone."""
        tars = [self._tars[self._tar_of[index]] for index in indices]
        offsets, sizes = self._spans[list(indices), 1].T.tolist()
        lasts = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        contents = storage.read_ranges(tars, offsets, lasts)
        return [sources.read_text(text, self._text) for text in contents]

    def left_out(self) -> dict[str, int]:
        """Counts of "no_caption", "broken_tar", and "truncated_tar", of which the rest is used."""
        return {reason: n for reason, n in self._left_out.items() if n}

    def _record(self, index: int, contents: Iterator[bytes]) -> Record:
        spans = self._spans[index]
        read = [(first, next(contents)) for first, _ in _parts(spans)]
        image, text = (_cut(read, int(offset), int(size)) for offset, size in spans)
        header = _cut(read, int(spans[0, 0]) - _BLOCK, _NAME)
        name = self._full_name(index, header)
        return Record(image, sources.read_text(text, self._text), name)

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
        """Read from the tar when it is wanted: names of millions would fill memory."""
        first = int(self._spans[index, 0, 0]) - _BLOCK
        tar = self._tars[self._tar_of[index]]
        return self._full_name(index, *storage.read_ranges([tar], [first], [first + _NAME]))

    def _full_name(self, index: int, header: bytes) -> str:
        name = header.partition(bytes(1))[0].decode(errors="replace")
        return f"{self._tars[self._tar_of[index]]}/{name}"


def write(path: str | os.PathLike[str], records: Iterable[Mapping[str, bytes]]) -> None:
    """A tar of records, whole or absent; its folder must exist.

    A record holds its files by their suffixes, and its name under KEY.
    """
    with (
        files.whole(path) as temporary,
        tarfile.open(temporary, "w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for record in records:
            for suffix in sorted(record.keys() - {KEY}):
                member = tarfile.TarInfo(f"{record[KEY].decode()}.{suffix}")
                member.size = len(record[suffix])
                tar.addfile(member, io.BytesIO(record[suffix]))


def load_index(tar: str) -> Index:
    """The saved index if it is of this very file, else a new one, which is saved."""
    stamp = np.array([_INDEX_VERSION, *storage.stamp(tar)])
    places = [f"{tar}.index.npz", str(_cache_folder() / f"{_digest(tar)}.npz")]
    for place in places:
        if (index := _load(place, stamp)) is not None:
            return index
    index = scan(tar)
    _save(index, stamp, places)
    return index


def scan(path: str) -> Index:
    """Reads the headers of a tar; ValueError if it is compressed or no tar."""
    records: dict[str, int] = {}
    rows = []
    size, truncated = storage.stamp(path)[0], False
    try:
        with storage.open_file(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
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


def find(path: str) -> list[str]:
    """The tars of a path, a folder, pattern or wdinfo.pkl; FileNotFoundError if one is not."""
    tars = [tar for name in expand(path) for tar in _listed(name)]
    with ThreadPoolExecutor(32) as threads:  # An object store answers slowly.
        there = list(threads.map(storage.exists, tars))
    sources.check_exists([tar for tar, ok in zip(tars, there, strict=True) if not ok], "webdataset")
    return tars


def _listed(name: str) -> list[str]:
    if name.endswith(".tar"):
        return [name]
    sources.check_exists([name], "webdataset")
    if name.endswith(_WDINFO):
        return _wdinfo(name)
    if not storage.is_folder(name):
        return [name]
    found = storage.find(name, ".tar")
    if not found:
        raise ValueError(f"no .tar in {name}: image files are read by the source 'folder'")
    return found


def _wdinfo(path: str) -> list[str]:
    """The tars of NeMo's list, relative to the folder that it lies in."""
    try:
        info = _PlainUnpickler(io.BytesIO(storage.read(path))).load()
        names = [str(name) for name in info["tar_files"]]
    except Exception as error:  # A damaged pickle can raise anything.
        raise ValueError(f"cannot read {path} as NeMo's wdinfo: {error}") from error
    if not names:
        raise ValueError(f"{path} lists no tar files")
    folder = path.rpartition("/")[0]
    absolute = lambda name: name.startswith("/") or storage.is_url(name)
    return [name if absolute(name) or not folder else f"{folder}/{name}" for name in names]


class _PlainUnpickler(pickle.Unpickler):
    """Makes lists, dictionaries, numbers and strings; refuses whatever would call a function."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it names {module}.{name}, which a list of tars does not need")


def _open_all(tars: list[str], max_broken: float) -> tuple[list[str], list[Index], int]:
    """The tars that can be read, their indices, and how many cannot; ValueError if too many."""
    errors: list[ValueError] = []

    def attempt(tar: str) -> Index | None:
        try:
            return load_index(tar)
        except ValueError as error:
            errors.append(error)
            logging.warning("left out: %s", error)
            return None

    with ThreadPoolExecutor(8) as threads:  # Reading headers mostly waits for the disk.
        indices = list(threads.map(attempt, tars))
    if errors and (len(errors) > max_broken * len(tars) or len(errors) == len(tars)):
        count = f"{len(errors)} of {len(tars)} tars cannot be read, data.max_broken is {max_broken}"
        raise ValueError(f"{errors[0]} ({count})")
    opened = [(tar, index) for tar, index in zip(tars, indices, strict=True) if index is not None]
    return [tar for tar, _ in opened], [index for _, index in opened], len(errors)


def _split(name: str) -> tuple[str, str]:
    """Key and suffix of a member; no key for hidden files (macOS writes ._a.jpg)."""
    folder, _, file = name.rpartition("/")
    stem = file.partition(".")[0]
    return (f"{folder}/{stem}" if stem else ""), sources.suffix_of(file)


def _spans(index: Index, images: Sequence[str], text: str) -> Int[np.ndarray, "N 2 2"]:
    """(offset, size) of image and text for each record that has an image; -1 for no text."""
    num_records = int(index.record.max(initial=-1)) + 1
    spans = np.full((num_records, 2, 2), -1, np.int64)
    for column, wanted in enumerate((images, (text,))):
        rows = np.isin(index.suffix, wanted)
        spans[index.record[rows], column] = index.span[rows]
    return spans[spans[:, 0, 0] >= 0]


def _parts(spans: Int[np.ndarray, "2 2"]) -> list[tuple[int, int]]:
    """What to read for a record: (first, last) of one range if its members lie together."""
    (image, image_size), (text, text_size) = spans.tolist()
    parts = [(image - _BLOCK, image + image_size), (text, text + text_size)]
    first, last = min(parts)[0], max(end for _, end in parts)
    return [(first, last)] if last - first < image_size + text_size + _GAP else parts


def _cut(read: list[tuple[int, bytes]], offset: int, size: int) -> bytes:
    """Bytes of a tar out of the ranges (first, contents) that were read."""
    for first, contents in read:
        if first <= offset <= first + len(contents) and offset + size <= first + len(contents):
            return contents[offset - first : offset - first + size]
    return b""  # The tar has become shorter.


def _load(place: str, stamp: np.ndarray) -> Index | None:
    try:
        # Through memory: np.load leaves a damaged file open.
        with np.load(io.BytesIO(storage.read(place)), allow_pickle=False) as saved:
            if np.array_equal(saved["stamp"], stamp):
                return Index(*(saved[name] for name in Index._fields))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # Absent, or not written by us: it is made anew.
    return None


def _save(index: Index, stamp: np.ndarray, places: list[str]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, stamp=stamp, **index._asdict())
    for place in places:
        try:
            if not storage.is_url(place):
                os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
            return storage.write_whole(place, buffer.getvalue())
        except OSError:
            continue  # A read-only folder: the next place, or else scan again next time.
    logging.warning("no index can be kept at %s: every start reads all headers again", places)


def _digest(tar: str) -> str:
    name = tar if storage.is_url(tar) else os.path.realpath(tar)
    return hashlib.sha256(name.encode()).hexdigest()[:32]


@functools.cache
def _cache_folder() -> pathlib.Path:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "diffusion_jax" / "tar_index"
