"""Files of others, which may have been made to hurt: bounded memory, an error in one line, no code.

Pickles are read in weights/torch_files.py, which calls nothing that they name.
"""

import io
import json
import math
import os
import re
import zipfile
from typing import Any

import numpy as np
from PIL import Image

_IMAGES = ("JPEG", "PNG", "WEBP")  # Of Pillow's decoders, those that images here need.
_SMALL = 2**30  # Bytes that an archive may always unpack to,
_TIMES = 50  # and how many times its own size a larger one may.


def open_image(source: bytes | str | os.PathLike[str]) -> Image.Image:
    """An image of which the header alone is read; ValueError or OSError for what is none.

    Pillow refuses more than 179 million pixels.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        return Image.open(file, formats=_IMAGES)
    except (Image.DecompressionBombError, SyntaxError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def read_archive(file: Any) -> dict[str, np.ndarray]:
    """The arrays of an .npz, an open file; ValueError for one that unpacks to far more."""
    check_archive(file)
    arrays = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            with archive.open(info) as member:
                arrays[info.filename.removesuffix(".npy")] = read_array(member, info.file_size)
    return arrays


def read_array(file: Any, size: int) -> np.ndarray:
    """The array of an .npy of `size` bytes; ValueError unless it is as large as it says.

    Numpy's own reader takes memory for whatever shape the file says.
    """
    header = {(1, 0): np.lib.format.read_array_header_1_0,
              (2, 0): np.lib.format.read_array_header_2_0}  # fmt: skip
    version = np.lib.format.read_magic(file)
    if version not in header:
        raise ValueError(f"an .npy of version {version}")
    shape, fortran, dtype = header[version](file)
    expected = math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
    if min(shape, default=0) < 0 or expected != size - file.tell():
        raise ValueError(f"{size:,} bytes are no array of {dtype} and shape {shape}")
    content = bytearray(file.read())  # To its end, where a zip compares the CRC-32.
    if len(content) != expected:
        raise ValueError(f"it ends after {len(content):,} of {expected:,} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def check_archive(file: Any) -> None:
    """ValueError for a zip that unpacks to far more than it is; leaves `file` at its start."""
    packed = file.seek(0, os.SEEK_END)
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
    file.seek(0)
    if unpacked > max(_SMALL, _TIMES * packed):
        raise ValueError(
            f"its {packed:,} bytes unpack to {unpacked:,}: no arrays of numbers are like that"
        )


def parse_json(content: bytes | str) -> Any:
    """What JSON says; ValueError also for what is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def printable(text: str) -> str:
    r"""Text for a terminal, with the control characters that could rule it as \x1b."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m[0]):02x}", text)
