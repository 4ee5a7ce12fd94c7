"""Write PNG files and contact sheets with captions."""

import functools
import io
import os
import subprocess
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from diffusion_jax import files

NAME = "sheet.png"
"""The name of the contact sheet that `sample` writes."""
_CELL = 128  # Approximate width of a picture in pixels; smaller images are enlarged.
_LETTERS = 12  # Font size in pixels. In smaller fonts, the spaces between words disappear.
_LINE = 14  # Height of a line of text.


def to_uint8(images: Float[np.ndarray, "B H W 3"]) -> UInt8[np.ndarray, "B H W 3"]:
    """Convert images from [-1, 1] to integers in 0 ... 255. Values are rounded and clipped.

    Raises ValueError if an image has a value that is NaN or infinite.
    """
    images = np.asarray(images)
    if bad := int((~np.isfinite(images).all((1, 2, 3))).sum()):
        raise ValueError(
            f"{bad} of {len(images)} pictures are not finite: the sampler diverges, or the weights "
            "are damaged; choose other sampler settings, or weights of another step"
        )
    return np.clip(np.round((images + 1) * 127.5), 0, 255).astype(np.uint8)


def labels(prompts: Sequence[str]) -> list[str]:
    """Return the prompts as captions. An empty prompt becomes "(no prompt)"."""
    return [prompt.strip() or "(no prompt)" for prompt in prompts]


def contact_sheet(
    images: UInt8[np.ndarray, "N H W 3"], captions: Sequence[str], columns: int = 8, lines: int = 3
) -> UInt8[np.ndarray, "_ _ 3"]:
    """Return one image that shows all images, with captions, in a grid with `columns` columns.

    Small images are enlarged by a whole factor with a Lanczos filter. A caption has at most `lines`
    lines. Captions with letters outside ASCII are drawn with a font that fontconfig finds.
    """
    columns = min(columns, len(images))
    scale = max(1, round(_CELL / images.shape[2]))
    width, height = images.shape[2] * scale, images.shape[1] * scale
    fonts = [_font("".join(sorted(set(caption)))) for caption in captions]
    margin = _LETTERS // 2  # Between the captions of neighbours.
    pairs = zip(captions, fonts, strict=True)
    texts = [_wrapped(*pair, width - margin, lines) for pair in pairs]
    text_height = _LINE * max(map(len, texts), default=0)
    rows = -(-len(images) // columns)
    size = (columns * (width + 4) + 4, rows * (height + text_height + 6) + 4)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for i, (image, text, font) in enumerate(zip(images, texts, fonts, strict=True)):
        x, y = 4 + i % columns * (width + 4), 4 + i // columns * (height + text_height + 6)
        enlarged = Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS)
        sheet.paste(enlarged, (x, y))
        for row, line in enumerate(text):
            draw.text((x, y + height + 1 + row * _LINE), line, fill="black", font=font)
    return np.asarray(sheet)


def _wrapped(caption: str, font: Any, width: int, most: int = 3) -> list[str]:
    """Wrap a caption to lines of at most `width` pixels, and return the first `most`.

    A line may have 8 letters even if these are wider than `width`. If lines are left out, the last
    one ends with "...".
    """
    lines: list[str] = []
    caption = caption[: most * max(width, 8)]  # More cannot fit: a letter is at least a pixel wide.
    for letters in range(max(8, min(width, len(caption))), 7, -1):
        lines = textwrap.wrap(caption, letters, max_lines=most, placeholder=" ...")
        if all(font.getlength(line) <= width for line in lines):
            break
    return lines


@functools.cache
def _font(letters: str) -> Any:
    """Return a font for these letters: Pillow's own font for ASCII, otherwise an installed one.

    If fontconfig finds no font, return Pillow's font.
    """
    if not letters.isascii():
        codes = " ".join(f"{ord(letter):x}" for letter in letters)
        command = ["fc-match", "--format=%{file}", f":charset={codes}"]
        try:
            matched = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
            return ImageFont.truetype(matched.stdout, _LETTERS)
        except (OSError, subprocess.SubprocessError):  # Without fontconfig, or without any font.
            pass
    return ImageFont.load_default(_LETTERS)


def png(image: UInt8[np.ndarray, "H W 3"], parameters: str = "") -> bytes:
    """Encode an image as a PNG file that holds the text `parameters` (see draw/png_text.py)."""
    buffer, info = io.BytesIO(), PngImagePlugin.PngInfo()
    if parameters:
        info.add_text("parameters", parameters)  # As iTXt, if it has other letters than Latin-1.
    Image.fromarray(image).save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


def write_png(path: str | os.PathLike[str], image: UInt8[np.ndarray, "H W 3"], parameters: str = "") -> None:
    """Write a whole PNG file that holds the text `parameters`, or none if it is ""."""
    files.write_whole(path, png(image, parameters))
