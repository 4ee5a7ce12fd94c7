"""Paths into object stores: pathlib's over fsspec, for gs:// and s3://.

A store has no folders, no renames and no appending. An object appears whole, when all of it has
arrived, and can be created on condition that there is none. What grows line by line is kept in a
local folder (Mirror), whose files are sent whole.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import pathlib
import stat
import tempfile
import threading
import uuid
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from absl import logging

if TYPE_CHECKING:
    import fsspec

SCHEMES = {"gs": "gcsfs", "s3": "s3fs"}
"""The stores that a run can lie in, and the package that fsspec needs for each."""
_AT_ONCE = 16  # Requests.
_CLOSED = ": do the credentials here, or the lack of them, open it?"
_BLOCK = 8 * 2**20  # Bytes that one request brings of a file that is read bit by bit.
_PAUSE = 10.0  # Seconds between two sendings of a file that grows,
_SMALL = 2**20  # if it has fewer bytes than this, or has grown by a tenth.


def system(scheme: str) -> "fsspec.AbstractFileSystem":
    """What reads and writes URLs of a scheme; ValueError where its package is not installed."""
    import fsspec.config  # Here, so that those without URLs need not wait for it.

    # Lists that were kept would not show what other processes have written.
    fsspec.config.conf.setdefault(scheme, {}).setdefault("use_listings_cache", False)
    if "STORAGE_EMULATOR_HOST" in os.environ:  # Or gcsfs asks Google what kind of bucket it is.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        return fsspec.filesystem(scheme)
    except (ValueError, ImportError) as error:
        package = SCHEMES.get(scheme, "its package")
        raise ValueError(
            f"no reader for {scheme}:// ({error}): install its package ({package})"
        ) from error


class Remote(pathlib.PosixPath):
    """A path in a bucket, such as s3://bucket/run/config.json, with pathlib's methods.

    Errors are OSErrors. Functions of os and shutil refuse it; pathlib.Path(it) is a local path,
    and must not be made.
    """

    def __str__(self) -> str:
        """The URL."""
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        """TypeError."""
        raise TypeError(f"{self} is no local file")

    def check_writable(self) -> None:
        """OSError or ValueError unless an object can be written here."""
        if self.parts[0][:-1] not in SCHEMES:
            kinds = " and ".join(f"{scheme}://BUCKET/FOLDER" for scheme in SCHEMES)
            raise ValueError(f"{self} is in no store that can be written to: those are {kinds}")
        _probe(self)

    def exists(self, **_: Any) -> bool:
        """Whether there is an object of this name, or any below it."""
        return bool(self._kind())

    def is_dir(self, **_: Any) -> bool:
        """Whether there are objects below it."""
        return self._kind() == "directory"

    def is_file(self, **_: Any) -> bool:
        """Whether there is an object of this name."""
        return self._kind() == "file"

    def _kind(self) -> str:
        """ "file", "directory", or "" of what is not there; errors of access are no answer."""
        with self._named() as system, contextlib.suppress(FileNotFoundError):
            return system.info(str(self))["type"]
        return ""

    def stat(self, **_: Any) -> os.stat_result:
        """The size of an object and when it was written, and nothing else."""
        with self._named() as system:
            size = int(system.info(str(self))["size"])
            at = int(system.modified(str(self)).timestamp())
        return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, size, at, at, at))

    def open(self, mode: str = "r", *_: Any, **options: Any) -> Any:
        """The object as a file, which when written appears as it is closed."""
        if "r" in mode:
            options = {"block_size": _BLOCK, **options}
        with self._named() as system:
            return system.open(str(self), mode, **options)

    def read_bytes(self) -> bytes:
        """The whole contents."""
        with self._named() as system:
            return system.cat_file(str(self))  # pyright: ignore[reportReturnType]

    def read_range(self, first: int, last: int) -> bytes:
        """Bytes first ... last - 1."""
        with self._named() as system:
            return system.cat_file(str(self), start=first, end=last) if first < last else b""  # pyright: ignore[reportReturnType]

    def get(self, file: pathlib.Path) -> None:
        """Writes the contents into a local file."""
        with self._named() as system:
            system.get_file(str(self), str(file))

    def read_text(self, *_: Any, **__: Any) -> str:
        """The same, as UTF-8."""
        return self.read_bytes().decode()

    def write_bytes(self, data: Any, new: bool = False) -> int:
        """Replaces the object; with `new`, FileExistsError if there is one."""
        with self._named() as system:
            system.pipe_file(str(self), bytes(data), **({"mode": "create"} if new else {}))
        return len(data)

    def send(self, file: pathlib.Path) -> None:
        """Replaces the object by what a local file, or those of a local folder, hold.

        Those at its top, by which others know a folder, come last.
        """
        with self._named() as system:
            inside = sorted(file.rglob("*"), key=lambda path: (-len(path.parts), path))
            for one in inside if file.is_dir() else [file]:
                if one.is_file():
                    system.put_file(str(one), str(self / one.relative_to(file)))

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Nothing: folders are there when something is in them."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object."""
        with self._named() as system, contextlib.suppress(*[FileNotFoundError] * missing_ok):
            system.rm_file(str(self))

    def copy_to(self, target: pathlib.Path) -> None:
        """Copies all below to a place in the same store."""
        with self._named() as system:
            copy = lambda name: system.cp_file(str(self / name), str(target / name))
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                list(threads.map(copy, self.objects()))

    def rmtree(self) -> None:
        """Deletes all below."""
        with self._named() as system, ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(system.rm_file, [str(self / name) for name in self.objects()]))

    def objects(self) -> dict[str, tuple[int, str]]:
        """{path below this one: (bytes, what its store says of its contents)} of all below.

        The latter is "crc32c:..." or "md5:...", "" where the store does not say, as S3 of an object
        that came in parts.
        """
        with self._named() as system:
            found: Any = system.find(str(self), detail=True)
        start = len(str(self).partition("://")[2]) + 1
        inside = {name[start:]: of for name, of in found.items() if name[start:]}
        return {name: (int(of["size"]), _sum(of)) for name, of in inside.items()}

    def bring(self) -> pathlib.Path:
        """A copy of the object, or of all below, in the user's cache; what has changed is new.

        FileNotFoundError if there is none.
        """
        import filelock  # As fsspec.

        with self._named() as system:
            found: Any = system.find(str(self), detail=True)
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", str(self))
        start = len(str(self).partition("://")[2]) + 1
        now = {name[start:]: _version(of) for name, of in found.items()}
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        digest = hashlib.sha256(str(self).encode()).hexdigest()[:16]
        place = pathlib.Path(home) / "imagen-sd-jax" / "buckets" / digest / self.name
        place.parent.mkdir(parents=True, exist_ok=True)
        kept = place.parent / "kept.json"
        with filelock.FileLock(place.parent / "lock"):
            before = json.loads(kept.read_text()) if kept.exists() else {}
            old = [name for name in before if now.get(name) != before[name]]
            there = lambda name: (place / name if name else place).exists()
            new = [name for name in now if now[name] != before.get(name) or not there(name)]
            if old or new:
                kept.write_text(json.dumps({n: v for n, v in before.items() if n not in old}))
            for name in old:
                (place / name if name else place).unlink(missing_ok=True)
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                list(threads.map(lambda name: self._copy(name, place), new))
            if old or new:
                kept.write_text(json.dumps(now))
        return place

    def _copy(self, name: str, place: pathlib.Path) -> None:
        target = place / name if name else place
        target.parent.mkdir(parents=True, exist_ok=True)
        (self / name if name else self).get(target)

    def iterdir(self) -> Generator["Remote", None, None]:
        """The objects and folders in it, none where there is nothing."""
        with self._named() as system, contextlib.suppress(FileNotFoundError):
            for name in system.ls(str(self), detail=False):
                if last := name.rstrip("/").rpartition("/")[2]:
                    yield self / last

    def glob(self, pattern: str, **_: Any) -> Generator["Remote", None, None]:
        """The objects and folders below whose path matches, part by part."""
        depth = pattern.count("/") + 1
        names = {"/".join(name.split("/")[:depth]) for name in self.objects()}
        for name in sorted(names):
            if name.count("/") + 1 == depth and pathlib.PurePosixPath(name).match(pattern):
                yield self / name

    def rglob(self, pattern: str, **_: Any) -> Generator["Remote", None, None]:
        """The objects below, at any depth, whose path ends so."""
        for name in self.objects():
            if pathlib.PurePosixPath(name).match(pattern):
                yield self / name

    def absolute(self) -> "Remote":
        """Itself."""
        return self

    @contextlib.contextmanager
    def _named(self) -> Iterator["fsspec.AbstractFileSystem"]:
        """The store; OSError, with the URL, for each error of its package."""
        opened = system(self.parts[0][:-1])
        try:
            yield opened
        except OSError as error:
            if error.errno:
                error.filename = str(self)
            elif str(self) not in str(error):
                there = isinstance(error, FileNotFoundError | FileExistsError)
                error.args = (f"{self}: {_line(error)}{'' if there else _CLOSED}",)
            raise
        except Exception as error:  # Of credentials, mostly.
            raise OSError(f"{self}: {_line(error)}{_CLOSED}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


@functools.cache
def _probe(folder: Remote) -> None:
    """Writes an object into a folder, and deletes it: once in a process."""
    probe = folder / f".{uuid.uuid4().hex}.tmp"
    probe.write_bytes(b"")
    probe.unlink()


def _version(of: dict[str, Any]) -> str:
    """What changes with an object's contents, in its store's words."""
    known = ("etag", "ETag", "generation", "LastModified", "mtime", "size")
    return next(f"{name} {of[name]}" for name in known if of.get(name) is not None)


def _sum(of: dict[str, Any]) -> str:
    if "crc32c" in of:
        return f"crc32c:{of['crc32c']}"
    etag = str(of.get("ETag", "")).strip('"')
    return f"md5:{etag}" if etag and "-" not in etag else ""


class Mirror:
    """A local folder for files that grow; of a folder in a bucket a copy, sent there from time to
    time."""

    def __init__(self, folder: pathlib.Path, *names: str) -> None:
        """Brings what there is of the files and subfolders `names`; `local` is the folder."""
        self.local, self._folder, self._sent = folder, None, {}
        self._opened, self._lock = contextlib.ExitStack(), threading.Lock()
        if isinstance(folder, Remote):
            self._folder = folder
            self.local = pathlib.Path(self._opened.enter_context(tempfile.TemporaryDirectory()))
            for name in names:
                self._bring(name)
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._keep, name="mirror", daemon=True)
            self._thread.start()

    def send(self, sparing: bool = False) -> None:
        """Returns when the bucket holds what the local files do, and no file that is not there.

        `sparing` leaves out large files that have hardly grown: as nothing can be appended to an
        object, each is sent whole, and in all about ten times its bytes.
        """
        if not self._folder:
            return
        with self._lock:
            for path in sorted(self.local.rglob("*")):
                if path.is_file() and not path.name.endswith(".tmp"):
                    status = path.stat()
                    version = status.st_size, status.st_mtime_ns
                    before = self._sent.get(path) or (0, 0)
                    much = max(_SMALL, 1.1 * before[0]) if before[0] > _SMALL else 0
                    if before != version and (not sparing or status.st_size >= much):
                        (self._folder / path.relative_to(self.local)).send(path)
                        self._sent[path] = version
            for path in [path for path in self._sent if not path.exists()]:
                (self._folder / path.relative_to(self.local)).unlink(missing_ok=True)
                del self._sent[path]

    def close(self) -> None:
        """Sends what is new, and ends."""
        if self._folder:
            self._ended.set()
            self._thread.join()
        with self._opened:
            self.send()

    def _bring(self, name: str) -> None:
        assert self._folder
        there = self._folder / name
        inside = [there / at for at in there.objects()] or [there] * there.is_file()
        for path in inside:
            local = self.local / path.relative_to(self._folder)
            local.parent.mkdir(parents=True, exist_ok=True)
            local.write_bytes(path.read_bytes())
            self._sent[local] = None

    def _keep(self) -> None:
        while not self._ended.wait(_PAUSE):
            try:
                self.send(sparing=True)
            except OSError as error:  # `send` before the next checkpoint raises it.
                logging.warning("not sent yet: %s", error)
