"""Decodes, resizes and crops images to uint8 RGB pixels."""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, UnidentifiedImageError

from diffusion_jax.files import rgb, untrusted

CENTRE = (0.5, 0.5)
_TAGS_OF_PNG = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
_GREY = 16  # Largest difference between the red, green and blue of a pixel of a mask.
_DARK = 16  # Masks without a pixel of this brightness are refused: a label of 1 is not white.


class Unusable(ValueError):
    """Error for an image or text that training skips. Skipped pictures are counted by `reason`."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def crop(
    data: bytes,
    shape: tuple[int, int],
    *,
    resize: int = 0,
    min_size: int = 0,
    max_aspect: float = 0.0,
    place: tuple[float, float] = CENTRE,
) -> UInt8[np.ndarray, "H W 3"]:
    """Decode an image, resize it, and crop it to `shape`.

    Resizing is bicubic with antialiasing, as in NeMo's Imagen. Before, the image is made upright,
    and converted to sRGB with white in place of transparent pixels (see rgb.to_rgb).

    Args:
        data: an encoded image.
        shape: height and width of the crop in pixels.
        resize: length in pixels to which the shorter side is resized before cropping; 0 resizes the
            image until it just covers the crop.
        min_size: smallest allowed length of the shorter side of the encoded image, in pixels.
        max_aspect: largest allowed ratio of the longer side to the shorter one; 0 allows any.
        place: position of the crop: x and y from 0 (left, top) to 1 (right, bottom).

    Raises:
        Unusable: with reason "broken_image" if the image is damaged or has pixels whose white is
            unknown, "too_small" if a side is shorter than `min_size`, "too_elongated" if the ratio
            of the sides exceeds `max_aspect`.
    """
    image = _open(data)
    _check_size(image, min_size, max_aspect)
    return _cropped(image, shape, resize, place)


def crop_masked(
    data: bytes,
    shape: tuple[int, int],
    *,
    mask: bytes | None = None,
    resize: int = 0,
    min_size: int = 0,
    max_aspect: float = 0.0,
    place: tuple[float, float] = CENTRE,
) -> UInt8[np.ndarray, "H W 4"]:
    """Return an image as `crop` does, with a fourth channel: the weights of its pixels in the loss.

    A weight is the brightness of the grey encoded image `mask`, which is 0 where it is transparent.
    Without `mask`, it is the opacity of the image, whose transparent pixels then keep their stored
    colours.

    Raises Unusable as `crop` does, with reason "broken_mask" for a mask that is damaged, coloured
    or black throughout, or that has another size than the upright image.
    """
    image = _open(data)
    _check_size(image, min_size, max_aspect)
    if mask is not None:
        weights = _read_mask(mask, size_of(data))
        smallest = (resize, resize) if resize else shape
        cut = np.asarray(_resize(weights, smallest, shape, place))
        return np.concatenate([_cropped(image, shape, resize, place), cut[..., None]], -1)
    weights = None
    if image.has_transparency_data:
        with _unusable("broken_image"):
            rgba = image.convert("RGBA")
        image, weights = rgba.convert("RGB"), rgba.getchannel("A")
        weights.info.pop("icc_profile", None)  # A profile describes colours; these are weights.
    colours = _cropped(image, shape, resize, place)
    if not weights:
        return np.concatenate([colours, np.full((*shape, 1), 255, np.uint8)], -1)
    return np.concatenate([colours, _cropped(weights, shape, resize, place)[..., :1]], -1)


def _read_mask(data: bytes, shape: tuple[int, int]) -> Image.Image:
    """Return the mask of an image of `shape`, its height and width, in mode L.

    Raises Unusable with reason "broken_mask".
    """
    image = _open(data, "broken_mask")
    with _unusable("broken_mask"):
        mask, colours = rgb.to_mask(image), np.asarray(rgb.to_rgb(image, background="black"))
    if (mask.height, mask.width) != shape:
        size = f"{shape[1]}x{shape[0]}"
        raise Unusable("broken_mask", f"it is {mask.width}x{mask.height}, but its image is {size}")
    if np.ptp(colours, axis=-1).max() > _GREY:
        raise Unusable("broken_mask", "it has colours: save it in grey, with white where it counts")
    if (brightest := int(np.asarray(mask).max())) < _DARK:
        raise Unusable("broken_mask", f"its brightest pixel is {brightest} of 255: white counts")
    return mask


def _check_size(image: Image.Image, min_size: int, max_aspect: float) -> None:
    if min(image.size) < min_size:
        raise Unusable("too_small", f"{image.width}x{image.height}, data.min_size is {min_size}")
    if max_aspect and max(image.size) > max_aspect * min(image.size):
        raise Unusable("too_elongated", f"{image.width}x{image.height}, data.max_aspect is {max_aspect}")


def _cropped(
    image: Image.Image, shape: tuple[int, int], resize: int, place: tuple[float, float]
) -> UInt8[np.ndarray, "H W 3"]:
    smallest = (resize, resize) if resize else shape
    cut = functools.partial(_resize, smallest=smallest, shape=shape, place=place)
    return np.asarray(_decode(image, max(smallest), cut))


def size_of(data: bytes) -> tuple[int, int]:
    """Return height and width in pixels from an image's header; (0, 0) for a damaged image.

    The orientation tag in EXIF or XMP is applied, as in `crop`.
    """
    try:
        image = _open(data)
        # Pillow turns the size of a TIFF itself. In a PNG without tags, getexif decodes all pixels.
        png, tagged = image.format == "PNG", any(word in data for word in _TAGS_OF_PNG)
        exif = {} if image.format == "TIFF" or (png and not tagged) else image.getexif()
        turned = exif.get(ExifTags.Base.Orientation, 1) >= 5
    except Exception:  # Pillow's decoders raise many types.
        return 0, 0
    width, height = image.size
    return (width, height) if turned else (height, width)


def shrink(data: bytes, size: int, *, pad: bool = False) -> bytes:
    """Shrink an encoded image and return it as a PNG, which training decodes much faster.

    Images that are small enough keep their size. Transparent pixels become white.

    Args:
        data: an encoded image.
        size: largest length in pixels of the shorter side or, with `pad`, of the longer side.
        pad: whether to add white borders that make the image a square.

    Raises:
        Unusable: with reason "broken_image" as in `crop`.
    """

    def resize(image: Image.Image) -> Image.Image:
        scale = min(1.0, size / (max(image.size) if pad else min(image.size)))
        width, height = (max(1, round(side * scale)) for side in image.size)
        return image.resize((width, height), Image.Resampling.BICUBIC)

    image = _decode(_open(data), size, resize)
    if pad:
        square = Image.new("RGB", (max(image.size), max(image.size)), "white")
        left, top = (square.width - image.width) // 2, (square.height - image.height) // 2
        square.paste(image, (left, top))
        image = square
    out = io.BytesIO()
    image.save(out, "png")
    return out.getvalue()


@contextlib.contextmanager
def _unusable(reason: str) -> Iterator[None]:
    """Turn errors of Pillow's decoders, which raise many types, into Unusable."""
    try:
        yield
    except Exception as error:
        raise Unusable(reason, f"{type(error).__name__}: {error}") from error


def _open(data: bytes, reason: str = "broken_image") -> Image.Image:
    try:
        return untrusted.open_image(data)
    except UnidentifiedImageError as error:
        start = f"no image begins with {data[:16]!r}" if data else "the file is empty"
        start = f"it is {untrusted.IS_POINTER}" if data.startswith(untrusted.POINTER) else start
        raise Unusable(reason, start) from error
    except Exception as error:  # Pillow's decoders raise many types.
        raise Unusable(reason, f"{type(error).__name__}: {error}") from error


def _decode(image: Image.Image, size: int, resize: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Return the resized image in sRGB. `size` is the largest side that `resize` may need."""
    with _unusable("broken_image"):
        # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, which is several times faster. At
        # least twice the target size is kept, so the antialiasing below determines the result.
        image.draft(None, (2 * size, 2 * size))
        return rgb.to_rgb(image, resize)


def _resize(
    image: Image.Image, smallest: tuple[int, int], shape: tuple[int, int], place: tuple[float, float]
) -> Image.Image:
    """Resize an image until it just covers `smallest`, and crop it to `shape`.

    `smallest` and `shape` are (height, width), and `place` is the crop position as in `crop`. A
    single resampling step computes only the pixels of the crop.
    """
    size = (shape[1], shape[0])  # In Pillow, the width comes first.
    pairs = list(zip(reversed(smallest), image.size, strict=True))
    scale = max(low / side for low, side in pairs)
    sides = [max(low, round(side * scale)) for low, side in pairs]
    firsts = [int(p * (side - crop)) for p, side, crop in zip(place, sides, size, strict=True)]
    # The box is the crop in the original image. Pillow's filter reads beyond the box's edges.
    steps = [before / after for before, after in zip(image.size, sides, strict=True)]
    left, top = (first * step for first, step in zip(firsts, steps, strict=True))
    right, bottom = ((first + crop) * step for first, step, crop in zip(firsts, steps, size, strict=True))
    box = (left, top, min(right, image.width), min(bottom, image.height))
    return image.resize(size, Image.Resampling.BICUBIC, box=box)
