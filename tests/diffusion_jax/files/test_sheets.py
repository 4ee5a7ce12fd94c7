"""PNG files and contact sheets: exact pixels, captions, sizes."""

import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.files import sheets


def colours(*grey, size=16):
    """Return one uniform picture per grey level."""
    return np.stack([np.full((size, size, 3), g, np.uint8) for g in grey])


def test_to_uint8_rounds_and_clips():
    x = np.array([-1, 1, 0, -3, 7, 0.5 / 127.5, 1.49 / 127.5 - 1, 1.51 / 127.5 - 1], np.float32)
    actual = sheets.to_uint8(np.tile(x[:, None, None, None], (1, 1, 1, 3)))
    assert actual.dtype == np.uint8
    # 0 maps to 127.5, which rounds to the even level.
    assert actual[:, 0, 0, 0].tolist() == [0, 255, 128, 0, 255, 128, 1, 2]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_to_uint8_of_a_picture_that_is_not_finite_is_an_error(value):
    images = np.zeros((3, 4, 4, 3), np.float32)
    images[1, 2, 3, 0] = value
    with pytest.raises(ValueError, match=r"^1 of 3 pictures are not finite: the sampler diverges"):
        sheets.to_uint8(images)


def test_to_uint8_inverts_the_scaling_of_every_grey_level():
    levels = np.arange(256, dtype=np.uint8)
    images = np.tile(levels[:, None, None, None], (1, 1, 1, 3))
    unit = images.astype(np.float32) / 127.5 - 1
    np.testing.assert_array_equal(sheets.to_uint8(unit), images)


def test_a_sheet_has_eight_pictures_per_row_with_captions_below():
    grey = [10 * i for i in range(10)]
    sheet = sheets.contact_sheet(colours(*grey), ["one line"] * 10)
    # 16 pixels are enlarged to 128, with gaps of 4, and 6 below a caption line of 14.
    assert sheet.shape == (4 + 2 * (128 + 14 + 6), 4 + 8 * (128 + 4), 3)
    for i, level in enumerate(grey):
        x, y = 4 + i % 8 * 132, 4 + i // 8 * 148
        np.testing.assert_array_equal(sheet[y : y + 128, x : x + 128], level)
        caption = sheet[y + 129 : y + 143, x : x + 128]
        assert caption.min() < 100  # Black letters on white.
        assert (sheet[y + 143 : y + 148, x : x + 128] == 255).all()
    assert (sheet[152:, 4 + 2 * 132 :] == 255).all()  # The last row holds two pictures.


def test_long_captions_are_wrapped_to_at_most_three_lines():
    two = sheets.contact_sheet(colours(0), ["a red seven on gray paper"])
    assert two.shape == (4 + 128 + 2 * 14 + 6, 136, 3)
    long = sheets.contact_sheet(colours(0), ["word " * 50])
    assert long.shape == (4 + 128 + 3 * 14 + 6, 136, 3)


def test_cyrillic_captions_are_drawn_with_a_font_that_has_the_letters():
    if shutil.which("fc-list") is None or not subprocess.check_output(["fc-list", ":charset=448"]):
        pytest.skip("needs fontconfig and a font with Cyrillic letters")
    one, other = (sheets.contact_sheet(colours(0), [caption]) for caption in ("шш шш", "яя яя"))
    assert one.shape == other.shape and (one != other).any()


def test_large_pictures_are_not_enlarged_and_columns_sets_the_sheet_width():
    sheet = sheets.contact_sheet(colours(0, 50, 100, size=200), [""] * 3, columns=2)
    assert sheet.shape == (4 + 2 * 206, 4 + 2 * 204, 3)
    np.testing.assert_array_equal(sheet[210:410, 4:204], 100)


def test_enlarged_pictures_follow_a_smooth_wave_within_3_percent():
    """A cosine with a period of eight pixels is enlarged 8 times.

    At this wavelength, Lanczos' kernel has an error of 2 %, and repeating pixels one of 38 %.
    """
    wave = lambda x: 127.5 + 100 * np.cos(2 * np.pi * x / 8)
    row = np.rint(wave(np.arange(16) + 0.5)).astype(np.uint8)
    image = np.broadcast_to(row[None, None, :, None], (1, 16, 16, 3))
    sheet = sheets.contact_sheet(image, [""])[4:132, 4:132].astype(float)
    expected = wave((np.arange(128) + 0.5) / 8)[24:-24]  # The border's three pixels are repeated.
    np.testing.assert_allclose(sheet[:, 24:-24], np.broadcast_to(expected[None, :, None], (128, 80, 3)), atol=3)


def test_write_png_stores_exact_pixels_and_leaves_no_temporary_file(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    sheets.write_png(tmp_path / "a.png", image)
    sheets.write_png(tmp_path / "a.png", image[::-1])  # Replaces the first file.
    with Image.open(tmp_path / "a.png") as opened:
        assert (opened.format, opened.mode) == ("PNG", "RGB")
        np.testing.assert_array_equal(np.asarray(opened), image[::-1])
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_wrapping_a_caption_of_5000_words_reads_only_its_beginning():
    """Trying every line length of the whole caption would take minutes."""
    font = sheets._font("word")
    lines = sheets._wrapped("word " * 5_000, font, 96)
    assert lines == sheets._wrapped("word " * 40, font, 96) and len(lines) == 3
    assert sheets._wrapped("word " * 9, font, 60) == ["word word", "word word", "word ..."]
    assert sheets._wrapped("word " * 6, font, 60) == ["word word"] * 3


def test_captions_of_neighbours_keep_a_gap_and_empty_prompts_are_named():
    sheet = sheets.contact_sheet(colours(*[255] * 8), ["w" * 90] * 8)
    columns = (sheet < 128).any((0, 2))  # Columns with letters.
    gaps = [columns[4 + 132 * n - 8 : 4 + 132 * n].any() for n in range(1, 9)]
    assert columns.any() and not any(gaps)
    assert sheets.labels(["a fox", " ", ""]) == ["a fox", "(no prompt)", "(no prompt)"]
