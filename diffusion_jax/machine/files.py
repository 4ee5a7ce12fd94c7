"""Files that are whole or absent: a kill at any moment leaves the old content or the new."""

import contextlib
import errno
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator

Path = str | os.PathLike[str]
_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_writable(folder: Path, flag: str) -> None:
    """ValueError, with the flag that named it, if a folder, or the one to make it in, cannot be."""
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
    with whole(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_new(path: Path, content: bytes | str) -> None:
    """Writes a file whole unless it is there already: the first of several writers wins."""
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
    that looks at suffixes an open file.
    """
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


def _link(temporary: pathlib.Path, target: pathlib.Path) -> None:
    try:
        target.hardlink_to(temporary)
    except OSError:
        if not target.exists():  # A file system without hard links.
            temporary.replace(target)
