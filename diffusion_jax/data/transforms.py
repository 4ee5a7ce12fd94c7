"""Encoded images to square uint8 RGB pixels."""

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from diffusion_jax.machine import untrusted

# Others (16 bit, float) would be clipped by Pillow's conversion, mostly to plain white.
_MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"}
CENTRE = (0.5, 0.5)


class Unusable(ValueError):
    """An image that training passes over; `reason` is the name that it is counted under."""

    def __init__(self, reason: str, detail: str):
        """`detail` says what is wrong with this one."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def square(
    data: bytes,
    size: int,
    *,
    resize: int = 0,
    min_size: int = 0,
    max_aspect: float = 0.0,
    place: tuple[float, float] = CENTRE,
) -> UInt8[np.ndarray, "H W 3"]:
    """Decodes, shrinks or enlarges the smaller side to `resize`, and cuts out `size` x `size`.

    `resize` 0 stands for `size`. `place` in [0, 1] says where the cut lies, left to right and top
    to bottom. Bicubic with antialiasing, as NeMo's Imagen resizes. Transparent pixels become
    white, cameras' orientation tags are obeyed. Unusable("broken_image") for what is no whole
    image, Unusable("too_small") if a side has less than `min_size` pixels, and
    Unusable("too_elongated") if one is more than `max_aspect` (0: any) times the other.
    """
    image, resize = _open(data), resize or size
    if min(image.size) < min_size:
        raise Unusable("too_small", f"{image.width}x{image.height}, min_size is {min_size}")
    if max_aspect and max(image.size) > max_aspect * min(image.size):
        raise Unusable("too_elongated", f"{image.width}x{image.height}, not within {max_aspect}:1")
    return np.asarray(_resize(_decode(image, resize), resize, size, place))


def check_caption(text: str, min_chars: int) -> None:
    """Unusable("short_caption") if the text has less than `min_chars` characters."""
    if len(text) < min_chars:
        raise Unusable("short_caption", f"{text!r} has {len(text)} characters, of {min_chars}")


def _open(data: bytes) -> Image.Image:
    """The header alone is read: enough for the size."""
    try:
        return untrusted.open_image(data)
    except Exception as error:  # Pillow's decoders raise errors of many kinds.
        raise Unusable("broken_image", f"{type(error).__name__}: {error}") from error


def _decode(image: Image.Image, size: int) -> Image.Image:
    if image.mode not in _MODES:
        raise Unusable("broken_image", f"pixels of mode {image.mode}, not 8 bits a channel")
    try:
        # A JPEG can be decoded at 1/2, 1/4 or 1/8: several times faster, and as at least twice the
        # size is kept, the antialiasing below still decides what the pixels become.
        image.draft(None, (2 * size, 2 * size))
        ImageOps.exif_transpose(image, in_place=True)  # Otherwise every image would be copied.
        if image.mode == "RGB":
            return image
        if not image.has_transparency_data:
            return image.convert("RGB")
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    except Exception as error:  # As above; truncated files are noticed only here.
        raise Unusable("broken_image", f"{type(error).__name__}: {error}") from error


def _resize(image: Image.Image, resize: int, size: int, place: tuple[float, float]) -> Image.Image:
    """The cut of the resized image, without computing the rest of it."""
    scale = resize / min(image.size)
    sides = [max(resize, round(side * scale)) for side in image.size]
    firsts = [int(at * (side - size)) for at, side in zip(place, sides, strict=True)]
    # Of the image as it is; the filter reaches beyond the box, as it would in the whole.
    steps = [before / after for before, after in zip(image.size, sides, strict=True)]
    left, top = (first * step for first, step in zip(firsts, steps, strict=True))
    right, bottom = ((first + size) * step for first, step in zip(firsts, steps, strict=True))
    box = (left, top, min(right, image.width), min(bottom, image.height))
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)
