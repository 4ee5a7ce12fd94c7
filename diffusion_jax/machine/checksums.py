"""Checksums of a folder's files, kept in it: whether it still holds what was written.

Several processes share the work: each lists and compares every so many of the files. In a bucket
they are those that the store itself keeps and tells in a list, and no file is read for them.
"""

import errno
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterator

from diffusion_jax.machine import files

FOLDER = "checksums"
"""The lists in a folder, one JSON file for each process: {path: [bytes, SHA-256]}."""


def write(folder: files.Path, part: int = 0, parts: int = 1) -> None:
    """Lists part `part` of `parts` of the files of a folder.

    Those ending in .tmp, which somebody is still writing, are left out.
    """
    folder, look = files.path(folder), _look(folder)
    if there := files.remote(folder):
        names = there.objects()
    else:
        inside = lambda path: path.relative_to(folder).as_posix()
        names = map(inside, filter(pathlib.Path.is_file, folder.rglob("*")))
    mine = lambda name: not name.startswith(f"{FOLDER}/") and not name.endswith(".tmp")
    ordered = sorted(filter(mine, names), key=lambda name: name.split("/"))
    (folder / FOLDER).mkdir(exist_ok=True)
    listed = {name: look(name, True) for name in ordered[part::parts]}
    files.write_whole(_list(folder, part, parts), json.dumps(listed, indent=1))


def read_back(
    folder: files.Path, part: int = 0, parts: int = 1, unless: Callable[[], bool] = lambda: False
) -> None:
    """Reads once more what `write` listed; OSError if it finds something else.

    From the disk where the system lets go of what it keeps in memory. Before each file `unless`
    says whether the rest is left to whoever looks for damage next.
    """
    folder, look = files.path(folder), _look(folder)
    listed = json.loads(_list(folder, part, parts).read_text())
    for path, (size, digest) in listed.items():
        if unless():
            return
        if not files.remote(folder):
            _let_go(folder / path)
        if found := _difference(look, path, size, digest):
            raise OSError(f"{folder / path} was read back wrong: {found}")


def damage(
    folder: files.Path, items: Collection[str] = (), part: int = 0, parts: int = 1
) -> str | None:
    """What first differs from the lists of a folder, for a message; None if nothing does.

    Only in the subfolders `items` if there are any, and only in part `part` of `parts` of the
    files. A folder without lists is taken as it is: earlier code wrote none.
    """
    found = next(damaged(folder, items, part, parts), None)
    return found and f"{found[0]}: {found[1]}"


def damaged(
    folder: files.Path, items: Collection[str] = (), part: int = 0, parts: int = 1
) -> Iterator[tuple[str, str]]:
    """(path, what is not as the lists of a folder say) of each file as in `damage`."""
    folder, look, listed = files.path(folder), _look(folder), {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            found = json.loads(path.read_bytes())
            listed |= {name: (int(size), str(digest)) for name, (size, digest) in found.items()}
        except (ValueError, TypeError, AttributeError):
            yield f"{FOLDER}/{path.name}", "no list of files"
    names = [n for n in sorted(listed) if not items or n.partition("/")[0] in items][part::parts]
    for whole in (False, True):  # Sizes first, which takes no time.
        for name in list(names):
            size, digest = listed[name]
            if found := _difference(look, name, size, digest if whole else None):
                names.remove(name)
                yield name, found


def _list(folder: pathlib.Path, part: int, parts: int) -> pathlib.Path:
    return folder / FOLDER / f"{part}-of-{parts}.json"


def _look(folder: files.Path) -> Callable[[str, bool], tuple[int, str]]:
    """look(name, whole): a file's bytes and its checksum, which is asked for if `whole`.

    SHA-256, or "crc32c:..." or "md5:..." of a store; "" if that tells none.
    """
    if there := files.remote(folder):
        objects = there.objects()

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
        now, found = look(name, digest is not None)
        if now != size:
            return f"{now:,} bytes, and {size:,} were written"
        # What was copied from a bucket, or into one, has a checksum of another kind.
        kinds = {text.rpartition(":")[0] for text in (digest, found) if text}
        if digest and found and len(kinds) == 1 and digest != found:
            return "other bytes than were written"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return f"cannot be read ({error.strerror})"
    return None


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _let_go(path: pathlib.Path) -> None:
    """Has the file on the disk, and not in memory, where the system can do that."""
    if not hasattr(os, "posix_fadvise"):
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
