"""Files that are whole or absent: a kill at any moment leaves the old content or the new."""

import os
import pathlib
import uuid
from collections.abc import Callable


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Replaces `path` (its folder must exist) by `content` in one atomic rename.

    Text is written as UTF-8. The content is on the disk before the name points to it, so that a
    power cut cannot leave an empty file under the final name either.
    """
    _write(pathlib.Path(path), content, lambda temporary, target: temporary.replace(target))


def write_new(path: str | os.PathLike[str], content: bytes | str) -> None:
    """As write_whole, but a file that is there already stays, whoever made it and however late."""
    _write(pathlib.Path(path), content, _link)


def _link(temporary: pathlib.Path, target: pathlib.Path) -> None:
    try:
        target.hardlink_to(temporary)
    except OSError:
        if not target.exists():  # A file system without hard links.
            temporary.replace(target)


def _write(
    target: pathlib.Path,
    content: bytes | str,
    name: Callable[[pathlib.Path, pathlib.Path], object],
) -> None:
    # Two writers of one file, also on two hosts, must not share a temporary name.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        name(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
