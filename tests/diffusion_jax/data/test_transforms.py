"""Decoding: every mode to RGB, every shape to a square, every damage to Unusable."""

import io

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.data.transforms import Unusable, crop


def encode(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def square(data, size, **options):
    return crop(data, (size, size), **options)


def smooth(width, height):
    """A photograph of sorts: random colours on a coarse grid, enlarged."""
    grid = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)


def test_the_centre_is_cut_out_of_a_wide_image():
    stripes = np.repeat(np.eye(3, dtype=np.uint8) * 255, 32, axis=0)  # [96, 3]: red, green, blue
    wide = np.tile(stripes, (32, 1, 1))
    np.testing.assert_array_equal(
        square(encode(Image.fromarray(wide)), 32), np.broadcast_to((0, 255, 0), (32, 32, 3))
    )
    tall = encode(Image.fromarray(wide.swapaxes(0, 1)))
    np.testing.assert_array_equal(square(tall, 32)[:, :, 1], np.full((32, 32), 255))


def test_shrinking_antialiases():
    checkers = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    image = square(encode(Image.fromarray(checkers)), 8)
    np.testing.assert_allclose(image.astype(int), 127.5, atol=1)


def test_the_smaller_side_decides_also_when_enlarging():
    assert square(encode(smooth(40, 30)), 64).shape == (64, 64, 3)
    assert square(encode(smooth(333, 100)), 64).shape == (64, 64, 3)


def test_transparency_becomes_white():
    black = Image.new("RGBA", (8, 8), (0, 0, 0, 64))
    np.testing.assert_array_equal(square(encode(black), 8), np.full((8, 8, 3), 191))
    palette = black.convert("P")
    palette.info["transparency"] = palette.getpixel((0, 0))
    np.testing.assert_array_equal(square(encode(palette), 8), np.full((8, 8, 3), 255))


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "RGB"])
def test_opaque_modes_become_rgb(mode):
    image = Image.new("RGB", (8, 8), "white").convert(mode)
    format = "JPEG" if mode == "CMYK" else "PNG"
    np.testing.assert_array_equal(square(encode(image, format), 8), np.full((8, 8, 3), 255))


def test_orientation_tags_are_obeyed():
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8] = 255  # White above.
    exif = Image.Exif()
    exif[0x0112] = 3  # Stored upside down.
    image = square(encode(Image.fromarray(pixels), "JPEG", exif=exif, quality=95), 16)
    assert image[:8].max() < 10 and image[8:].min() > 245


def test_decoding_a_jpeg_at_a_reduced_scale_changes_little():
    noise = np.random.default_rng(0).normal(0, 40, (512, 512, 3)) + np.asarray(smooth(512, 512))
    data = encode(Image.fromarray(noise.clip(0, 255).astype(np.uint8)), "JPEG", quality=95)
    whole = Image.open(io.BytesIO(data)).resize((64, 64), Image.Resampling.BICUBIC)
    error = square(data, 64) - np.asarray(whole).astype(float)
    # Of 255, for much noise: 1.5; keeping no more than the size itself would make it 2.5.
    assert 0 < np.sqrt(np.mean(error**2)) < 2


def test_the_smallest_allowed_side_is_min_size():
    assert square(encode(smooth(50, 32)), 16, min_size=32).shape == (16, 16, 3)
    with pytest.raises(Unusable, match=r"too_small: 50x31, data\.min_size is 32") as error:
        square(encode(smooth(50, 31)), 16, min_size=32)
    assert error.value.reason == "too_small"


JPEG = encode(smooth(64, 48), "JPEG")
PNG = encode(smooth(64, 48))
DEEP = encode(Image.fromarray(np.full((8, 8), 30000, np.uint16)))


@pytest.mark.parametrize("data", [b"", b"<html>", JPEG[:-200], PNG[:-200], PNG[:60], DEEP])
def test_damaged_images_are_unusable(data):
    with pytest.raises(Unusable, match="broken_image: ") as error:
        square(data, 16)
    assert error.value.reason == "broken_image"


@pytest.mark.parametrize("size", [(97, 64), (64, 97), (31, 50), (333, 200)])
def test_a_cut_is_what_one_cuts_out_of_the_whole_resized_image(size):
    """One unit apart where Pillow resizes rows and columns in another order, rounding between."""
    image = smooth(*size)
    data = io.BytesIO()
    image.save(data, "png")
    scale = 48 / min(image.size)
    whole = image.resize([max(48, round(s * scale)) for s in image.size], Image.Resampling.BICUBIC)
    for place in ((0.5, 0.5), (0.0, 0.99), (0.99, 0.3)):
        left, top = (int(at * (side - 32)) for at, side in zip(place, whole.size, strict=True))
        expected = np.asarray(whole.crop((left, top, left + 32, top + 32))).astype(int)
        actual = square(data.getvalue(), 32, resize=48, place=place)
        assert np.abs(actual - expected).max() <= 1
