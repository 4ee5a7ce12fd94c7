"""Read images for feature extractors from folders, tars and other data sources."""

import contextlib
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from diffusion_jax import files
from diffusion_jax.data import rows, sources, storage
from diffusion_jax.data.records import Records
from diffusion_jax.data.sources.folder import masks_of
from diffusion_jax.data.sources.webdataset import open_tars
from diffusion_jax.files import sheets, untrusted

SUFFIXES = ("bmp", "jpg", "jpeg", "pgm", "png", "ppm", "tif", "tiff", "webp")
FITS = ("exact", "squash", "crop")
_BROKEN, _UNLIKE = 1, 2  # Statuses: the image is unreadable, or has another size.


class ImageFiles(NamedTuple):
    """A list of encoded images that are read on demand."""

    number: int
    read: Callable[[int], tuple[bytes, str]]
    """Maps an image's index to (the bytes of its file, its name for messages)."""
    left_out: Callable[[], dict[str, int]]
    """Returns {reason: number of records that were left out for this reason}."""
    stamps: Callable[[], Sequence[str]] = tuple
    """Returns one string per file, with its name and size, or () if the sizes are unknown."""


def open_files(path: str) -> ImageFiles:
    """Open a set of images.

    `path` is a folder, one or several tars ("a.tar", "{a,b}.tar"), or a captioned data source
    ("SOURCE:PATH::TEXT").
    """
    if (named := sources.open_named(path)) is not None:
        return record_files(named)
    if path.endswith(".tar"):
        return record_files(open_tars(path, uncaptioned="drop"))
    return folder_files(path)


def folder_files(folder: str | os.PathLike[str]) -> ImageFiles:
    """Return the image files of a folder, sorted by name. Ignore subfolders and masks.

    Numbers in names are sorted as numbers: 2.png comes before 10.png. Left out are hidden files,
    and the contact sheet and the smaller images of earlier stages that `sample` wrote.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: the folder has no images.
    """
    paths, masks = _listed(folder)
    read = lambda i: (paths[i].read_bytes(), str(paths[i]))
    left_out = lambda: {"unused_mask": len(masks)} if masks else {}
    return ImageFiles(len(paths), read, left_out, lambda: [f"{p.name} {p.stat().st_size}" for p in paths])


def _listed(folder: str | os.PathLike[str]) -> tuple[list[pathlib.Path], Collection[str]]:
    """Return the paths of a folder's images, and the names of masks among its files."""
    root = files.local(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}")
    paths = _image_paths(root)
    masks = masks_of([path.name for path in paths])
    paths = [path for path in paths if path.name not in masks]
    if not paths:
        folders = any(path.is_dir() for path in root.iterdir())
        subfolders = "; it has subfolders: choose one of them" if folders else ""
        raise ValueError(f"no images in {root}: looked for {', '.join(SUFFIXES)}{subfolders}")
    return paths, masks


def natural(name: str) -> list[tuple[bool, Any]]:
    """Return a key that sorts the numbers in names as numbers: "a2" and "a02" before "a10"."""
    parts = filter(None, re.split(r"(\d+)", name))
    return [(False, int(part)) if part.isdecimal() else (True, part) for part in parts]


def check_order(folder: str) -> None:
    """Check that the names of a folder's images determine their order.

    Raises:
        ValueError: two names differ only in zeros before a number or in the suffix.
    """
    root = files.local(folder)
    for one, two in itertools.pairwise(_image_paths(root) if root.is_dir() else []):
        if natural(one.stem) == natural(two.stem):
            raise ValueError(
                f"the order of {one.name} and {two.name} in {folder} is ambiguous, so they cannot "
                "be paired with prompts: rename them"
            )


def paths_in(folder: str) -> list[str]:
    """Return the paths of a folder's images, sorted by name, or [folder] if it is not a folder.

    Raises ValueError if the folder has no images, or no order.
    """
    root = files.local(folder)
    if not root.is_dir():
        return [folder]
    check_order(folder)
    return [str(path) for path in _listed(folder)[0]]


def _image_paths(root: pathlib.Path) -> list[pathlib.Path]:
    """Return the paths of a folder's images, sorted by name. See `folder_files`."""
    other = _beside_drawn(root)
    is_image = lambda name: name.rpartition(".")[2].lower() in SUFFIXES and name not in other
    paths = [p for p in root.iterdir() if is_image(p.name) and not storage.is_hidden(p.name)]
    return sorted(paths, key=lambda path: (natural(path.stem), path.name))


def _beside_drawn(root: pathlib.Path) -> set[str]:
    """Return the names of the image files that `sample` writes beside the images it draws."""
    index, drawn, smaller = root / "metadata.jsonl", set[str](), set[str]()
    if not index.is_file():
        return set()
    with contextlib.suppress(ValueError):  # It belongs to other images.
        for _, row in rows.read(index):
            drawn.add(str(row.get("file_name")))
            smaller.update(row.get("smaller", ()))
    return {sheets.NAME, *smaller} - drawn


def record_files(records: Records) -> ImageFiles:
    """Return the images of a data source's records, in the order of the records."""

    def read(index: int) -> tuple[bytes, str]:
        (record,) = records.read([index])
        return record.image, record.name

    return ImageFiles(len(records), read, records.left_out)


class DecodedFiles:
    """A Source for extractors.extract that decodes image files to arrays of equal size.

    Images are converted to RGB as in pytorch-fid. Incomplete images, and images with more than 8
    bits per channel, count as broken.
    """

    dtype = np.uint8

    def __init__(self, files: ImageFiles, size: int = 0, fit: str = "exact"):
        """Store the arguments. Without a `size`, find the size of the first readable image.

        Args:
            files: the encoded images.
            size: height and width of the decoded images in pixels. With fit="exact" it must be 0.
            fit: "exact" does not resize; all images must have the size of the first readable one.
                "squash" resizes to a square and ignores the aspect ratio, as for the real images
                of MLPerf's benchmark. "crop" resizes the shorter side and crops the centre, as in
                NeMo. Images are resized with Pillow's bicubic filter.

        Raises:
            ValueError: `size` and `fit` do not match, or fit="exact" and no image is readable.
        """
        if fit not in FITS or (fit == "exact") != (size == 0):
            raise ValueError(
                f"fit is {fit!r} with size {size}: choose 'squash' or 'crop' with a size, or 'exact' without a size"
            )
        self._files, self._size, self._fit = files, size, fit
        self._unlike = ""
        self._threads = ThreadPoolExecutor(min(16, os.cpu_count() or 1))
        self.shape = (size, size, 3) if size else self._first_shape()

    def __len__(self) -> int:
        """Return the number of files, including broken ones."""
        return self._files.number

    def read(self, indices: np.ndarray) -> tuple[UInt8[np.ndarray, "B H W 3"], UInt8[np.ndarray, "B"]]:
        """Return the images at `indices`, and a status for each image: 0 if it is usable.

        All pixels of unusable images are 0.
        """
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
        """Return "broken_image", the only reason to skip an image.

        Raises ValueError if the status marks an image of another size.
        """
        if status == _UNLIKE:
            h, w, _ = self.shape
            raise ValueError(
                f"the images differ in size: the first is {w}x{h}{self._unlike}. Resize them with "
                "--size=256 and --fit=squash or --fit=crop"
            )
        return "broken_image"

    def _decode(self, index: int) -> np.ndarray | None:
        contents, name = self._files.read(index)
        try:
            image = untrusted.open_image(contents)
            if image.mode.startswith(("I", "F")):  # Pillow would clip 16 bits or floats to white.
                return None
            pixels = np.asarray(self._fitted(image.convert("RGB")))
        except Exception:  # Pillow's decoders raise many types.
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
