"""Files by path or by URL: local ones, and whatever fsspec reads (gs://, s3://, https://, ...).

A URL holds "://". Object stores need their fsspec package beside this project: gcsfs for gs://,
s3fs for s3://, aiohttp for https://.
"""

import contextlib
import hashlib
import itertools
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec

from diffusion_jax.machine import files, remote

_ATTEMPTS = 4
_FEW = 1000  # Local files that one thread looks at.
_CHANGING = ("size", "etag", "ETag", "generation", "blob_id", "mtime", "created", "LastModified",
             "last_modified")  # fmt: skip
"""What stores tell of a file in a list, each in its own words, that changes with its contents."""
_BLOCK = 8 * 2**20  # What one request brings when a file is read from its beginning to its end.


def is_url(path: str) -> bool:
    """True of a path that fsspec reads."""
    return "://" in path


def exists(path: str) -> bool:
    """True of a file or a folder that is there; ValueError for a URL of an unknown kind."""
    return _system(path).exists(path) if is_url(path) else os.path.exists(path)


def is_folder(path: str) -> bool:
    """True of a folder, or of a common prefix in an object store."""
    return _system(path).isdir(path) if is_url(path) else os.path.isdir(path)


def find(folder: str, suffix: str) -> list[str]:
    """Every file of this suffix under a folder, by name, as paths or URLs like `folder`."""
    if not is_url(folder):
        walked = os.walk(pathlib.Path(folder))
        return sorted(os.path.join(at, n) for at, _, names in walked for n in names
                      if n.endswith(suffix))  # fmt: skip
    system = _system(folder)
    names = [system.unstrip_protocol(name) for name in system.find(folder)]
    return sorted(name for name in names if name.endswith(suffix))


def stamp(path: str) -> tuple[int, int]:
    """Size in bytes, and a number that changes with the contents: time of change or etag."""
    if not is_url(path):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    system = _system(path)
    digest = hashlib.sha256(system.ukey(path).encode()).digest()
    return int(system.info(path)["size"]), int.from_bytes(digest[:7], "big")


def stamps(paths: Sequence[str]) -> list[str]:
    """For each file a text that changes with its contents; "" for one that is not there.

    A store is asked for the list of each folder, not for each file.
    """
    paths = list(paths)
    place = lambda i: paths[i].rpartition("/")[0] if is_url(paths[i]) else i // _FEW
    parts = [[paths[i] for i in part] for _, part in itertools.groupby(range(len(paths)), place)]
    with ThreadPoolExecutor(32) as threads:  # Stores and shared disks answer slowly.
        return [stamp for part in threads.map(_stamps, parts) for stamp in part]


def open_file(path: str) -> Any:
    """A binary file, for reading from the beginning to the end, with seeks forward."""
    if not is_url(path):
        return pathlib.Path(path).open("rb")
    return _system(path).open(path, "rb", block_size=_BLOCK, cache_type="readahead")


def read(path: str) -> bytes:
    """The whole contents."""
    with open_file(path) as file:
        return file.read()


def read_ranges(paths: Sequence[str], firsts: Sequence[int], lasts: Sequence[int]) -> list[bytes]:
    """Bytes first ... last - 1 of each file; of URLs all at the same time.

    A range past the end of a file is short. OSError when a file has gone, or when a store still
    fails after a few attempts: the network's faults must not change which records are used.
    """
    if not is_url(paths[0]):
        return [_read_range(*span) for span in zip(paths, firsts, lasts, strict=True)]
    system, ranges = _system(paths[0]), {}
    for attempt in range(_ATTEMPTS):
        rows = [row for row in range(len(paths)) if row not in ranges]
        columns = ([column[row] for row in rows] for column in (paths, firsts, lasts))
        parts = zip(rows, system.cat_ranges(*columns, on_error="return"), strict=True)
        ranges |= {row: part for row, part in parts if isinstance(part, bytes)}
        if len(ranges) == len(paths):
            return [ranges[row] for row in range(len(paths))]
        time.sleep(0.1 * 4**attempt)
    missing = next(path for row, path in enumerate(paths) if row not in ranges)
    raise OSError(f"cannot read {missing}, after {_ATTEMPTS} attempts: is it still there?")


def download(url: str, path: pathlib.Path) -> None:
    """Copies a file of a store to this machine, whole."""
    with files.whole(path) as temporary:
        _system(url).get_file(url, str(temporary))


def upload(path: pathlib.Path, url: str) -> None:
    """Copies a file of this machine to a store; OSError where that is not allowed."""
    try:
        _system(url).put_file(str(path), url)
    except Exception as error:  # Each store has its own; a web server takes nothing.
        raise OSError(f"{url} cannot be written: {error}") from error


def write_whole(path: str, content: bytes) -> None:
    """Replaces a file by `content` as a whole; OSError where that is not allowed.

    A store shows a new object only when all of it has arrived.
    """
    if not is_url(path):
        return files.write_whole(path, content)
    try:
        _system(path).pipe_file(path, content)
    except Exception as error:  # Each store has its own; a web server takes nothing.
        raise OSError(f"{path} cannot be written: {error}") from error


def _stamps(paths: Sequence[str]) -> list[str]:
    """The stamps of some files: of a store's those of one folder."""
    listed: dict[str, Any] = {}
    if is_url(paths[0]) and len(paths) > 1:
        with contextlib.suppress(Exception):  # Many web servers list nothing.
            rows = _system(paths[0]).ls(paths[0].rpartition("/")[0], detail=True)
            listed = {row["name"].rpartition("/")[2]: row for row in rows if row.get("size")}
    return [_stamp(path, listed.get(path.rpartition("/")[2])) for path in paths]


def _stamp(path: str, row: Mapping[str, Any] | None) -> str:
    if row:
        return " ".join(str(row[name]) for name in _CHANGING if name in row)
    try:
        return " ".join(map(str, stamp(path)))
    except FileNotFoundError:
        return ""


def _system(path: str) -> fsspec.AbstractFileSystem:
    return remote.system(path.partition("://")[0])


def _read_range(path: str, first: int, last: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        file.seek(first)
        return file.read(last - first)
