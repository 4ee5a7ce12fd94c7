"""Convert images of all modes to upright 8-bit sRGB, and correct what Pillow misreads."""

import functools
import io
import os
import pathlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from PIL import ExifTags, Image, ImageCms, ImageFile, ImageOps

_WHITE = {"I": 65535, "F": 1}
"""The value of white in images of more than 8 bits, by the first letter of their mode."""
_SPACES = {"RGB": ("RGB", "RGBX", "YCbCr", "L", "P", "1"), "GRAY": ("L", "1"), "CMYK": ("CMYK",), "Lab": ("LAB",)}
"""The modes of images, without transparency, whose pixels a profile of a colour space describes."""

_PRIMARIES = {
    1: (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06),
    9: (0.3127, 0.329, 0.708, 0.292, 0.17, 0.797, 0.131, 0.046),
    11: (0.314, 0.351, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06),
    12: (0.3127, 0.329, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06),
}
"""x and y of white, red, green and blue in BT.709, BT.2020 and P3, by their numbers in H.273."""
_BT709 = (1 / 0.45, 1 / 1.099, 0.099 / 1.099, 1 / 4.5, 0.081)
_SRGB = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
_CURVES = {1: _BT709, 4: (2.2, 1.0, 0.0, 0.0, 0.0), 8: (1.0, 1.0, 0.0, 0.0, 0.0), 13: _SRGB, 14: _BT709, 15: _BT709}
"""ICC's parameters g, a, b, c, d of curves: (a v + b)^g from v = d on, and c v below."""
_D50 = (0.9642, 1.0, 0.8249)
_GAMMA_TOLERANCE = 0.05  # As libpng, which writers of sRGB rely on.


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
    if image.format not in ("PNG", "JPEG2000"):
        return
    content = source if isinstance(source, bytes) else pathlib.Path(source).read_bytes()
    if image.format == "PNG":
        image.info |= _png_profile(image.info, content[: content.find(b"IDAT")])
    elif image.mode != "I;16":
        # Of deep colours, Pillow turns white into black. The byte 40 after the marker SIZ holds the
        # bits of the first colour, less 1.
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


def _png_profile(info: Mapping[Any, Any], head: bytes) -> dict[Any, bytes]:
    """Return the profile that the chunk cICP of a PNG means, or else gAMA and cHRM, if any.

    Raises OSError for pictures of high dynamic range.
    """
    if (at := head.find(b"\0\0\0\4cICP")) > 0:
        number, transfer, *_ = head[at + 8 : at + 12]
        if transfer in (16, 18):
            raise OSError("a PNG of high dynamic range (PQ or HLG): save the image in sRGB")
        is_known = number in _PRIMARIES and transfer in _CURVES
        return {"icc_profile": _profile(_PRIMARIES[number], _CURVES[transfer])} if is_known else {}
    gamma = 0 if info.keys() & {"icc_profile", "srgb"} else info.get("gamma", 0)
    if not 0.01 < gamma < 100 or abs(gamma * 2.2 - 1) < _GAMMA_TOLERANCE:
        return {}
    primaries = info.get("chromaticity", ())
    is_valid = primaries and min(primaries) > 0 and max(primaries) < 1
    return {"icc_profile": _profile(primaries if is_valid else _PRIMARIES[1], (1 / gamma, 1.0, 0.0, 0.0, 0.0))}


def _profile(primaries: Sequence[float], curve: Sequence[float]) -> bytes:
    """Return an ICC profile. White is adapted to D50, that of profiles, by Bradford's transform."""
    x, y = np.reshape(primaries, (4, 2)).T
    white, *colours = np.stack([x / y, np.ones(4), (1 - x - y) / y], 1)  # XYZ with Y = 1.
    to_xyz = np.transpose(colours) * np.linalg.solve(np.transpose(colours), white)
    bradford = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
    scale = (bradford @ _D50) / (bradford @ white)
    adapted = np.linalg.inv(bradford) @ (scale[:, None] * (bradford @ to_xyz))
    numbers = lambda values: np.rint(65536 * np.asarray(values)).astype(">i4").tobytes()
    tags = {b"wtpt": b"XYZ \0\0\0\0" + numbers(_D50)}
    for name, column in zip((b"r", b"g", b"b"), adapted.T, strict=True):
        tags[name + b"XYZ"] = b"XYZ \0\0\0\0" + numbers(column)
        tags[name + b"TRC"] = b"para\0\0\0\0\0\3\0\0" + numbers(curve)
    offsets = 132 + 12 * len(tags) + np.cumsum([0, *map(len, tags.values())])
    entries = (struct.pack(">4sII", n, at, len(of)) for (n, of), at in zip(tags.items(), offsets, strict=False))
    about = b"\4\x30\0\0mntrRGB XYZ " + bytes(12) + b"acsp" + bytes(28) + numbers(_D50) + bytes(48)
    return b"".join([struct.pack(">I4x", offsets[-1]), about, struct.pack(">I", len(tags)), *entries, *tags.values()])


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
