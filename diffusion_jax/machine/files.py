"""Files that are whole or absent: a kill at any moment leaves the old content or the new."""

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

from diffusion_jax.machine.remote import SCHEMES, Remote

Path = str | os.PathLike[str]
_KNOWN = (*SCHEMES, "http", "https")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def path(name: Path) -> pathlib.Path:
    """The path of a file or folder: of a name with "://" one into a bucket (see remote).

    A pathlib.Path of a known URL, which has lost a "/", is taken as that too; other names may
    hold a ":/", as SOURCE:/PATH does.
    """
    if isinstance(name, Remote):
        return name
    scheme, separator, rest = (text := os.fspath(name)).partition(":/")
    is_url = separator and "/" not in scheme and (rest.startswith("/") or scheme in _KNOWN)
    return Remote(text) if is_url else pathlib.Path(name)


def remote(name: Path) -> Remote | None:
    """The same of a path into a bucket, None of a local one."""
    there = path(name)
    return there if isinstance(there, Remote) else None


def is_store(name: Path) -> bool:
    """Whether a path is in a bucket of a kind that can be written to."""
    there = remote(name)
    return bool(there and there.parts[0][:-1] in SCHEMES)


def local(name: Path) -> pathlib.Path:
    """The path, or of what lies in a bucket that of a copy here: see Remote.bring."""
    there = remote(name)
    return there.bring() if there else pathlib.Path(name)


def kept(name: Path) -> pathlib.Path:
    """The same for a file that is never written with other contents: copied once in a process."""
    there = remote(name)
    return _copy(there) if there else pathlib.Path(name)


def present(paths: Iterable[pathlib.Path]) -> set[pathlib.Path]:
    """Those that are there; of a bucket by a list of each folder, not a request for each file."""
    paths = set(paths)
    folders = {path.parent for path in paths if isinstance(path, Remote)}
    listed = {there for folder in folders for there in folder.iterdir()}
    return {path for path in paths if (path in listed or (not remote(path) and path.exists()))}


def folder(name: Path, flag: str) -> pathlib.Path:
    """The path of a folder to write into; ValueError as of `check_writable`."""
    check_writable(name, flag)
    return path(name)


def check_writable(folder: Path, flag: str) -> None:
    """ValueError, with the flag that named it, if a folder, or the one to make it in, cannot be."""
    if there := remote(folder):
        try:
            return there.check_writable()
        except OSError as error:
            why = "is there such a bucket? " * isinstance(error, FileNotFoundError)
            raise ValueError(f"{flag}={folder} cannot be written to: {why}{error}") from error
    path = pathlib.Path(folder).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file: choose another {flag}")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{there} cannot be written to: choose another {flag}")


def is_full(error: BaseException) -> bool:
    """Whether an error is that of a full disk or quota: what failed may be tried again."""
    return isinstance(error, OSError) and error.errno in _FULL


@contextlib.contextmanager
def named(path: Path, hidden: Path = "") -> Iterator[None]:
    """A context in which errors without a file name, as those of a failed write, get this one.

    Those that name `hidden` too.
    """
    try:
        yield
    except OSError as error:
        if error.filename in (None, str(hidden)):
            error.filename = str(path)
        raise


def write_whole(path: Path, content: bytes | str) -> None:
    """Replaces `path` (its folder must exist) by `content`; text is written as UTF-8."""
    if there := remote(path):
        there.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    with whole(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_new(path: Path, content: bytes | str) -> None:
    """Writes a file whole unless it is there already: the first of several writers wins."""
    if there := remote(path):
        try:
            there.write_bytes(content.encode() if isinstance(content, str) else content, new=True)
        except OSError:  # Stores say in ways of their own that there is one.
            if not there.exists():
                raise
        return
    with whole(path, _link) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole(
    path: Path, rename: Callable[[pathlib.Path, pathlib.Path], object] = pathlib.Path.replace
) -> Iterator[pathlib.Path]:
    """A hidden path beside `path`: the file or folder written there takes its place at the end.

    In one atomic rename, and only when its content is on the disk, so that a power cut cannot leave
    an empty file under the final name either. After an error nothing is left of it. The hidden name
    ends in .tmp, whatever `path` ends in, so that nobody takes it for a finished one; hand a writer
    that looks at suffixes an open file. For a bucket it is a local path, sent there at the end: a
    file is whole there too; of a folder the files at its top are sent last.
    """
    if there := remote(path):
        with tempfile.TemporaryDirectory() as folder:
            yield (temporary := pathlib.Path(folder, f"{there.name}.tmp"))
            there.send(temporary)
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
            temporary.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Deletes a folder and all in it, if it is there."""
    if there := remote(folder):
        there.rmtree()
    else:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _copy(there: Remote) -> pathlib.Path:
    place = _scratch() / uuid.uuid4().hex
    there.get(place)
    return place


@functools.cache
def _scratch() -> pathlib.Path:
    """A folder for as long as this process lives."""
    folder = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _link(temporary: pathlib.Path, target: pathlib.Path) -> None:
    try:
        target.hardlink_to(temporary)
    except OSError:
        if not target.exists():  # A file system without hard links.
            temporary.replace(target)
