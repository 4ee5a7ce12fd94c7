"""Write tars with given members."""

import io
import tarfile
from typing import Any


def write(path, members, mode: Any = "w", format=tarfile.PAX_FORMAT):
    """Write members, given as a dictionary or as pairs (name, content), and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=format) as tar:
        for name, content in members.items() if isinstance(members, dict) else members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path
