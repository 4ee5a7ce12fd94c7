"""List and read the files of data sets by local path or by URL.

URLs contain "://" and are opened with fsspec. It needs one more package for each kind of URL: gcsfs
for gs://, s3fs for s3://, aiohttp for https://.
"""

import collections
import contextlib
import hashlib
import itertools
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
from absl import logging

from diffusion_jax import files
from diffusion_jax.data.inventory import Inventory
from diffusion_jax.files import remote, untrusted

OWN = ".diffusion_jax"
"""The folder in a data set that holds what this package knows of the data set; see home.py."""
_ATTEMPTS = 4
_FEW = 1000  # Number of local files that a thread of `stamps` looks up at a time.
_SLOW = 5e-5  # Seconds. More per file is a high latency.
_CHANGING = (
    "size",
    "etag",
    "ETag",
    "generation",
    "blob_id",
    "mtime",
    "created",
    "LastModified",
    "last_modified",
    "Last-Modified",
)
"""Fields of an fsspec listing that change when a file's contents change. A kind of store provides
only some of these fields."""
# Names that begin with a dot, and names of macOS, Synology, Windows and Linux.
_HIDDEN = re.compile(
    r"(^|/)(\.(?!\.?(/|$))|(__MACOSX|@eaDir|Thumbs\.db|desktop\.ini|\$(?i:RECYCLE\.BIN)"
    r"|System Volume Information|lost\+found)(/|$))"
)

_SHARD = re.compile(r"(?P<name>.*)-(?P<number>\d+)-of-(?P<total>\d+)(?!\d)")


def is_url(path: str) -> bool:
    """Return whether a path is a URL, which means that it contains "://"."""
    return "://" in path


def is_folder(path: str) -> bool:
    """Return whether the path is a folder or, in an object store, a prefix of object names.

    Raises OSError if access is denied, and ValueError if no installed package can open this kind of
    URL.
    """
    return files.path(path).is_dir()


def walk(folder: str, inventory: Inventory) -> list[str]:
    """Return the sorted paths or URLs of all files under `folder`. Links are followed.

    A folder that was reached before is not searched again. Links that lead to such a folder or to
    nothing, hidden files and folders, special files, and folders that cannot be read are added to
    `inventory`; the folder OWN is not.
    """
    if is_url(folder):
        system = _system(folder)
        root = fsspec.core.url_to_fs(folder)[1]
        names = [name for name in system.find(folder) if f"/{OWN}/" not in name]
        hidden = [name for name in names if is_hidden(name[len(root) :])]
        inventory.add("hidden", [system.unstrip_protocol(name) for name in sorted(hidden)])
        return sorted(system.unstrip_protocol(name) for name in {*names} - {*hidden})
    files: list[str] = []
    folders, linked, seen = [folder], [], set[tuple[int, int]]()
    while folders or linked:
        by_link = not folders  # Links come last: if possible, files have paths without links.
        path = linked.pop(0) if by_link else folders.pop()
        name = os.path.relpath(path, folder)
        try:
            status = os.stat(path)
            place = status.st_dev, status.st_ino
            with os.scandir(path) as opened:
                entries = list(opened)
        except OSError:
            inventory.add("unreadable", [name])
            continue
        if by_link and place in seen:
            inventory.add("link", [name])
            continue
        seen.add(place)
        for entry in sorted(entries, key=lambda entry: entry.name):
            kind = "hidden" if is_hidden(entry.name) else _kind(entry)
            if entry.name == OWN:
                continue
            if kind == "folder":
                (linked if by_link or entry.is_symlink() else folders).append(entry.path)
            elif kind == "file":
                files.append(entry.path)
            else:
                inventory.add(kind, [os.path.relpath(entry.path, folder)])
    return sorted(files)


def _kind(entry: os.DirEntry[str]) -> str:
    try:
        if entry.is_file():
            return "file"
        if entry.is_dir():
            return "folder"
    except OSError:  # Of links that lead to themselves.
        pass
    return "link" if entry.is_symlink() else "special"


def is_hidden(path: str) -> bool:
    """Return whether a relative path belongs to a hidden file, or to a folder of the system.

    Examples are ".git/a.png", "._a.jpg" and "__MACOSX/a.jpg".
    """
    return _HIDDEN.search(path) is not None


def refuse_pointer(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if a file is a pointer of Git LFS, which stands for a file not downloaded.

    A missing file is accepted.
    """
    if is_pointer(path):
        raise ValueError(f"{os.fspath(path)} is {untrusted.IS_POINTER}")


def is_pointer(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a pointer of Git LFS. A missing or unreadable file is none."""
    try:
        with files.path(path).open("rb") as file:
            return file.read(len(untrusted.POINTER)) == untrusted.POINTER
    except (FileNotFoundError, PermissionError):
        return False


def warn_of_missing_shards(names: Sequence[str]) -> None:
    """Log a warning for sets of files such as NAME-00000-of-00010.tar that lack some files."""
    found = collections.defaultdict[tuple[str, int], set[int]](set)
    for name in names:
        if match := _SHARD.match(name):
            found[match["name"], int(match["total"])].add(int(match["number"]))
    for (name, total), numbers in found.items():
        if len(numbers) < total:
            logging.warning(
                "only %d of the %d files %s-*-of-* exist: copy or download the others, unless these are meant",
                len(numbers),
                total,
                name,
            )


def stamp(path: str) -> tuple[int, int]:
    """Return a file's size in bytes, and a number that changes when the contents change.

    For a local file the number is the modification time; for a remote file it is a hash of the etag
    or similar metadata.
    """
    if not is_url(path):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    system = _system(path)
    info, version = system.info(path), system.ukey(path)
    if path.startswith("http"):  # fsspec's key of a web page is its URL alone.
        version += _version(info)
    digest = hashlib.sha256(version.encode()).digest()
    return int(info["size"]), int.from_bytes(digest[:7], "big")


def stamps(paths: Sequence[str]) -> list[str]:
    """Return one string per file. A file's string changes when the contents of the file change.

    For a missing file, the string is "". Consecutive URLs in the same folder need only one request,
    if the server can list the folder.
    """
    paths = list(paths)
    group = lambda i: paths[i].rpartition("/")[0] if is_url(paths[i]) else i // _FEW
    parts = [[paths[i] for i in part] for _, part in itertools.groupby(range(len(paths)), group)]
    start, found = time.monotonic(), [_stamps(part) for part in parts[:1]]
    # Stores and shared disks have a high latency. Without one, threads take four times as long.
    slow = time.monotonic() - start > _SLOW * len(parts[0] if parts else ())
    with ThreadPoolExecutor(32 if slow else 1) as threads:
        return list(itertools.chain(*found, *threads.map(_stamps, parts[1:])))


def read_ranges(paths: Sequence[str], firsts: Sequence[int], lasts: Sequence[int]) -> list[bytes]:
    """Return bytes firsts[i] to lasts[i] - 1 of each file paths[i]; URLs are read concurrently.

    A range that exceeds the end of a file is cut off there.

    Raises:
        OSError: a file is missing, or a URL cannot be read in four attempts, or only as a whole. A
            network fault thus ends the run; it does not count as a damaged record, which would
            change the training data.
    """
    ranges = dict[int, bytes]()
    if not is_url(paths[0]):
        for path, rows in itertools.groupby(sorted(range(len(paths)), key=paths.__getitem__), paths.__getitem__):
            with open(path, "rb", buffering=0) as file:
                for row in rows:
                    file.seek(firsts[row])
                    ranges[row] = file.read(lasts[row] - firsts[row])
        return [ranges[row] for row in range(len(paths))]
    system = _system(paths[0])
    for attempt in range(_ATTEMPTS):
        rows = [row for row in range(len(paths)) if row not in ranges]
        columns = ([column[row] for row in rows] for column in (paths, firsts, lasts))
        parts = zip(rows, system.cat_ranges(*columns, on_error="return"), strict=True)
        ranges |= {
            row: remote.checked_range(paths[row], part, lasts[row] - firsts[row])
            for row, part in parts
            if isinstance(part, bytes)
        }
        if len(ranges) == len(paths):
            return [ranges[row] for row in range(len(paths))]
        time.sleep(0.1 * 4**attempt)
    missing = next(path for row, path in enumerate(paths) if row not in ranges)
    raise OSError(f"cannot read {missing} after {_ATTEMPTS} attempts: check that it still exists")


def _stamps(paths: Sequence[str]) -> list[str]:
    """Return what `stamps` returns, for paths that are all local, or all URLs in one folder."""
    rows: dict[str, Any] = {}
    if is_url(paths[0]) and len(paths) > 1:
        with contextlib.suppress(Exception):  # Many web servers cannot list folders.
            listing = _system(paths[0]).ls(paths[0].rpartition("/")[0], detail=True)
            rows = {row["name"].rpartition("/")[2]: row for row in listing if row.get("size")}
    return [_stamp(path, rows.get(path.rpartition("/")[2])) for path in paths]


def _stamp(path: str, row: Mapping[str, Any] | None) -> str:
    if row:
        return _version(row)
    try:
        return " ".join(map(str, stamp(path)))
    except FileNotFoundError:
        return ""


def _version(info: Mapping[str, Any]) -> str:
    return " ".join(str(info[name]) for name in _CHANGING if name in info)


def _system(path: str) -> fsspec.AbstractFileSystem:
    return remote.system(path.partition("://")[0])
