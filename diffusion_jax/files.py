"""Files that are whole or absent: a kill at any moment leaves the old content or the new."""

import os
import pathlib


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Replaces `path` (its folder must exist) by `content` in one atomic rename.

    Text is written as UTF-8. The content is on the disk before the name points to it, so that a
    power cut cannot leave an empty file under the final name either.
    """
    target = pathlib.Path(path)
    # The process id keeps two writers of one file from sharing a temporary name.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
