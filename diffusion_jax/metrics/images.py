"""Images for an extractor from files: folders as pytorch-fid reads them, and webdataset tars."""

import io
import os
import pathlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from diffusion_jax.data.records import Records
from diffusion_jax.data.sources.webdataset import WebDataset

SUFFIXES = ("bmp", "jpg", "jpeg", "pgm", "png", "ppm", "tif", "tiff", "webp")
FITS = ("exact", "squash", "crop")
_BROKEN, _UNLIKE = 1, 2


@runtime_checkable
class Files(Protocol):
    """A list of encoded images, each read when it is wanted."""

    def __len__(self) -> int:
        """How many."""
        ...

    def read(self, index: int) -> tuple[bytes, str]:
        """An image file's contents, and its name for messages."""
        ...

    def left_out(self) -> dict[str, int]:
        """How many things were found but are not in the list, by reason."""
        ...


class FolderFiles:
    """The image files of one folder in the order of their names; those in folders below are not."""

    def __init__(self, folder: str | os.PathLike[str]):
        """FileNotFoundError or ValueError if there are none."""
        root = pathlib.Path(folder)
        if not root.is_dir():
            raise FileNotFoundError(f"no folder {root}")
        self._paths = sorted(p for p in root.iterdir() if p.suffix[1:].lower() in SUFFIXES)
        if not self._paths:
            below = "; there are folders in it, give one of these" if _has_folders(root) else ""
            raise ValueError(f"no images in {root}: looked for {', '.join(SUFFIXES)}{below}")

    def __len__(self) -> int:
        """How many."""
        return len(self._paths)

    def read(self, index: int) -> tuple[bytes, str]:
        """The file."""
        return self._paths[index].read_bytes(), str(self._paths[index])

    def left_out(self) -> dict[str, int]:
        """Nothing."""
        return {}


class RecordFiles:
    """The images of a data source's records, without their texts."""

    def __init__(self, records: Records):
        """Such as sources.Folder or webdataset.WebDataset."""
        self._records = records

    def __len__(self) -> int:
        """How many."""
        return len(self._records)

    def read(self, index: int) -> tuple[bytes, str]:
        """The record's image."""
        (record,) = self._records.read([index])
        return record.image, record.name

    def left_out(self) -> dict[str, int]:
        """As the records say."""
        return self._records.left_out()


def open_files(path: str) -> Files:
    """A folder of images, or a webdataset where `path` names tars (of which braces name many)."""
    if path.endswith(".tar"):
        return RecordFiles(WebDataset(path, uncaptioned="drop"))
    return FolderFiles(path)


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
        """How many files there are, broken ones among them."""
        return len(self._files)

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
            image = Image.open(io.BytesIO(contents))
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
        for index in range(len(self._files)):
            image = self._decode(index)
            if image is not None:
                return image.shape
        raise ValueError(f"none of the {len(self._files)} images can be read")


def _has_folders(root: pathlib.Path) -> bool:
    return any(path.is_dir() for path in root.iterdir())
