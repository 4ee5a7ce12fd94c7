"""Finds, indexes and writes webdataset tars, on a disk or in an object store.

Members of a tar form a record if their paths agree up to the first dot of the file name, as
`a/0001.jpg` and `a/0001.txt` do. The index of a tar is saved beside it (`shard.tar.index.npz`), or
in the user's cache if the folder is read-only. The index is rebuilt when the tar's size or
modification time changes.
"""

import functools
import hashlib
import io
import math
import os
import pathlib
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
from diffusion_jax.machine import files, untrusted

KEY = "__key__"
BLOCK = 512
"""Bytes per block of a tar. The header of a member is the block before the member's contents."""
_INDEX_VERSION = 2
_WDINFO = ".pkl"
_BRACES = r"\{([^{}]*)\}"
_NUMBERS = r"(\d+)\.\.(\d+)"
_MAX_NAMES = 1_000_000  # Largest number of names that a pattern may expand to.


class Index(NamedTuple):
    """An index of a tar: the record, suffix and position of each of its M files, in tar order."""

    record: Int[np.ndarray, "M"]
    """The number of the record that each file belongs to."""
    suffix: np.ndarray
    """Suffixes such as "jpg", strings [M]."""
    span: Int[np.ndarray, "M 2"]
    """Offset in the tar and size of each file's contents, in bytes."""
    truncated: np.ndarray
    """Whether the tar ends in the middle of a member, bool []."""


def write(path: str | os.PathLike[str], records: Iterable[Mapping[str, bytes]]) -> None:
    """Write records to a new tar. The tar appears under its name only once it is complete.

    Args:
        path: the path of the tar, in an existing folder.
        records: one dictionary per record, which maps each suffix to the contents of a file, and
            "__key__" to the record's name.
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
    """Return the saved index of a tar if it is up to date; otherwise build and save a new one."""
    stamp = np.array([_INDEX_VERSION, *storage.stamp(tar)])
    paths = [f"{tar}.index.npz", *(f"{cache}/{_digest(tar)}.npz" for cache in cache_folders())]
    for path in paths:
        if (index := _load(path, stamp)) is not None:
            return index
    index = scan(tar)
    _save(index, stamp, paths)
    return index


def scan(path: str) -> Index:
    """Read the headers of the tar at `path`, and return the tar's index.

    If the tar is truncated, the incomplete file at its end is left out, with a warning.

    Raises:
        ValueError: the file is compressed or not a tar, or is truncated before the end of the first
            file in it.
    """
    records: dict[str, int] = {}
    rows = []
    size, truncated = storage.stamp(path)[0], False
    try:
        with storage.open_file(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                # tarfile keeps all members; millions of them would fill the memory.
                tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
                key, suffix = split(member.name)
                if member.isfile() and member.offset_data + member.size <= size and key:
                    row = records.setdefault(key, len(records))
                    rows.append((row, suffix, member.offset_data, member.size))
            if tar.offset + BLOCK > size:
                raise tarfile.ReadError("the file is truncated")
    except tarfile.ReadError as error:
        if not rows:
            raise ValueError(
                f"cannot read {path} as a tar ({error}): decompress it if it is compressed, "
                "otherwise download it again"
            ) from error
        truncated = True
        logging.warning(
            "cannot read all of %s (%s): only its %d complete files are used, until you replace "
            "the tar", path, error, len(rows),
        )  # fmt: skip
    record, suffixes, offsets, sizes = zip(*rows, strict=True) if rows else ((), (), (), ())
    spans = np.stack([offsets, sizes], axis=1).astype(np.int64)
    return Index(np.array(record, np.int64), np.array(suffixes, str), spans, np.array(truncated))


def split(name: str) -> tuple[str, str]:
    """Split a tar member's name into record key and suffix: "a/1.t5.npy" gives "a/1" and "t5.npy".

    Hidden files, such as macOS's ._a.jpg, have the key "".
    """
    folder, slash, file = name.removeprefix("./").rpartition("/")
    stem = file.partition(".")[0]
    return (folder + slash + stem if stem else ""), suffix_of(file)


def expand(pattern: str) -> list[str]:
    """Return all names that a pattern with braces stands for, as in a shell.

    "{a,b}" stands for a and b, and "{08..11}" for 08, 09, 10 and 11.

    Raises:
        ValueError: there are more than a million names.
    """
    if (count := math.prod(map(_count, re.findall(_BRACES, pattern)))) > _MAX_NAMES:
        raise ValueError(
            f"{pattern} stands for {count:,} files: write a pattern for at most {_MAX_NAMES:,}"
        )
    match = re.search(_BRACES, pattern)
    if match is None:
        return [pattern]
    if numbers := re.fullmatch(_NUMBERS, match[1]):
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


def _count(braces: str) -> int:
    """Return the number of alternatives in the text between two braces."""
    if numbers := re.fullmatch(_NUMBERS, braces):
        return max(0, int(numbers[2]) - int(numbers[1]) + 1)
    return braces.count(",") + 1


def find(path: str) -> list[str]:
    """Return the paths of all tars at `path`.

    Args:
        path: a tar, a folder (searched recursively), NeMo's list of tars (wdinfo.pkl), or a pattern
            such as "shard-{0000..0099}.tar". Each may be a URL.

    Raises:
        FileNotFoundError: a tar is missing.
        ValueError: a folder has no tars, or a wdinfo.pkl is damaged.
    """
    return find_stamped(path)[0]


def find_stamped(path: str) -> tuple[list[str], list[str]]:
    """Return (paths, stamps): the paths that `find` returns, and one string for each tar.

    A tar's string changes when the tar's contents change (see storage.stamps).
    """
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
        raise ValueError(
            f"no .tar files in {name}: check the path, or read image files with data.source=folder"
        )
    return tars


def _wdinfo(path: str) -> list[str]:
    """Return the paths of the tars that NeMo's wdinfo.pkl at `path` lists.

    In the file, relative paths are relative to the file's folder.
    """
    try:
        info = _PlainUnpickler(io.BytesIO(storage.read(path))).load()
        names = [str(name) for name in info["tar_files"]]
    except Exception as error:  # A damaged pickle can raise anything.
        raise ValueError(
            f"cannot read {path} as NeMo's list of tars (wdinfo.pkl): {error}; name the tars by a "
            "folder or a pattern"
        ) from error
    if not names:
        raise ValueError(f"{path} lists no tar files: name the tars by a folder or a pattern")
    folder = path.rpartition("/")[0]
    absolute = lambda name: name.startswith("/") or storage.is_url(name)
    return [name if absolute(name) or not folder else f"{folder}/{name}" for name in names]


class _PlainUnpickler(untrusted.Unpickler):
    """An unpickler of lists, dictionaries, numbers and strings that refuses to call functions."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"the pickle refers to {module}.{name}, but may hold only plain values")


def _load(path: str, stamp: np.ndarray) -> Index | None:
    try:
        # Read into memory first, since np.load leaves a damaged file open.
        with np.load(io.BytesIO(storage.read(path)), allow_pickle=False) as saved:
            if np.array_equal(saved["stamp"], stamp):
                return Index(*(saved[name] for name in Index._fields))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # The index is missing or damaged, so a new one is built.
    return None


def _save(index: Index, stamp: np.ndarray, paths: list[str]) -> None:
    """Save an index to the first writable path."""
    buffer = io.BytesIO()
    np.savez(buffer, stamp=stamp, **index._asdict())
    for path in paths:
        try:
            if not storage.is_url(path):
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            return storage.write_whole(path, buffer.getvalue())
        except OSError:
            continue  # The folder is read-only.
    logging.warning(
        "the index of a tar cannot be saved to any of the paths %s, so every start reads all "
        "headers of the tar: make the folder of one of these paths writable",
        paths,
    )


def _digest(tar: str) -> str:
    name = tar if storage.is_url(tar) else os.path.realpath(tar)
    return hashlib.sha256(name.encode()).hexdigest()[:32]


@functools.cache
def cache_folders() -> list[pathlib.Path]:
    """Return the folders for the indices of tars in read-only folders, the preferred one first."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    name = "diffusion_jax/tar_index"
    return [pathlib.Path(home) / name, pathlib.Path(tempfile.gettempdir()) / name]
