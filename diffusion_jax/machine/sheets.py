"""Write PNG files and contact sheets with captions."""

import io
import os
import textwrap
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont

from diffusion_jax.machine import files

_CELL = 128  # Approximate width of a cell in pixels; smaller images are enlarged.
_LINE = 12  # Height of a line of text.


def to_uint8(images: Float[np.ndarray, "B H W 3"]) -> UInt8[np.ndarray, "B H W 3"]:
    """Convert images from [-1, 1] to integers in 0 ... 255. Values are rounded and clipped."""
    return np.clip(np.round((np.asarray(images) + 1) * 127.5), 0, 255).astype(np.uint8)


def contact_sheet(
    images: UInt8[np.ndarray, "N H W 3"], captions: Sequence[str], columns: int = 8
) -> UInt8[np.ndarray, "_ _ 3"]:
    """Return one image that shows all images in rows, with a caption below each.

    Small images are enlarged smoothly (Lanczos).
    """
    columns = min(columns, len(images))
    scale = max(1, round(_CELL / images.shape[2]))
    width, height = images.shape[2] * scale, images.shape[1] * scale
    font = ImageFont.load_default(10)
    lines = [textwrap.wrap(caption, max(8, width // 6))[:3] for caption in captions]
    text_height = _LINE * max(map(len, lines), default=0)
    rows = -(-len(images) // columns)
    size = (columns * (width + 4) + 4, rows * (height + text_height + 6) + 4)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for i, (image, text) in enumerate(zip(images, lines, strict=True)):
        x, y = 4 + i % columns * (width + 4), 4 + i // columns * (height + text_height + 6)
        enlarged = Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS)
        sheet.paste(enlarged, (x, y))
        for row, line in enumerate(text):
            draw.text((x, y + height + 1 + row * _LINE), line, fill="black", font=font)
    return np.asarray(sheet)


def write_png(path: str | os.PathLike[str], image: UInt8[np.ndarray, "H W 3"]) -> None:
    """Write a PNG file atomically."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    files.write_whole(path, buffer.getvalue())
