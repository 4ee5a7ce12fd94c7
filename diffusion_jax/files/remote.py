"""Path objects for object stores (gs:// and s3://), with pathlib's interface, built on fsspec.

A store has no folders, and objects cannot be renamed or appended to. An object appears once all of
its bytes have arrived. A store can create an object only if none exists under that name. Files that
grow line by line are written to a local folder (Mirror), which is uploaded at intervals.

etils.epath is not used, because its `exists` returns False when access is denied: a run with wrong
credentials would then start from the beginning.
"""

import contextlib
import errno
import functools
import glob
import hashlib
import json
import os
import pathlib
import stat
import tempfile
import threading
import uuid
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from absl import logging

from diffusion_jax.files.user_cache import user_cache

if TYPE_CHECKING:
    import fsspec

SCHEMES = {"gs": "gcsfs", "s3": "s3fs"}
"""Maps the URL scheme of each supported store to the package that fsspec needs for it."""
_DENIED = ": check that the credentials on this machine give access to it"
_BLOCK = 8 * 2**20  # Bytes per request of a file that is read in pieces.
_PAUSE = 10.0  # Seconds between two uploads of a growing file.
_SMALL = 2**20  # Bytes. Larger files are uploaded again only after growing by a tenth.


def system(scheme: str) -> "fsspec.AbstractFileSystem":
    """Return fsspec's file system for a URL scheme.

    Raises:
        ValueError: The package for this scheme is not installed.
    """
    import fsspec.config  # Imported here, because only commands with URLs need it.

    # A cached listing would hide what other processes have written.
    fsspec.config.conf.setdefault(scheme, {}).setdefault("use_listings_cache", False)
    if "STORAGE_EMULATOR_HOST" in os.environ:  # By default, gcsfs asks Google what the bucket is.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        return fsspec.filesystem(scheme)
    except (ValueError, ImportError) as error:
        package = SCHEMES.get(scheme, "its package")
        raise ValueError(f"no reader for {scheme}:// ({error}): install {package}") from error


def checked_range(url: str, part: bytes, size: int) -> bytes:
    """Return the bytes that a server sent for a range of `size` bytes of a file.

    Raises OSError if there are more: some web servers ignore the range, and send the whole file.
    """
    if len(part) > size:
        raise OSError(
            f"{url} cannot be read in parts, because its server always sends the whole file: copy "
            "it to a disk or into a bucket"
        )
    return part


class Remote(pathlib.PosixPath):
    """A path into a bucket, such as s3://bucket/run/config.json, with pathlib's methods.

    Errors of the store are raised as OSErrors that name the URL. Functions of os and shutil raise
    TypeError for a Remote. Never wrap a Remote in pathlib.Path(...), which would turn it into a
    local path.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not a local file")

    def check_writable(self) -> None:
        """Raise OSError or ValueError if no object can be written into this folder."""
        if self.parts[0][:-1] not in SCHEMES:
            urls = " or ".join(f"{scheme}://BUCKET/FOLDER" for scheme in SCHEMES)
            raise ValueError(f"{self} cannot be written to: use a folder on disk, or {urls}")
        _probe(self)

    def exists(self, **_: Any) -> bool:
        """Return whether an object has this name, or whether objects lie below this path."""
        return bool(self._kind())

    def is_dir(self, **_: Any) -> bool:
        """Return whether objects lie below this path."""
        return self._kind() == "directory"

    def is_file(self, **_: Any) -> bool:
        """Return whether an object has this name."""
        return self._kind() == "file"

    def _kind(self) -> str:
        """Return "file" or "directory", or "" if nothing exists at this path.

        Raises OSError if access is denied.
        """
        with self._named() as system, contextlib.suppress(FileNotFoundError):
            return system.info(str(self))["type"]
        return ""

    def stat(self, **_: Any) -> os.stat_result:
        """Return an os.stat_result with the size and the modification time of an object.

        The other fields are constants.
        """
        with self._named() as system:
            size = int(system.info(str(self))["size"])
            at = int(system.modified(str(self)).timestamp())
        return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, size, at, at, at))

    def open(self, mode: str = "r", *_: Any, **options: Any) -> Any:
        """Open the object as a file. In write mode, the object appears when the file is closed."""
        if "r" in mode:
            options = {"block_size": _BLOCK, **options}
        with self._named() as system:
            return system.open(str(self), mode, **options)

    def read_bytes(self) -> bytes:
        """Return the whole content as bytes."""
        with self._named() as system:
            return system.cat_file(str(self))  # pyright: ignore[reportReturnType]

    def read_range(self, first: int, last: int) -> bytes:
        """Return the object's bytes from offset `first` up to, but not including, offset `last`."""
        with self._named() as system:
            part: Any = system.cat_file(str(self), start=first, end=last) if first < last else b""
            return checked_range(str(self), part, last - first)

    def get(self, file: pathlib.Path) -> None:
        """Copy the object's content into a local file."""
        with self._named() as system:
            system.get_file(str(self), str(file))

    def read_text(self, *_: Any, **__: Any) -> str:
        """Return the object's content, decoded as UTF-8."""
        return self.read_bytes().decode()

    def write_bytes(self, data: Any, new: bool = False) -> int:
        """Write the object. If `new` is True and the object exists, raise FileExistsError."""
        with self._named() as system:
            system.pipe_file(str(self), bytes(data), **({"mode": "create"} if new else {}))
        return len(data)

    def send(self, file: pathlib.Path) -> None:
        """Upload a local file to this object, or a local folder to objects below this path.

        Objects of the same name are replaced. Files directly in the folder are sent last, because
        readers look for them first.
        """
        with self._named() as system:
            inside = sorted(file.rglob("*"), key=lambda path: (-len(path.parts), path))
            for one in inside if file.is_dir() else [file]:
                if one.is_file():
                    system.put_file(str(one), str(self / one.relative_to(file)))

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing. A store has no empty folders; a folder exists once it contains an object."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        with self._named() as system, contextlib.suppress(*[FileNotFoundError] * missing_ok):
            system.rm_file(str(self))

    def copy_to(self, target: pathlib.Path) -> None:
        """Copy all objects below this path to the path `target` in the same store."""
        with self._named() as system:
            names = list(self.objects())
            system.copy([str(self / name) for name in names], [str(target / n) for n in names])

    def rmtree(self) -> None:
        """Delete all objects below this path, if there are any."""
        with self._named() as system, contextlib.suppress(FileNotFoundError):
            system.rm(glob.escape(str(self)), recursive=True)

    def objects(self) -> dict[str, tuple[int, str]]:
        """Return {relative path: (size in bytes, checksum)} of all objects below this path.

        The checksum is "crc32c:..." or "md5:...", as reported by the store. It is "" if the store
        has no checksum, for example for an object that was uploaded to S3 in parts.
        """
        objects = self._find()
        return {name: (int(info["size"]), _sum(info)) for name, info in objects.items() if name}

    def bring(self) -> pathlib.Path:
        """Return the path of a local copy of the object, or of all objects below this path.

        The copy is in the user's cache. Objects that have not changed since an earlier call are not
        transferred again. fsspec's own file cache is not used, because it does not preserve the
        folders. Raises FileNotFoundError if nothing exists at this path.
        """
        import filelock  # Imported here, because only commands with URLs need it.

        objects = self._find()
        if not objects:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", str(self))
        now = {name: _version(info) for name, info in objects.items()}
        digest = hashlib.sha256(str(self).encode()).hexdigest()[:16]
        place = user_cache() / "imagen-sd-jax" / "buckets" / digest / self.name
        place.parent.mkdir(parents=True, exist_ok=True)
        record = place.parent / "kept.json"
        local = lambda name: place / name if name else place
        with filelock.FileLock(place.parent / "lock"):
            before = json.loads(record.read_text()) if record.exists() else {}
            kept = {n: v for n, v in before.items() if now.get(n) == v and local(n).exists()}
            if kept != now or before != now:
                record.write_text(json.dumps(kept))
                for name in before.keys() - kept.keys():
                    local(name).unlink(missing_ok=True)
                if new := now.keys() - kept.keys():
                    self._get_all({name: local(name) for name in new})
                record.write_text(json.dumps(now))
        return place

    def iterdir(self) -> Generator["Remote", None, None]:
        """Yield the objects and folders directly in this folder."""
        with self._named() as system, contextlib.suppress(FileNotFoundError):
            for name in system.ls(str(self), detail=False):
                if last := name.rstrip("/").rpartition("/")[2]:
                    yield self / last

    def glob(self, pattern: str, **_: Any) -> Generator["Remote", None, None]:
        """Yield the objects and folders below this path that match the pattern."""
        with self._named() as system:
            names: Any = system.glob(f"{glob.escape(str(self))}/{pattern}")
        for name in names:
            yield self / name[self._start :]

    def rglob(self, pattern: str, **_: Any) -> Generator["Remote", None, None]:
        """Yield the objects at any depth below this path whose names match the pattern."""
        for name in self.objects():
            if pathlib.PurePosixPath(name).match(pattern):
                yield self / name

    def absolute(self) -> "Remote":
        """Return this path, which is already absolute."""
        return self

    @property
    def _start(self) -> int:
        """The number of characters to cut from fsspec's names for paths relative to this path."""
        return len(str(self).partition("://")[2]) + 1

    def _find(self) -> dict[str, dict[str, Any]]:
        """Return fsspec's information on all objects below this path.

        Keys are relative paths. The key "" is for the object at this path itself.
        """
        with self._named() as system:
            if self.parts[0].startswith("http"):  # fsspec's find says nothing about the file.
                return {"": system.info(str(self))}
            objects: Any = system.find(str(self), detail=True)
        return {name[self._start :]: info for name, info in objects.items()}

    def _get_all(self, files: dict[str, pathlib.Path]) -> None:
        """Copy objects into local files, several at a time.

        `files` maps the path of each object, relative to this path, to a local file. The path "" is
        this object itself.
        """
        for file in files.values():
            file.parent.mkdir(parents=True, exist_ok=True)
        with self._named() as system:
            names = [str(self / name) if name else str(self) for name in files]
            system.get(names, [str(file) for file in files.values()])

    @contextlib.contextmanager
    def _named(self) -> Iterator["fsspec.AbstractFileSystem"]:
        """Yield the store's file system.

        Errors in this context become OSErrors that name the URL.
        """
        opened = system(self.parts[0][:-1])
        try:
            yield opened
        except OSError as error:
            if error.errno:
                error.filename = str(self)
            elif str(self) not in str(error):
                is_clear = isinstance(error, FileNotFoundError | FileExistsError)
                error.args = (f"{self}: {_line(error)}{'' if is_clear else _DENIED}",)
            raise
        except Exception as error:  # Usually about credentials.
            raise OSError(f"{self}: {_line(error)}{_DENIED}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


@functools.cache
def _probe(folder: Remote) -> None:
    """Check write access to a folder, once per process: write an object, and delete it."""
    probe = folder / f".{uuid.uuid4().hex}.tmp"
    probe.write_bytes(b"")
    probe.unlink()


def _version(info: dict[str, Any]) -> str:
    """Return a string that changes with an object's content: its etag, generation, time or size."""
    names = ("etag", "ETag", "generation", "LastModified", "Last-Modified", "mtime", "size")
    return next(f"{name} {info[name]}" for name in names if info.get(name) is not None)


def _sum(info: dict[str, Any]) -> str:
    if "crc32c" in info:
        return f"crc32c:{info['crc32c']}"
    etag = str(info.get("ETag", "")).strip('"')
    return f"md5:{etag}" if etag and "-" not in etag else ""


class Mirror:
    """A local folder for files that grow, which is copied to a bucket at intervals.

    If the target folder is not in a bucket, `local` is that folder, and nothing is copied.
    """

    def __init__(self, folder: pathlib.Path, *names: str) -> None:
        """Open `folder`.

        If the folder is in a bucket, download those of its files and subfolders that `names` lists,
        and start to upload changes at intervals.
        """
        self.local, self._folder, self._sent = folder, None, {}
        self._opened, self._lock = contextlib.ExitStack(), threading.Lock()
        if isinstance(folder, Remote):
            self._folder = folder
            self.local = pathlib.Path(self._opened.enter_context(tempfile.TemporaryDirectory()))
            for name in names:
                source = folder / name
                inside = [source / path for path in source.objects()] or [source] * source.is_file()
                for path in inside:
                    local = self.local / path.relative_to(folder)
                    local.parent.mkdir(parents=True, exist_ok=True)
                    local.write_bytes(path.read_bytes())
                    self._sent[local] = None
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._keep, name="mirror", daemon=True)
            self._thread.start()

    def send(self, sparing: bool = False) -> None:
        """Block until all changes of the local files are in the bucket.

        Files whose names end in .tmp are not sent. If `sparing` is True, large files that have
        grown by less than a tenth are not sent either. Each upload sends the whole file, because an
        object cannot be appended to. So this rule limits the total upload to about ten times the
        file's size.
        """
        if not self._folder:
            return
        with self._lock:
            for path in sorted(self.local.rglob("*")):
                if path.is_file() and not path.name.endswith(".tmp"):
                    status = path.stat()
                    version = status.st_size, status.st_mtime_ns
                    before = self._sent.get(path) or (0, 0)
                    least = max(_SMALL, 1.1 * before[0]) if before[0] > _SMALL else 0
                    if before != version and (not sparing or status.st_size >= least):
                        (self._folder / path.relative_to(self.local)).send(path)
                        self._sent[path] = version
            for path in [path for path in self._sent if not path.exists()]:
                (self._folder / path.relative_to(self.local)).unlink(missing_ok=True)
                del self._sent[path]

    def close(self) -> None:
        """Upload all changes, and stop uploading."""
        if self._folder:
            self._ended.set()
            self._thread.join()
        with self._opened:
            self.send()

    def _keep(self) -> None:
        while not self._ended.wait(_PAUSE):
            try:
                self.send(sparing=True)
            except OSError as error:  # Raised again by the `send` before the next checkpoint.
                logging.warning("the upload failed and will be tried again: %s", error)
