"""The folder for files that can be computed or downloaded again."""

import os
import pathlib


def user_cache() -> pathlib.Path:
    """Return the user's cache folder: XDG_CACHE_HOME or, by default, ~/.cache.

    Raises ValueError if XDG_CACHE_HOME is not set and this user has no home folder.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(named)
    try:
        return pathlib.Path.home() / ".cache"
    except RuntimeError as error:
        raise ValueError(
            "XDG_CACHE_HOME is not set, and this user has no home folder: set XDG_CACHE_HOME to a "
            "folder for downloads and other files that can be made again"
        ) from error
