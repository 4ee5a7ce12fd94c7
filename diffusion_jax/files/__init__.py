"""Write files atomically: a process that is killed leaves either the old content or the new."""

import atexit
import contextlib
import errno
import functools
import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator

from diffusion_jax.files.remote import SCHEMES, Remote
from diffusion_jax.files.url_secrets import hide

Path = str | os.PathLike[str]
_SCHEMES = (*SCHEMES, "http", "https")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def path(name: Path) -> pathlib.Path:
    """Return a name as a path: a Remote for a URL such as gs://bucket/run, else a pathlib.Path.

    A pathlib.Path made from a URL lacks one "/" (gs:/bucket/run), but also becomes a Remote. Local
    names may contain ":/", as in SOURCE:/PATH.
    """
    if isinstance(name, Remote):
        return name
    scheme, separator, address = (text := os.fspath(name)).partition(":/")
    is_url = separator and "/" not in scheme and (address.startswith("/") or scheme in _SCHEMES)
    return Remote(hide(text)) if is_url else pathlib.Path(name)


def store_path(name: Path) -> Remote | None:
    """Return a Remote if `name` is a path into a bucket, or None if it is a local path."""
    place = path(name)
    return place if isinstance(place, Remote) else None


def is_store(name: Path) -> bool:
    """Return whether a path is in a store that this package can write to: gs:// or s3://."""
    place = store_path(name)
    return bool(place and place.parts[0][:-1] in SCHEMES)


def local(name: Path) -> pathlib.Path:
    """Return a local path for `name`. A file or folder in a bucket is copied into a cache first."""
    place = store_path(name)
    return place.bring() if place else pathlib.Path(name)


def cached(name: Path) -> pathlib.Path:
    """Return a local path for a file that never changes.

    A file in a bucket is copied once per process. The copy is deleted when the process ends.
    """
    place = store_path(name)
    return _copy(place) if place else pathlib.Path(name)


def present(paths: Iterable[pathlib.Path]) -> set[pathlib.Path]:
    """Return the paths that exist, as a set.

    For paths in a bucket, this takes one request per folder, not one per file.
    """
    paths = set(paths)
    folders = {path.parent for path in paths if isinstance(path, Remote)}
    listed = {path for folder in folders for path in folder.iterdir()}
    return {path for path in paths if (path in listed or (not store_path(path) and path.exists()))}


def folder(name: Path, flag: str) -> pathlib.Path:
    """Return the path of a folder to write into.

    Raises ValueError if the folder cannot be created or written to. The message names `flag`, the
    command-line flag that sets the folder.
    """
    check_writable(name, flag)
    return path(name)


def check_writable(folder: Path, flag: str) -> None:
    """Raise ValueError if a folder cannot be created or written to. The message names `flag`."""
    if place := store_path(folder):
        try:
            return place.check_writable()
        except OSError as error:
            why = "does the bucket exist? " * isinstance(error, FileNotFoundError)
            raise ValueError(f"{flag}={folder} cannot be written to: {why}{error}") from error
    path = pathlib.Path(folder).absolute()
    existing = next(place for place in (path, *path.parents) if place.exists())
    if not existing.is_dir():
        raise ValueError(f"{existing} is a file: choose another {flag}")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{existing} cannot be written to: choose another {flag}")


def is_full(error: BaseException) -> bool:
    """Return whether an error means that a disk or quota is full, so that it may be temporary."""
    return isinstance(error, OSError) and error.errno in _FULL


@contextlib.contextmanager
def named(path: Path, hidden: Path = "") -> Iterator[None]:
    """Make OSErrors in this context name the file `path`.

    An error that already names another file does not change, unless that file is the temporary
    file `hidden`, or is in the temporary folder `hidden`.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        elif hidden and isinstance(error.filename, str):
            error.filename = error.filename.replace(str(hidden), str(path))
        raise


def write_whole(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` atomically. The folder must exist. Text is written as UTF-8."""
    if place := store_path(path):
        place.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    with whole(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_new(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` atomically, unless the file exists.

    If several processes try to create the file, only one of them succeeds.
    """
    if place := store_path(path):
        try:
            place.write_bytes(content.encode() if isinstance(content, str) else content, new=True)
        except OSError:  # The error for an existing object differs between stores.
            if not place.exists():
                raise
        return
    with whole(path, _link) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole(
    path: Path, rename: Callable[[pathlib.Path, pathlib.Path], object] = pathlib.Path.replace
) -> Iterator[pathlib.Path]:
    """Yield a temporary path. At the end, the file or folder written there replaces `path`.

    The temporary path is in the same folder as `path`. At the end, a file is flushed to the disk,
    so that even a power cut cannot leave an empty file under the final name. Then `rename` moves
    the temporary path to `path`, by default with one atomic rename. After an error, the temporary
    file is deleted. Its name ends in .tmp, so that it is not mistaken for a finished file. If a
    writer infers the format from the suffix, pass it an open file instead of the path.

    For a bucket, the temporary path is local and is uploaded at the end. When a folder is uploaded,
    the files at its top level are sent last, because readers look for them first.
    """
    if place := store_path(path):
        with tempfile.TemporaryDirectory() as folder:
            yield (temporary := pathlib.Path(folder, f"{place.name}.tmp"))
            place.send(temporary)
        return
    target = pathlib.Path(path)
    # Two writers of one file, also on two hosts, must not share a temporary name.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with named(target, temporary):
            yield temporary
        if not temporary.is_dir():
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        rename(temporary, target)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # On a read-only disk, even if there is no file.
                temporary.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Delete a folder and its content, if it exists."""
    if place := store_path(folder):
        place.rmtree()
    else:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _copy(source: Remote) -> pathlib.Path:
    target = _scratch() / uuid.uuid4().hex
    source.get(target)
    return target


@functools.cache
def _scratch() -> pathlib.Path:
    folder = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _link(temporary: pathlib.Path, target: pathlib.Path) -> None:
    try:
        target.hardlink_to(temporary)
    except OSError:
        if not target.exists():  # A file system without hard links.
            temporary.replace(target)
