"""Pictures to draw over: what cannot be opened is named with its flag."""

import pytest
from PIL import Image

from diffusion_jax.draw import pictures


def test_the_flag_of_a_picture_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    text, large = tmp_path / "text.png", tmp_path / "large.png"
    text.write_text("no picture")
    Image.new("L", (20, 20)).save(large)
    with pytest.raises(OSError, match=rf"^--mask={text} is not a JPEG, PNG or WebP image$"):
        pictures.open_picture(str(text), "L", "--mask")
    with pytest.raises(OSError, match=rf"^--image={tmp_path}/none cannot be opened: \[Errno 2\]"):
        pictures.open_picture(f"{tmp_path}/none", "RGB", "--image")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=rf"^--low_res={large} cannot be opened: Decompression"):
        pictures.open_picture(str(large), "RGB", "--low_res")
