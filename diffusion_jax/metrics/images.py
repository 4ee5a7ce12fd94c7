"""Images for an extractor from files: folders as pytorch-fid reads them, and webdataset tars."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from diffusion_jax.data import sources
from diffusion_jax.data.records import Records
from diffusion_jax.data.sources.webdataset import WebDataset
from diffusion_jax.machine import files, untrusted

SUFFIXES = ("bmp", "jpg", "jpeg", "pgm", "png", "ppm", "tif", "tiff", "webp")
FITS = ("exact", "squash", "crop")
_BROKEN, _UNLIKE = 1, 2


class Files(NamedTuple):
    """A list of encoded images, each read when it is wanted."""

    number: int
    read: Callable[[int], tuple[bytes, str]]
    """An image file's contents, and its name for messages."""
    left_out: Callable[[], dict[str, int]]
    """Counts of the files that were left out, by reason."""
    stamps: Callable[[], Sequence[str]] = tuple
    """A text for each, which changes with its size; none where that is not known."""


def open_files(path: str) -> Files:
    """A folder of images, a webdataset where `path` names tars (of which braces name many).

    Or the images of any data source, as sources.open_named reads "SOURCE:PATH::TEXT".
    """
    if (named := sources.open_named(path)) is not None:
        return record_files(named)
    if path.endswith(".tar"):
        return record_files(WebDataset(path, uncaptioned="drop"))
    return folder_files(path)


def folder_files(folder: str | os.PathLike[str]) -> Files:
    """The image files of one folder in the order of their names, without those in folders below.

    FileNotFoundError or ValueError if there are none.
    """
    root = files.local(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}")
    paths = sorted(p for p in root.iterdir() if p.suffix[1:].lower() in SUFFIXES)
    if not paths:
        folders = any(path.is_dir() for path in root.iterdir())
        below = "; there are folders in it, give one of these" if folders else ""
        raise ValueError(f"no images in {root}: looked for {', '.join(SUFFIXES)}{below}")
    read = lambda i: (paths[i].read_bytes(), str(paths[i]))
    return Files(len(paths), read, dict, lambda: [f"{p.name} {p.stat().st_size}" for p in paths])


def record_files(records: Records) -> Files:
    """The images of a data source's records, such as webdataset.WebDataset, without their texts."""

    def read(index: int) -> tuple[bytes, str]:
        (record,) = records.read([index])
        return record.image, record.name

    return Files(len(records), read, records.left_out)


class Decoded:
    """Files as images of one size, for extractors.extract.

    `fit` is "exact" (all images must have the size of the first that can be read), "squash" (each
    is resized to size x size, whatever its aspect, as MLPerf's references) or "crop" (its shorter
    side is, and the centre cut out, as NeMo's). Resizing is Pillow's bicubic. Colours are made RGB
    as pytorch-fid makes them; what is no whole image of 8 bits a channel is counted as broken.
    """

    dtype = np.uint8

    def __init__(self, files: Files, size: int = 0, fit: str = "exact"):
        """Reads as many files as it takes to find the size; ValueError if none can be read."""
        if fit not in FITS or (fit == "exact") != (size == 0):
            raise ValueError(
                f"fit {fit!r} with size {size}: 'squash' and 'crop' need a size, 'exact' takes "
                "none, and there is no other"
            )
        self._files, self._size, self._fit = files, size, fit
        self._unlike = ""
        self._threads = ThreadPoolExecutor(min(16, os.cpu_count() or 1))
        self.shape = (size, size, 3) if size else self._first_shape()

    def __len__(self) -> int:
        """The number of files, broken ones among them."""
        return self._files.number

    def read(
        self, indices: np.ndarray
    ) -> tuple[UInt8[np.ndarray, "B H W 3"], UInt8[np.ndarray, "B"]]:
        """Images (0 where one is not usable), and statuses for `reason`."""
        images = np.zeros((len(indices), *self.shape), np.uint8)
        status = np.zeros(len(indices), np.uint8)
        for row, image in enumerate(self._threads.map(self._decode, indices.tolist())):
            if image is None:
                status[row] = _BROKEN
            elif image.shape != self.shape:
                status[row] = _UNLIKE
            else:
                images[row] = image
        return images, status

    def reason(self, status: int) -> str:
        """Broken images; ValueError for sizes that differ, which no score should paper over."""
        if status == _UNLIKE:
            h, w, _ = self.shape
            raise ValueError(
                f"the images are of unlike sizes: the first is {w}x{h}{self._unlike}. Give a size "
                "to bring them to, and how: --size=256 with --fit=squash or --fit=crop"
            )
        return "broken_image"

    def _decode(self, index: int) -> np.ndarray | None:
        contents, name = self._files.read(index)
        try:
            image = untrusted.open_image(contents)
            if image.mode.startswith(("I", "F")):  # 16 bits or floats would be clipped to white.
                return None
            pixels = np.asarray(self._fitted(image.convert("RGB")))
        except Exception:  # Pillow's decoders raise errors of many kinds.
            return None
        if self._fit == "exact" and hasattr(self, "shape") and pixels.shape != self.shape:
            self._unlike = f", {name} is {pixels.shape[1]}x{pixels.shape[0]}"
        return pixels

    def _fitted(self, image: Image.Image) -> Image.Image:
        if self._fit == "exact" or image.size == (self._size, self._size):
            return image
        sides: Sequence[int] = (self._size, self._size)
        if self._fit == "crop":
            scale = self._size / min(image.size)
            sides = [max(self._size, round(side * scale)) for side in image.size]
        image = image.resize((sides[0], sides[1]), Image.Resampling.BICUBIC)
        left, top = ((side - self._size) // 2 for side in image.size)
        return image.crop((left, top, left + self._size, top + self._size))

    def _first_shape(self) -> tuple[int, ...]:
        for index in range(self._files.number):
            image = self._decode(index)
            if image is not None:
                return image.shape
        raise ValueError(f"none of the {self._files.number} images can be read")
