"""The coloured digits: their prompts, the held-out ones, and their pixels."""

import sys

import numpy as np
import pytest

from diffusion_jax.data.sources.folder import open_folder
from diffusion_jax.data.sources.webdataset import open_tars
from diffusion_jax.examples.digits import rendering as digits


def test_every_17th_of_290_prompts_is_held_out():
    held_out = digits.heldout_prompts()
    # Pairs: red x 5 papers, green x 5, blue x 5, yellow x 5, white x 4, purple x 5: 29 per digit.
    assert held_out[:3] == [
        "a red zero on black paper",
        "a yellow zero on gray paper",  # Pair 17.
        "a green one on black paper",  # Pair 34 - 29 = 5.
    ]
    assert (len(held_out), len(digits.seen_prompts())) == (18, 272)
    assert not set(held_out) & set(digits.seen_prompts())


def test_every_word_of_a_held_out_prompt_occurs_in_a_seen_prompt():
    words = {word for text in digits.seen_prompts() for word in text.split()}
    assert {word for text in digits.heldout_prompts() for word in text.split()} <= words


def test_parse_inverts_caption_and_rejects_other_texts():
    prompt = digits.Prompt(7, "red", "gray")
    assert digits.caption(prompt) == "a red seven on gray paper"
    assert digits.parse("a red seven on gray paper") == prompt
    with pytest.raises(ValueError, match="'a white one on white paper' is not a caption"):
        digits.parse("a white one on white paper")


def test_training_pictures_show_exactly_the_seen_prompts():
    pictures = digits.Digits(8)
    images, captions = pictures.read(np.arange(len(pictures)))
    assert images.shape == (len(pictures), 8, 8, 3)
    assert set(captions) == set(digits.seen_prompts())
    glyphs_of = np.bincount(digits.load("train").digits)
    seen_with = [sum(f" {word} " in text for text in digits.seen_prompts()) for word in digits.DIGITS]
    # Each glyph occurs once in each pair of colours.
    assert len(pictures) == np.dot(glyphs_of, seen_with)


def test_the_split_is_70_to_30_within_each_digit():
    train, test = digits.load("train"), digits.load("test")
    assert len(train.digits) + len(test.digits) == 1797
    counts = np.bincount(train.digits), np.bincount(test.digits)
    np.testing.assert_allclose(counts[0] / sum(counts), 0.7, atol=0.5 / min(sum(counts)))
    assert not {g.tobytes() for g in train.images} & {g.tobytes() for g in test.images}


def test_a_picture_depends_only_on_its_index():
    pictures = digits.Digits(16)
    images, captions = pictures.read(np.array([3, 5000, 34000]))
    image, caption = pictures.read(np.array([5000]))
    np.testing.assert_array_equal(image[0], images[1])
    assert caption == [captions[1]]


def test_render_interpolates_between_paper_and_ink():
    glyph = np.zeros((8, 8), np.float32)
    glyph[:, 4:] = 1
    image = digits.render(glyph, "yellow", "black", 8)  # Without enlargement.
    np.testing.assert_array_equal(image[:, :4], np.full((8, 4, 3), 15))
    np.testing.assert_array_equal(image[:, 4:], np.broadcast_to((240, 200, 40), (8, 4, 3)))
    middle = digits.render(glyph / 2, "yellow", "black", 8)[0, 7]
    np.testing.assert_array_equal(middle, (128, 108, 28))  # (15 + 240) / 2 etc., rounded up.


def test_enlargement_is_bicubic_and_clipped():
    glyph = np.tile(np.array([0, 0, 0, 1, 1, 0, 0, 0], np.float32), (8, 1))
    mix = digits.enlarge(glyph[None], 16)[0]

    def keys(x):  # Keys 1981 with a = -1/2, the kernel that Pillow calls bicubic.
        x = abs(x)
        return 1.5 * x**3 - 2.5 * x**2 + 1 if x < 1 else -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2

    # Pixel 7 is at 7.5 / 2 - 0.5 = 3.25 in the glyph, with neighbours 2, 3, 4 and 5.
    expected = sum(keys(3.25 - i) * glyph[0, i] for i in range(2, 6))
    np.testing.assert_allclose(mix[8, 7], np.clip(expected, 0, 1), atol=1e-6)
    expected = sum(keys(2.75 - i) * glyph[0, i] for i in range(1, 5))
    np.testing.assert_allclose(mix[8, 6], expected, atol=1e-6)
    assert mix.min() == 0  # Bicubic overshoots beside an edge.


def test_a_size_of_digits_that_is_not_a_multiple_of_8_is_an_error():
    with pytest.raises(ValueError, match="the size of digits is 20: it must be a multiple of 8"):
        digits.Digits(20)


def test_the_digits_command_writes_a_folder_that_can_be_read(tmp_path, capsys):
    digits.main([f"--out={tmp_path / 'examples'}", "--num=12", "--size=16"])
    assert "wrote 12 pictures" in capsys.readouterr().out
    records = open_folder(tmp_path / "examples")
    assert len(records) == 12
    assert digits.parse(records.read([11])[0].text)


def test_the_digits_command_writes_a_tar_that_can_be_read(tmp_path):
    digits.main([f"--out={tmp_path}", "--num=5", "--size=16", "--format=webdataset"])
    records = open_tars(tmp_path / "00000.tar")
    assert [record.text for record in records.read(range(5))] == digits.Digits(16).read(np.arange(5) * 617)[1]


def test_a_missing_scikit_learn_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"the digits come with scikit-learn .*: pip install"):
        digits.load.__wrapped__("train")
