"""Write and compare checksums of the files in a folder, to detect damage.

Several processes share the work. Each process lists and compares its own part of the files. For a
folder in a bucket, the store computes the checksums and returns them in its listing, so no file is
read.
"""

import errno
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterator

from diffusion_jax.machine import files

FOLDER = "checksums"
"""The subfolder that holds the lists, one JSON file per process: {path: [bytes, SHA-256]}."""


def write(folder: files.Path, part: int = 0, parts: int = 1) -> None:
    """Write the checksums of part `part` of `parts` of the files in a folder.

    Files that end in .tmp are unfinished and are left out.
    """
    folder, look = files.path(folder), _look(folder)
    if bucket := files.remote(folder):
        names = bucket.objects()
    else:
        inside = lambda path: path.relative_to(folder).as_posix()
        names = map(inside, filter(pathlib.Path.is_file, folder.rglob("*")))
    is_listed = lambda name: not name.startswith(f"{FOLDER}/") and not name.endswith(".tmp")
    ordered = sorted(filter(is_listed, names), key=lambda name: name.split("/"))
    (folder / FOLDER).mkdir(exist_ok=True)
    listed = {name: look(name, True) for name in ordered[part::parts]}
    files.write_whole(_list(folder, part, parts), json.dumps(listed, indent=1))


def read_back(
    folder: files.Path, part: int = 0, parts: int = 1, unless: Callable[[], bool] = lambda: False
) -> None:
    """Read the files that `write` listed again, and compare their checksums.

    Where the system allows it, local files are read from the disk and not from the system's cache.

    Args:
        unless: Called before each file. If it returns True, the remaining files are not read.

    Raises:
        OSError: A file differs from its list.
    """
    folder, look = files.path(folder), _look(folder)
    listed = json.loads(_list(folder, part, parts).read_text())
    for path, (size, digest) in listed.items():
        if unless():
            return
        if not files.remote(folder):
            _drop_cache(folder / path)
        if difference := _difference(look, path, size, digest):
            raise OSError(f"{folder / path} was read back wrong: {difference}")


def damage(
    folder: files.Path, items: Collection[str] = (), part: int = 0, parts: int = 1
) -> str | None:
    """Return a message about the first file that differs from its list, or None.

    If `items` names subfolders, only those are compared. Only part `part` of `parts` of the files
    is compared. A folder without lists counts as undamaged, because earlier versions wrote none.
    """
    first = next(damaged(folder, items, part, parts), None)
    return first and f"{first[0]}: {first[1]}"


def damaged(
    folder: files.Path, items: Collection[str] = (), part: int = 0, parts: int = 1
) -> Iterator[tuple[str, str]]:
    """Yield (path, difference) for each file that differs from its list.

    If `items` names subfolders, only those are compared. A folder without lists yields nothing.
    """
    folder, look, listed = files.path(folder), _look(folder), {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            entries = json.loads(path.read_bytes())
            listed |= {name: (int(size), str(digest)) for name, (size, digest) in entries.items()}
        except (ValueError, TypeError, AttributeError):
            yield f"{FOLDER}/{path.name}", "not a list of files"
    names = [n for n in sorted(listed) if not items or n.partition("/")[0] in items][part::parts]
    for whole in (False, True):  # Sizes first, because they are quick to compare.
        for name in list(names):
            size, digest = listed[name]
            if difference := _difference(look, name, size, digest if whole else None):
                names.remove(name)
                yield name, difference


def _list(folder: pathlib.Path, part: int, parts: int) -> pathlib.Path:
    return folder / FOLDER / f"{part}-of-{parts}.json"


def _look(folder: files.Path) -> Callable[[str, bool], tuple[int, str]]:
    """Return look(name, whole) -> (bytes, checksum) for the files of a folder.

    The checksum is a SHA-256 for a local file, and "crc32c:...", "md5:..." or "" (no checksum) in a
    bucket. If `whole` is False, local files are not read and their checksum is "".
    """
    if bucket := files.remote(folder):
        objects = bucket.objects()

        def listed(name: str, whole: bool) -> tuple[int, str]:
            if name not in objects:
                raise FileNotFoundError(errno.ENOENT, "No such object", name)
            return objects[name]

        return listed
    place = lambda name: pathlib.Path(folder) / name
    return lambda name, whole: (place(name).stat().st_size, _digest(place(name)) if whole else "")


def _difference(
    look: Callable[[str, bool], tuple[int, str]], name: str, size: int, digest: str | None
) -> str | None:
    try:
        now, current = look(name, digest is not None)
        if now != size:
            return f"{now:,} bytes, but {size:,} were written"
        # A folder that was copied from or to a bucket has checksums of another kind.
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
    """Flush the file to disk and drop it from the system's cache, if the system supports that."""
    if not hasattr(os, "posix_fadvise"):
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
