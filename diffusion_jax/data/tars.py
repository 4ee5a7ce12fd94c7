"""Webdataset tars: which there are, where each member lies, and how they are written.

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
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Int

from diffusion_jax.data import storage
from diffusion_jax.data.records import check_exists, suffix_of
from diffusion_jax.machine import files

KEY = "__key__"
BLOCK = 512
"""Tars are made of blocks of so many bytes, a member's header in the one before its contents."""
_INDEX_VERSION = 2
_WDINFO = ".pkl"


class Index(NamedTuple):
    """Every file of a tar, in its order."""

    record: Int[np.ndarray, "M"]
    """Members of one record have one number."""
    suffix: np.ndarray
    """Text [M], such as "jpg"."""
    span: Int[np.ndarray, "M 2"]
    """The offset of the contents in the tar, and their size in bytes."""
    truncated: np.ndarray
    """bool []: the tar ends in the middle of a member."""


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
                key = record[KEY].decode(errors="surrogateescape")
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(record[suffix])
                tar.addfile(member, io.BytesIO(record[suffix]))


def load_index(tar: str) -> Index:
    """The saved index if it is of this very file, else a new one, which is saved."""
    stamp = np.array([_INDEX_VERSION, *storage.stamp(tar)])
    places = [f"{tar}.index.npz", *(f"{cache}/{_digest(tar)}.npz" for cache in cache_folders())]
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
                # Of millions they would fill the memory.
                tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
                key, suffix = split(member.name)
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


def split(name: str) -> tuple[str, str]:
    """Key and suffix of a member; no key for hidden files (macOS writes ._a.jpg)."""
    folder, slash, file = name.removeprefix("./").rpartition("/")
    stem = file.partition(".")[0]
    return (folder + slash + stem if stem else ""), suffix_of(file)


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
    return find_stamped(path)[0]


def find_stamped(path: str) -> tuple[list[str], list[str]]:
    """The tars that `find` finds, and texts that change with their contents."""
    tars = [tar for name in expand(path) for tar in _listed(name)]
    stamps = storage.stamps(tars)
    check_exists([tar for tar, stamp in zip(tars, stamps, strict=True) if not stamp], "webdataset")
    return tars, stamps


def _listed(name: str) -> list[str]:
    if name.endswith(".tar"):
        return [name]
    check_exists([name], "webdataset")
    if name.endswith(_WDINFO):
        return _wdinfo(name)
    if not storage.is_folder(name):
        return [name]
    tars = storage.find(name, ".tar")
    if not tars:
        raise ValueError(f"no .tar in {name}: image files are read by the source 'folder'")
    return tars


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
def cache_folders() -> list[pathlib.Path]:
    """Where files go whose own folder cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    name = "diffusion_jax/tar_index"
    return [pathlib.Path(home) / name, pathlib.Path(tempfile.gettempdir()) / name]
