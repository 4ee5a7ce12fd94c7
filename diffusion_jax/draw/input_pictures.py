"""Read pictures to draw over, and masks of the parts to redraw, from flags and files."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags, logging
from PIL import Image, UnidentifiedImageError

from diffusion_jax import files
from diffusion_jax.files import rgb, untrusted

IMAGE, MASK = "image", "mask"
flags.disclaim_key_flags()  # --help lists these flags with those of the module that defines them.


class InputPictures(NamedTuple):
    """Pictures to draw over, and masks. Pixels that are white in the mask are redrawn."""

    images: Sequence[Image.Image]
    """One picture for all texts, or one picture per text."""
    masks: Sequence[Image.Image]
    """No mask, one mask for all texts, or one mask per text."""

    def at(self, size: tuple[int, int], num_texts: int) -> dict[str, np.ndarray]:
        """Return the arrays {IMAGE: uint8 [N, H, W, 3], MASK: bool [N, H, W]} for N texts.

        Without masks, the key MASK is missing. Pictures and masks are resized to `size`. A pixel of
        a resized mask is True if any part of it is white. So a pixel that is not redrawn lies
        entirely in the black part of the mask.

        Args:
            size: Width and height in pixels.
            num_texts: The number of texts, N.
        """

        def stacked(images: Sequence[Image.Image], how: Image.Resampling) -> np.ndarray:
            same = [np.asarray(i if i.size == size else i.resize(size, how)) for i in images]
            return np.stack(same * (num_texts // len(same)))

        batch = {IMAGE: stacked(self.images, Image.Resampling.BICUBIC)}
        if self.masks:
            white = [mask.point([0] * 128 + [255] * 128) for mask in self.masks]
            batch[MASK] = stacked(white, Image.Resampling.BOX) > 0
        return batch


def define() -> Callable[[int], InputPictures | None]:
    """Define the flags --image and --mask. The caller defines --strength.

    Return a function that takes the number of texts, and opens the pictures and masks that the
    flags name. It raises the errors of `read`, and ValueError for a strength without a picture.
    """
    images = flags.DEFINE_multi_string("image", [], "A picture to draw over: one for all texts, or one for each.")
    masks = flags.DEFINE_multi_string(
        "mask",
        [],
        "A mask for --image, white at the parts to redraw and black elsewhere: one for all texts, or one for each.",
    )

    def opened(num_texts: int) -> InputPictures | None:
        if flags.FLAGS["strength"].present and not images.value:
            raise ValueError("--strength needs a picture to draw over: give --image too")
        return read(images.value, masks.value, num_texts)

    return opened


def read(images: Sequence[str], masks: Sequence[str], num_texts: int) -> InputPictures | None:
    """Open pictures and masks from the paths `images` and `masks`. Return None without paths.

    Raises:
        ValueError: The number of pictures or of masks is not 0, 1 or `num_texts`, a mask has no
            picture or another size than its picture, or a file is damaged.
        OSError: A file is missing, or is not an image that Pillow can read.
    """
    opened = [open_picture(path, "RGB", "--image") for path in images]
    white = [open_picture(path, "L", "--mask") for path in masks]
    for name, some in (("--image", opened), ("--mask", white)):
        if len(some) not in (0, 1, num_texts):
            raise ValueError(
                f"{name} is given {len(some)} times, but there are {num_texts} texts: give it once, or once per text"
            )
    if white and not opened:
        raise ValueError(f"--mask={masks[0]} needs a picture: give --image too")
    for i, (path, mask) in enumerate(zip(masks, white, strict=True)):
        for image in opened if len(white) == 1 else [opened[min(i, len(opened) - 1)]]:
            _check_mask(mask, image, f"--mask={path}")
    return InputPictures(opened, white) if opened else None


def open_picture(path: str, mode: str, flag: str) -> Image.Image:
    """Open a picture, turn it upright, and convert it to "RGB", or to "L" for a mask.

    `flag` is the name of the flag that gives the path, for error messages.

    Raises:
        ValueError: The file is damaged, has too many pixels, or has pixels of an unknown range.
        OSError: The file is missing, or is not an image that Pillow can read.
    """
    try:
        image = untrusted.open_image(files.local(path))
    except UnidentifiedImageError as error:
        raise OSError(f"{flag}={path} is not an image that Pillow can read") from error
    except OSError as error:
        raise OSError(f"{flag}={path} cannot be opened: {error}") from error
    except ValueError as error:
        raise ValueError(f"{flag}={path} cannot be opened: {error}") from error
    try:
        image.load()
    except (OSError, SyntaxError, ValueError) as error:  # Pillow raises each for damaged files.
        raise ValueError(f"{flag}={path} is damaged: {error}") from error
    return upright(image, mode, f"{flag}={path}")


Picture = Image.Image | np.ndarray | jax.Array | str | os.PathLike[str]
"""A Pillow image, an array uint8 [H, W, 3] or, for masks, [H, W] of uint8 or bool, or a path."""


def opened(image: Picture | None, mask: Picture | None, strength: object = None) -> InputPictures | None:
    """Return the picture to draw over and its mask as InputPictures, or None without a picture.

    Raises:
        ValueError: There is a mask or a strength without a picture, the sizes of picture and mask
            differ, or a value is not a picture.
        OSError: A file is missing, or is not an image that Pillow can read.
    """
    if image is None:
        for name, value in (("mask", mask), ("strength", strength)):
            if value is not None:
                raise ValueError(f"a {name} was given without an image to draw over: give an image too")
        return None
    image = upright(image, "RGB", "the image")
    if mask is None:
        return InputPictures([image], [])
    white = upright(mask, "L", "the mask")
    _check_mask(white, image, "the mask")
    return InputPictures([image], [white])


def upright(image: Picture, mode: str, name: str) -> Image.Image:
    """Turn an image as its EXIF tag says, and convert it to "RGB", or to "L" for a mask.

    Transparent pixels become white, or black in a mask. `name` is the image's name in error
    messages.

    Raises ValueError if the image is no picture, if the range of the pixels is unknown, or if a
    mask with transparent pixels shows other colours than black and white.
    """
    if isinstance(image, str | os.PathLike):
        return open_picture(os.fspath(image), mode, name.removeprefix("the "))
    if not isinstance(image, Image.Image):
        image = _from_array(image, name)
    try:
        return rgb.to_mask(image) if mode == "L" else rgb.to_rgb(image)
    except ValueError as error:
        raise ValueError(f"{name} has {error}") from error


def _from_array(pixels: Any, name: str) -> Image.Image:
    if getattr(pixels, "dtype", None) == np.bool_:
        pixels = np.uint8(255) * np.asarray(pixels)
    try:
        if pixels.dtype == np.uint8:
            return Image.fromarray(np.asarray(pixels))
    except (AttributeError, TypeError, ValueError):  # It is no array, or has another shape.
        pass
    words = f"{pixels.dtype}{list(pixels.shape)}" if hasattr(pixels, "dtype") else repr(pixels)
    raise ValueError(f"{name} is {words[:60]}: give a path, a Pillow image or an array uint8 [H, W, 3]")


def _check_mask(mask: Image.Image, image: Image.Image, name: str) -> None:
    if mask.size != image.size:
        raise ValueError(
            f"{name} is {mask.size[0]}x{mask.size[1]}, but its picture is "
            f"{image.size[0]}x{image.size[1]}: give a mask of the picture's size"
        )
    white = np.asarray(mask) >= 128
    if white.all():
        logging.warning("%s is white throughout: the whole picture is redrawn", name)
    elif not white.any():
        logging.warning("%s is black throughout: nothing is redrawn", name)
