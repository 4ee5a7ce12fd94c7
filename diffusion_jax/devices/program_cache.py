"""Keep compiled programs on disk, in JAX's compilation cache, with a digest in each entry.

An entry is machine code that later processes run. JAX writes entries in place, trusts all of them
and never replaces one. So an entry that a kill has cut would stay for good, and an entry under the
name of another program would run in its place. Here, each entry is written whole and begins with a
digest of its name and content. An entry with another digest is removed, and the program compiled
again. Entries that JAX wrote without this module have other names, and are not read.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
from typing import Any

import jax
from absl import logging
from jax._src import compilation_cache

from diffusion_jax import files
from diffusion_jax.files.user_cache import user_cache

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
"""The environment variable that names the folder or bucket of compiled programs."""
_SIZE = hashlib.sha256().digest_size


def use() -> None:
    """Keep compiled programs in JAX_COMPILATION_CACHE_DIR, or in the user's cache folder.

    A new folder can be read and written by this user only. If other users can write to the folder,
    they can run code as this user. For the folder in JAX_COMPILATION_CACHE_DIR, this raises
    ValueError. For the user's cache folder, it logs a warning, and no programs are kept. If the
    variable is empty, no programs are kept either. A bucket is not checked.
    """
    _check_entries()
    named = os.environ.get(VARIABLE)
    if named == "" or (named and files.store_path(named)):
        return  # JAX reads the variable itself.
    try:
        folder = pathlib.Path(named) if named else user_cache() / "imagen-sd-jax"
    except ValueError as error:
        logging.warning("no programs are kept: %s", error)
        return
    with contextlib.suppress(OSError):  # JAX warns if it cannot write.
        folder.mkdir(0o700, parents=True, exist_ok=True)
    if writers := _other_writers(folder):
        text = f"{folder} can be written by {writers}, who could run code through compiled programs"
        if named:
            raise ValueError(f"{VARIABLE}: {text}: chmod go-w {folder}, or name another folder")
        logging.warning("%s: no programs are kept; to keep them, chmod go-w %s", text, folder)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))


class Checked:
    """JAX's cache of programs, in which each entry begins with a digest."""

    def __init__(self, cache: Any, folder: str) -> None:
        """Wrap a cache of JAX, whose entries are files in `folder`."""
        self._cache, self._path = cache, files.path(folder)

    def get(self, key: str) -> bytes | None:
        """Return the entry of a key. If it is damaged or another key's, remove it; return None."""
        entry = self._cache.get(_name(key))
        if entry is None or entry[:_SIZE] == _digest(key, entry[_SIZE:]):
            return entry and entry[_SIZE:]
        file = self._file(key)
        logging.warning("removing %s: it is damaged or not of this program", file)
        file.unlink(missing_ok=True)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Store a compiled program under a key.

        Without a size limit, the file appears only when it is complete. With one, JAX's own writer
        is used, which may leave a cut file.
        """
        entry = _digest(key, value) + value
        if getattr(self._cache, "eviction_enabled", True):
            self._cache.put(_name(key), entry)
        elif not self._file(key).exists():
            files.write_whole(self._file(key), entry)

    def _file(self, key: str) -> pathlib.Path:
        return self._path / f"{_name(key)}-cache"


def _name(key: str) -> str:
    return f"{key}-sha256"


def _digest(key: str, value: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + value).digest()


def _other_writers(folder: pathlib.Path) -> str:
    """Return who else can write to a folder, or "" if nobody can or there is no such folder."""
    if not folder.is_dir():
        return ""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"the user with id {status.st_uid}"
    return "other users" if status.st_mode & 0o022 else ""


@functools.cache
def _check_entries() -> None:
    """Make JAX open its cache as Checked. JAX has no public function for this."""
    if not (open_cache := getattr(compilation_cache, "get_file_cache", None)):
        logging.warning("jax %s: compiled programs are kept without digests", jax.__version__)
        return

    def get_file_cache(path: str) -> Any:
        opened = open_cache(path)
        return opened and (Checked(opened[0], path), path)

    compilation_cache.get_file_cache = get_file_cache
