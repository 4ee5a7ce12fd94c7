"""Input pictures are opened as 8-bit images, and errors name their flag."""

import numpy as np
import pytest
from PIL import ExifTags, Image

from diffusion_jax.draw import input_pictures


def test_a_picture_that_cannot_be_opened_is_an_error_that_names_its_flag(tmp_path, monkeypatch):
    text, large = tmp_path / "text.png", tmp_path / "large.png"
    text.write_text("no picture")
    Image.new("L", (20, 20)).save(large)
    with pytest.raises(OSError, match=rf"^--mask={text} is not an image that Pillow can read$"):
        input_pictures.open_picture(str(text), "L", "--mask")
    with pytest.raises(OSError, match=rf"^--image={tmp_path}/none cannot be opened: \[Errno 2\]"):
        input_pictures.open_picture(f"{tmp_path}/none", "RGB", "--image")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=rf"^--low_res={large} cannot be opened: Decompression"):
        input_pictures.open_picture(str(large), "RGB", "--low_res")


def test_a_jpeg_with_exif_rotation_is_opened_upright_and_not_changed(tmp_path):
    exif, stored = Image.Exif(), Image.new("RGB", (64, 40), "black")
    exif[ExifTags.Base.Orientation] = 6  # This value means: rotate by 90 degrees clockwise.
    stored.paste("white", (0, 0, 16, 40))  # After rotation, this is the top.
    stored.save(tmp_path / "turned.jpg", exif=exif)
    image = input_pictures.open_picture(f"{tmp_path}/turned.jpg", "RGB", "--image")
    assert image.size == (40, 64)
    rows = np.asarray(image.convert("L")).mean(1)
    assert rows[:14].min() > 240 and rows[20:].max() < 15
    for mask in (None, Image.new("L", (40, 64), 255)):
        inputs = input_pictures.opened(original := Image.open(tmp_path / "turned.jpg"), mask)
        assert inputs is not None and inputs.images[0].size == (40, 64)
        assert original.size == (64, 40) and original.getexif()[ExifTags.Base.Orientation] == 6  # It is not changed.


def test_grey_levels_of_16_bits_are_scaled_to_8(tmp_path):
    levels = Image.fromarray(np.array([[0, 257, 32768, 65535]], np.uint16))
    levels.save(tmp_path / "grey.png")
    levels.save(tmp_path / "inverted.tif", tiffinfo={262: 0})  # White is zero.
    opened = lambda name, mode: np.asarray(input_pictures.open_picture(f"{tmp_path}/{name}", mode, "--image"))[0]
    assert opened("grey.png", "RGB")[:, 1].tolist() == opened("grey.png", "L").tolist() == [0, 1, 128, 255]
    assert opened("inverted.tif", "RGB")[:, 0].tolist() == [255, 254, 127, 0]


@pytest.mark.parametrize(("mode", "value"), [("F", 1.5), ("I", 2**20)])
def test_pixel_modes_without_a_known_range_are_errors(mode, value):
    image = Image.new(mode, (4, 4), value)
    with pytest.raises(ValueError, match=r"^--image=a\.tiff has pixels of mode [FI] from"):
        input_pictures.upright(image, "RGB", "--image=a.tiff")


def test_transparent_pixels_become_white_in_a_picture_and_black_in_a_mask():
    image = Image.new("RGBA", (2, 1), (255, 255, 255, 255))
    image.putpixel((0, 0), (255, 255, 255, 0))
    assert np.asarray(input_pictures.upright(image, "L", "mask")).tolist() == [[0, 255]]
    image.putpixel((0, 0), (0, 0, 0, 0))
    assert np.asarray(input_pictures.upright(image, "RGB", "image"))[0, :, 0].tolist() == [255, 255]
    # A coloured picture with a transparent part cannot be a mask.
    image.putpixel((1, 0), (255, 0, 0, 255))
    with pytest.raises(ValueError, match=r"^mask has transparent parts and colours, which do not"):
        input_pictures.upright(image, "L", "mask")


def test_a_pixel_is_redrawn_if_any_part_of_it_is_white_in_the_mask():
    mask = Image.fromarray(np.array([[0, 0, 0, 0, 0, 255], [0, 127, 0, 128, 255, 255]], np.uint8))
    inputs = input_pictures.opened(np.zeros((2, 6, 3), np.uint8), mask)
    assert inputs is not None
    assert inputs.at((3, 1), 2)[input_pictures.MASK].tolist() == 2 * [[[False, True, True]]]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "RGB", "L"])
def test_a_brush_with_soft_edges_is_a_mask_if_no_pixel_is_transparent(mode):
    levels = np.array([[0, 60, 128, 200, 255]], np.uint8)  # As a browser's canvas, in mode RGBA.
    mask = Image.fromarray(levels).convert(mode)
    assert np.asarray(input_pictures.upright(mask, "L", "mask")).tolist() == levels.tolist()


@pytest.mark.parametrize(
    ("level", "message"), [(255, "white throughout: the whole picture is redrawn"), (0, "black throughout: nothing")]
)
def test_a_mask_of_one_colour_is_reported_as_a_warning(caplog, level, message):
    with caplog.at_level("WARNING"):
        input_pictures.opened(Image.new("RGB", (4, 4)), Image.new("L", (4, 4), level))
    assert f"the mask is {message}" in caplog.text
