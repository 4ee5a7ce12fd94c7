"""Pictures that a browser uploads."""

import base64
import io

import pytest
from PIL import Image

from diffusion_jax.web.uploads import Uploads


def test_uploads_may_be_png_jpeg_or_webp():
    for format in ("PNG", "JPEG", "WebP"):
        Image.new("RGB", (6, 4)).save(file := io.BytesIO(), format)
        added = Uploads().add({"png": base64.b64encode(file.getvalue()).decode()})
        assert (added["width"], added["height"]) == (6, 4)
    with pytest.raises(ValueError, match="cannot be read: send a PNG, JPEG or WebP file in base64"):
        Uploads().add({"png": base64.b64encode(b"GIF89a").decode()})


def test_a_picture_that_is_too_large_is_refused_before_it_is_decoded(monkeypatch):
    Image.new("RGB", (4_000, 10)).save(file := io.BytesIO(), "PNG")
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(ValueError, match="4000x10 pixels: choose one with at most 2,048"):
        Uploads().add({"png": base64.b64encode(file.getvalue()).decode()})
