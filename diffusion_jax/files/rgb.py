"""Convert images of all modes to upright 8-bit sRGB, and correct what Pillow misreads."""

import functools
import io
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from absl import logging
from PIL import ExifTags, Image, ImageCms, ImageFile, ImageOps

_WHITE = {"I": 65535, "F": 1}
"""The value of white in images of more than 8 bits, by the first letter of their mode."""
_SPACES = {"RGB": ("RGB", "RGBX", "YCbCr", "L", "P", "1"), "GRAY": ("L", "1"), "CMYK": ("CMYK",), "Lab": ("LAB",)}
"""The modes of images, without transparency, whose pixels a profile of a colour space describes."""


def mend(image: ImageFile.ImageFile, source: bytes | str | os.PathLike[str]) -> None:
    """Correct what Pillow misreads in the header of an image. `source` is its contents or path.

    Raises OSError for a JPEG 2000 of more than 8 bits per colour, whose pixels Pillow misreads.
    """
    if image.format == "PNG" and "transparency" in image.info:
        # Pillow scales the pixels to 8 bits, but not the transparent colour. Of 16-bit RGB pixels,
        # it keeps the high bytes: colours that share them with the transparent one, and so differ
        # from it by less than 1 of 255, become transparent too.
        colour, kind = image.info["transparency"], image.tile[0].args if image.tile else ""
        if kind in ("L;2", "L;4"):
            white = 2 ** int(kind[2:]) - 1
            image.info["transparency"] = (colour & white) * (255 // white)
        elif kind == "RGB;16B":
            image.info["transparency"] = tuple(value >> 8 for value in colour)
    if image.format == "JPEG2000" and image.mode != "I;16":
        # Of deep colours, Pillow turns white into black. The byte 40 after the marker SIZ holds the
        # bits of the first colour, less 1.
        content = source if isinstance(source, bytes) else pathlib.Path(source).read_bytes()
        depth = (content[content.find(b"\xff\x4f\xff\x51") + 42] & 127) + 1
        if depth > 8:
            raise OSError(f"a JPEG 2000 with {depth} bits per colour: save the image with 8 bits")


def to_rgb(
    image: Image.Image, resize: Callable[[Image.Image], Image.Image] = lambda image: image, background: str = "white"
) -> Image.Image:
    """Return an image of mode RGB: upright, in sRGB, without transparency.

    The EXIF orientation and the colour profile of the image are applied. 16-bit and float pixels
    are scaled to 8 bits.

    Args:
        image: the image.
        resize: resizes or crops the upright image before its colours are converted, which takes
            less time for fewer pixels.
        background: the colour behind transparent pixels.

    Raises:
        ValueError: a pixel of more than 8 bits is not in the range from black to white, which is 0
            to 65535 for integers, and 0 to 1 for floats.
        OSError, SyntaxError and others: the image is damaged.
    """
    tags, file_format = getattr(image, "tag_v2", {}), image.format
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)  # A copy, which has no tags and no format.
        image.format = file_format
    profile = image.info.get("icc_profile") or (_lab_profile() if image.mode == "LAB" else b"")
    if image.mode[0] in _WHITE:
        image = _to_8_bits(image, tags)
    is_grey = image.mode == "LA"
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, background), rgba)
        image = image.convert("L" if is_grey else "RGB")
    transform = _transform(profile, image.mode) if profile else None
    if transform is None:
        return resize(_converted(image, "RGB"))
    pixels = resize(_converted(image, transform.inputMode))
    converted = ImageCms.applyTransform(pixels, transform)
    assert converted is not None  # It is None only for changes in place.
    return converted


def to_mask(image: Image.Image) -> Image.Image:
    """Return a mask as an image of mode L, as `to_rgb` does, with black for transparent pixels.

    Raises:
        ValueError: as `to_rgb`, or if an image with transparent parts shows other colours than
            black and white, which does not say what the mask is.
        OSError, SyntaxError and others: the image is damaged.
    """
    flat = to_rgb(image, background="black").convert("L")
    if image.has_transparency_data:
        alpha = np.asarray(ImageOps.exif_transpose(image).convert("RGBA"))[..., 3]
        opaque = np.asarray(flat)[alpha == 255]
        # Without transparent pixels, a grey is the soft edge of a brush.
        if opaque.size < alpha.size and ((opaque > 15) & (opaque < 240)).any():
            raise ValueError(
                "transparent parts and colours, which do not say what is masked: give a mask that is black and white"
            )
    return flat


def _converted(image: Image.Image, mode: str) -> Image.Image:
    return image if image.mode == mode else image.convert(mode)  # `convert` copies every image.


def _to_8_bits(image: Image.Image, tags: Mapping[int, Any]) -> Image.Image:
    """Convert 16-bit and float pixels to 8 bits. `tags` are those of a TIFF, else empty.

    Raises ValueError if a pixel is outside the range from black to white, or if the image is a TIFF
    file with 32-bit integers, because such files do not say which number is white.
    """
    white, pixels = _WHITE[image.mode[0]], np.asarray(image)
    if tags.get(ExifTags.Base.BitsPerSample) == (12,):
        white = 4095
    low, high = pixels.min(), pixels.max()
    if not 0 <= low <= high <= white or (image.mode == "I" and image.format == "TIFF"):
        raise ValueError(f"pixels of mode {image.mode} from {low} to {high}: save the image with 8 or 16 bits")
    white_is_zero = tags.get(ExifTags.Base.PhotometricInterpretation) == 0
    if image.mode == "I;16" and white_is_zero:  # Pillow inverts 8 bits only.
        pixels = white - pixels
    scaled = Image.fromarray(np.rint(pixels * (255 / white)).astype(np.uint8))
    if "transparency" in image.info:  # Pillow would clip the other pixels at 255.
        opaque = pixels != image.info["transparency"]
        scaled.putalpha(Image.fromarray(opaque.astype(np.uint8) * 255))
    return scaled


@functools.lru_cache(maxsize=64)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the conversion of a colour profile to sRGB, for images of this mode.

    The result is None if the conversion would change no value by more than 1 of 255, as for sRGB
    profiles, or if the profile is damaged or describes pixels of another kind.
    """
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = opened.profile.xcolor_space.strip()  # pyright: ignore[reportAttributeAccessIssue]
        if mode not in _SPACES.get(space, ()):
            raise ValueError(f"it is a profile for {space}")
        source = {"GRAY": "L", "Lab": "LAB"}.get(space, space)
        transform = ImageCms.buildTransform(opened, _srgb(), source, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError) as error:
        logging.warning("ignored the colour profile of an image of mode %s: %s", mode, error)
        return None
    if source in ("RGB", "L"):
        lattice = np.stack(np.meshgrid(*[np.arange(0, 256, 15, dtype=np.uint8)] * 3), -1)
        colours = Image.fromarray(lattice.reshape(-1, 1, 3)).convert(source)
        converted = np.asarray(ImageCms.applyTransform(colours, transform)).astype(int)
        if np.abs(converted - np.asarray(colours.convert("RGB"))).max() <= 1:
            return None
    return transform


@functools.cache
def _srgb() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


@functools.cache
def _lab_profile() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
