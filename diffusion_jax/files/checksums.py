"""Write and compare checksums of the files in a folder, to detect damage.

Several processes can share the comparison: each process compares its own part of the files. For a
folder in a bucket, the checksums come from the store's own listing, so no file is read.
"""

import errno
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterator

from diffusion_jax import files

FOLDER = "checksums"
"""The subfolder that holds the lists of checksums: JSON files of {path: [size, checksum]}.

The size is in bytes. `write` writes a single list. Earlier versions wrote a list for each process.
"""
COMMIT = "commit_success.txt"
"""The file that Orbax writes last in a bucket. It marks a complete checkpoint."""
METADATA = "_CHECKPOINT_METADATA"
"""Orbax's metadata file of a checkpoint. Like COMMIT, it is written after the checksums."""


def write(folder: files.Path) -> None:
    """Write the sizes and checksums of all files in a folder into its subfolder FOLDER."""
    folder, look = files.path(folder), _look(folder)
    (folder / FOLDER).mkdir(exist_ok=True)
    listed = {name: look(name, True) for name in _names(folder)}
    files.write_whole(folder / FOLDER / "0-of-1.json", json.dumps(listed, indent=1))


def read_back(folder: files.Path, part: int = 0, parts: int = 1, unless: Callable[[], bool] = lambda: False) -> None:
    """Read the files whose checksums `write` stored, and compare the checksums.

    Where the system allows it, local files are read from the disk and not from the system's cache.

    Args:
        folder: The folder.
        part: The part of the files to read, from 0 to parts - 1.
        parts: The number of parts that the files are divided into.
        unless: Called before each file. If it returns True, the remaining files are not read.

    Raises:
        OSError: A file does not match its checksum.
    """
    folder, look = files.path(folder), _look(folder)
    listed, _ = _lists(folder)
    for path, (size, digest) in sorted(listed.items())[part::parts]:
        if unless():
            return
        if not files.store_path(folder):
            _drop_cache(folder / path)
        if difference := _difference(look, path, size, digest):
            raise OSError(f"{folder / path} differs from what was written: {difference}")


def damage(folder: files.Path, items: Collection[str] = (), part: int = 0, parts: int = 1) -> str | None:
    """Check files, and return a message about the first damaged one, or None if all are intact.

    A file is damaged if it does not match its size or checksum, or has no checksum. If `items`
    names subfolders, only their files are checked. The files with a checksum are divided into
    `parts` parts, and only part number `part` (from 0) is compared. A folder without lists of
    checksums counts as undamaged, because earlier versions wrote no such lists.
    """
    if not exist(folder):
        return None
    for name, difference in damaged(folder, items, part, parts):
        return f"{name}: {difference}"
    listed, _ = _lists(files.path(folder))
    unlisted = (name for name in _names(files.path(folder)) if name not in listed)
    is_wanted = lambda name: not items or name.partition("/")[0] in items
    return next((f"{name}: it has no checksum" for name in filter(is_wanted, unlisted)), None)


def fingerprint(folder: files.Path) -> str:
    """Return the SHA-256 of a folder's lists of checksums, or "" if it has none."""
    listed, _ = _lists(files.path(folder))
    text = json.dumps(listed, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest() if listed else ""


def exist(folder: files.Path) -> bool:
    """Return whether a folder has a subfolder for lists of checksums, which may be empty."""
    return (files.path(folder) / FOLDER).exists()


def damaged(
    folder: files.Path, items: Collection[str] = (), part: int = 0, parts: int = 1
) -> Iterator[tuple[str, str]]:
    """Yield (path, difference) for each file that does not match its size or checksum.

    `difference` is a message. If `items` names subfolders, only their files are compared. The files
    are divided into `parts` parts, and only part number `part` (from 0) is compared. A folder
    without lists of checksums yields nothing.
    """
    folder, look = files.path(folder), _look(folder)
    listed, unreadable = _lists(folder)
    yield from ((f"{FOLDER}/{name}", "not a list of files") for name in unreadable)
    names = [n for n in sorted(listed) if not items or n.partition("/")[0] in items][part::parts]
    for whole in (False, True):  # Sizes first, because they are quick to compare.
        for name in list(names):
            size, digest = listed[name]
            if difference := _difference(look, name, size, digest if whole else None):
                names.remove(name)
                yield name, difference


def _lists(folder: pathlib.Path) -> tuple[dict[str, tuple[int, str]], list[str]]:
    """Return {path: (size, checksum)} from a folder's lists, and the names of unreadable lists."""
    listed, unreadable = {}, []
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            entries = json.loads(path.read_bytes())
            listed |= {name: (int(size), str(digest)) for name, (size, digest) in entries.items()}
        except (ValueError, TypeError, AttributeError, RecursionError):
            unreadable.append(path.name)
    return listed, unreadable


def _names(folder: pathlib.Path) -> list[str]:
    """Return the names of the files that need a checksum.

    The names are paths relative to `folder`. Hidden files and folders, and unfinished files, whose
    names end in .tmp, need no checksum. Neither do FOLDER, COMMIT and METADATA.
    """
    if bucket := files.store_path(folder):
        names = bucket.objects()
    else:
        inside = lambda path: path.relative_to(folder).as_posix()
        names = map(inside, filter(pathlib.Path.is_file, folder.rglob("*")))
    wanted = []
    for name in names:
        parts = name.split("/")
        is_passing = any(part.startswith(".") for part in parts) or name.endswith(".tmp")
        if not is_passing and parts[0] not in (FOLDER, COMMIT, METADATA):
            wanted.append(name)
    return sorted(wanted, key=lambda name: name.split("/"))


def _look(folder: files.Path) -> Callable[[str, bool], tuple[int, str]]:
    """Return a function look(name, whole) that returns a file's size in bytes and its checksum.

    The checksum is a SHA-256 for a local file, and "crc32c:...", "md5:..." or "" (none) for a file
    in a bucket. If `whole` is False, local files are not read, and their checksum is "".
    """
    if bucket := files.store_path(folder):
        objects = bucket.objects()

        def listed(name: str, whole: bool) -> tuple[int, str]:
            if name not in objects:
                raise FileNotFoundError(errno.ENOENT, "No such object", name)
            return objects[name]

        return listed
    place = lambda name: pathlib.Path(folder) / name
    return lambda name, whole: (place(name).stat().st_size, _digest(place(name)) if whole else "")


def _difference(look: Callable[[str, bool], tuple[int, str]], name: str, size: int, digest: str | None) -> str | None:
    try:
        now, current = look(name, digest is not None)
        if now != size:
            return f"{now:,} bytes, but {size:,} were written"
        # After a copy from or to a bucket, the stored checksums are of another kind.
        kinds = {text.rpartition(":")[0] for text in (digest, current) if text}
        if digest and current and len(kinds) == 1 and digest != current:
            return "its bytes differ from those written"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return f"cannot be read ({error.strerror})"
    return None


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _drop_cache(path: pathlib.Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
