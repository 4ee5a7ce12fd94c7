"""Read untrusted files with bounded memory and one-line errors, and without executing code.

weights/torch_files.py reads pickles without calling the functions that they name.
"""

import codecs
import contextlib
import functools
import importlib
import io
import json
import math
import os
import pathlib
import pickle
import pickletools
import re
import stat
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from diffusion_jax.files import rgb
from diffusion_jax.files.remote import Remote

WEB_FORMATS = ("JPEG", "PNG", "WEBP")
_PLUGINS = ("pillow_jxl", "pillow_heif.HeifImagePlugin")  # Importing one adds its formats to Pillow.
# EPS runs Ghostscript, and MPEG has no decoder.
_UNUSED = ("EPS", "MPEG")
_PIXELS = 2**25  # An image of any size in bytes may have this many pixels,
_PER_BYTE = 64  # and a larger one this many for each byte of its file.
POINTER = b"version https://git-lfs.github.com/spec/"
"""The first bytes of a pointer of Git LFS, a text that stands for a file not downloaded."""
IS_POINTER = "a pointer of Git LFS, not the file: run git lfs pull in its repository"
_SMALL = 2**30  # Any archive may unpack to this many bytes.
_TIMES = 50  # An archive may also unpack to this many times its own size.
_TEXT = 2**26  # The largest number of bytes of text to read from a device.
_OPERATIONS = 5_000_000  # Limit for a pickle. A pickle of 10,000 arrays has 500,000 operations.


@functools.cache
def image_formats() -> tuple[str, ...]:
    """Return the formats of images that Pillow decodes by itself, the most frequent ones first.

    Formats that any file may seem to have, because they begin with no known bytes, are left out,
    except for TGA, which comes last.
    """
    for plugin in _PLUGINS:
        with contextlib.suppress(ImportError):
            importlib.import_module(plugin)
    Image.init()
    decoded = [
        name
        for name, (factory, accept) in Image.OPEN.items()
        if accept
        and name not in (*WEB_FORMATS, *_UNUSED)
        and not (isinstance(factory, type) and issubclass(factory, ImageFile.StubImageFile))
    ]
    return (*WEB_FORMATS, *decoded, "TGA")


@functools.cache
def image_suffixes() -> tuple[str, ...]:
    """Return the suffixes of the files that `open_image` opens, in lower case, without the dot."""
    formats = (*image_formats(), "MPO")  # MPO files are JPEGs with further frames.
    return tuple(sorted(s[1:] for s, name in Image.registered_extensions().items() if name in formats))


def open_image(source: bytes | str | os.PathLike[str], formats: Sequence[str] = ()) -> Image.Image:
    """Open an image. Only the header is read; Pillow reads the pixels on use.

    Args:
        source: The contents or the path of the file.
        formats: Pillow's names of the allowed formats; () allows image_formats().

    Raises:
        ValueError: The image has more than 179 million pixels (Pillow's limit), has far more than
            its size in bytes suggests, or is malformed.
        OSError: The file is not an image of these formats, or a JPEG 2000 that Pillow misreads.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        image = Image.open(file, formats=tuple(formats) or image_formats())
    except (Image.DecompressionBombError, SyntaxError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    size = len(source) if isinstance(source, bytes) else os.path.getsize(source)
    if image.width * image.height > max(_PIXELS, _PER_BYTE * size):
        image.close()
        raise ValueError(
            f"{size:,} bytes unpack to {image.width} x {image.height} pixels: an image of over "
            f"{_PIXELS:,} pixels may have {_PER_BYTE} for each byte"
        )
    rgb.mend(image, source)
    return image


def decode(content: bytes, errors: str = "strict") -> str:
    """Decode text in UTF-8, or in UTF-16 with a byte order mark. Marks at the start are removed.

    `errors` is that of bytes.decode: "strict", or "surrogateescape" to keep bytes that are not
    UTF-8. Raises ValueError if the text has another encoding, is compressed by gzip or is a pointer
    of Git LFS; the message names the first bad byte.
    """
    if content.startswith(POINTER):
        raise ValueError(IS_POINTER)
    if content.startswith(b"\x1f\x8b"):
        raise ValueError("compressed by gzip: decompress it, as with gzip -d")
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = "utf-16" if content.startswith(marks) else "utf-8-sig"
    try:
        text = content.decode(encoding, errors)
    except UnicodeDecodeError as error:
        byte, line = content[error.start], content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"not {encoding.removesuffix('-sig').upper()} text (byte 0x{byte:02x} at offset "
            f"{error.start}, line {line}): save it in UTF-8"
        ) from error
    if number := text.count("\0"):
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(
            f"not UTF-8 text (it holds NUL characters, {number:,} in all, the first in line "
            f"{line}; UTF-16 has many): save it in UTF-8, without NUL characters"
        )
    return without_marks(text)


def without_marks(text: str) -> str:
    """Remove the byte order marks at the start of a text. Converted files may have several."""
    return text.lstrip("\ufeff")


def split_lines(text: str) -> list[str]:
    """Split text at CR, LF and CR LF. Unlike str.splitlines, keep all other separators."""
    return re.split("\r\n|\r|\n", text)


def read_text(path: pathlib.Path) -> str:
    """Return the content of a text file in UTF-8 or marked UTF-16.

    Raises:
        ValueError: The file is a pipe, a device with more than 64 MiB (/dev/zero never ends), or
            neither UTF-8 nor marked UTF-16.
        OSError: The file cannot be read.
    """
    refuse_pipe(path)
    with path.open("rb") as file:
        content = file.read(-1 if path.is_file() else _TEXT + 1)
    if not path.is_file() and len(content) > _TEXT:
        raise ValueError(f"{path} has more than {_TEXT:,} bytes, the limit for a text file")
    try:
        return decode(content)
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from error


def refuse_pipe(path: pathlib.Path) -> None:
    """Raise ValueError if a path is a FIFO. Reading a FIFO blocks until a process writes to it."""
    if path.is_fifo():
        raise ValueError(f"{path} is a pipe: save its content in a file, and name that file")


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Return a context in which the message of a ValueError begins with `place`, such as a path."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


@contextlib.contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Return a context in which errors become a ValueError that names a file to read.

    FileNotFoundError passes unchanged.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # Damaged files raise exceptions of many types.
        raise ValueError(f"cannot read {path}: {type(error).__name__}: {error}") from error


def check_inside(name: str, path: pathlib.Path) -> None:
    """Raise ValueError if the file `path` names a file `name` outside its own folder."""
    parts = pathlib.PurePath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise ValueError(f"{path} names a file outside its folder, {name}: download it again")


def check_unpacked(unpacked: int, path: pathlib.Path) -> None:
    """Raise ValueError if a file that unpacks to `unpacked` bytes is far smaller than that."""
    if unpacked > (limit := _limit(path.stat().st_size)):
        raise ValueError(f"{path} unpacks to more than {limit:,} bytes, the limit for a file of its size")


def is_plain(path: pathlib.Path, root: pathlib.Path) -> bool:
    """Return whether a path is a regular file below the folder `root`, reached without links.

    `root` itself may be a link. For a path in a bucket, return whether it exists.
    """
    if isinstance(path, Remote):
        return path.exists()
    try:
        expected = root.resolve() / path.relative_to(root)
        return path.resolve() == expected and stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError, RuntimeError):  # Missing, outside, or a loop of links.
        return False


def read_plain(path: pathlib.Path) -> bytes | None:
    """Return the content of a regular file, or None if the path is not a regular file.

    Links, devices, FIFOs and missing files give None.
    """
    if isinstance(path, Remote):
        return path.read_bytes() if path.exists() else None
    try:
        # O_NONBLOCK: a FIFO without a writer would block.
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(number, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(number).st_mode) else None


class Unpickler(pickle.Unpickler):
    """An unpickler whose memory is bounded.

    Subclasses override `find_class`, which decides which classes and functions a pickle may use.

    A pickle of nine bytes can make Python's own unpickler allocate gigabytes, for example by
    announcing a string that is longer than the file, or by storing an object under number 2**27.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._file = file

    def load(self) -> Any:
        """Return the next object of the file. Raises ValueError if its pickle is too large."""
        start = self._file.tell()
        for count, (operation, argument, _) in enumerate(pickletools.genops(self._file)):
            number = argument if operation.name.endswith("PUT") else 0
            if max(count, int(number or 0)) >= _OPERATIONS:
                raise ValueError(f"the pickle has more than {_OPERATIONS:,} operations or objects")
        self._file.seek(start)
        return super().load()


class Unpacked:
    """A reader of a compressed file that raises ValueError if it unpacks to too many bytes."""

    def __init__(self, file: Any, packed: int):
        """Wrap `file`, which is open for decompression. Its compressed size is `packed` bytes."""
        self._file, self._limit = file, _limit(packed)

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int) -> int:
        """Move to an offset, in unpacked bytes. Raises ValueError if it exceeds the limit."""
        self._check(offset)
        return self._file.seek(offset)

    def read(self, size: int) -> bytes:
        """Read `size` unpacked bytes. Raises ValueError if they end beyond the limit."""
        self._check(self.tell() + size)
        return self._file.read(size)

    def _check(self, end: int) -> None:
        if end > self._limit:
            raise ValueError(f"it unpacks to more than {self._limit:,} bytes, the limit for a file of its size")


def read_archive(file: Any, only: str = "") -> dict[str, np.ndarray]:
    """Return the arrays of an open .npz file, keyed by name.

    If `only` is set, read only the array with this name, and return {} if it is missing. Raises
    ValueError if the file unpacks to far more than its size, or if `read_array` refuses an array.
    """
    check_archive(file)
    arrays = []
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if only and info.filename != f"{only}.npy":
                continue
            with archive.open(info) as member:
                array = read_array(member, info.file_size)
                arrays.append((info.filename.removesuffix(".npy"), array))
    return once(arrays)


def read_array(file: Any, size: int) -> np.ndarray:
    """Return the array of an open .npy file of `size` bytes.

    Raises ValueError if the header does not match `size`, or if the array holds Python objects.
    NumPy's own reader is not used, because it allocates memory for whatever shape the header
    states.
    """
    header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in header:
        raise ValueError(f"the .npy has version {version}: only 1.0 and 2.0 are supported")
    shape, fortran, dtype = header[version](file)
    expected = math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which could run code: save an array of numbers")
    if min(shape, default=0) < 0 or expected != size - file.tell():
        raise ValueError(f"{size:,} bytes do not match an array of {dtype} and shape {shape}")
    content = bytearray(file.read())  # To the end, where zipfile compares the CRC-32.
    if len(content) != expected:
        raise ValueError(f"the array ends after {len(content):,} of {expected:,} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def check_archive(file: Any) -> None:
    """Raise ValueError if the open zip file `file` unpacks to far more than its size.

    Otherwise, rewind the file.
    """
    packed = file.seek(0, os.SEEK_END)
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
    file.seek(0)
    if unpacked > (limit := _limit(packed)):
        raise ValueError(
            f"its {packed:,} bytes unpack to {unpacked:,}, but a file of its size may unpack to {limit:,} at most"
        )


def _limit(packed: int) -> int:
    """Return the number of bytes to which an archive of `packed` bytes may unpack."""
    return max(_SMALL, _TIMES * packed)


def parse_json(content: bytes | str) -> Any:
    """Parse JSON. Raises ValueError if it is invalid, repeats a key, or is nested too deeply."""
    try:
        return json.loads(content, object_pairs_hook=once)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dictionary of pairs (key, value). Raises ValueError if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice: keep one")
    return found


def printable(text: str) -> str:
    r"""Return text that is safe to print in a terminal: control characters are escaped, as in \x1b.

    So are bytes that are not UTF-8, which names of files may contain, and halves of characters.
    Tabs and newlines do not change.
    """
    text = re.sub(r"[\ud800-\udc7f\udd00-\udfff]", lambda m: f"\\u{ord(m[0]):04x}", text)
    unsafe = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\udc80-\udcff]"
    return re.sub(unsafe, lambda m: f"\\x{ord(m[0]) & 0xFF:02x}", text)


def printable_json(value: Any) -> Any:
    """Return a copy of a JSON value with control characters escaped in all strings and keys."""
    if isinstance(value, dict):
        return {printable(str(name)): printable_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [printable_json(part) for part in value]
    return printable(value) if isinstance(value, str) else value
