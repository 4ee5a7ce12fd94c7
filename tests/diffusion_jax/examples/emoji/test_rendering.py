"""The emoji data set: prompts, compositions never shown in training, and pixels."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config.settings import Data
from diffusion_jax.data import sources, split
from diffusion_jax.examples.emoji import rendering as emoji
from diffusion_jax.text import hashed

SOURCE = "diffusion_jax.examples.emoji"
SHOWN = {emoji.caption(c, s): (c, s) for c in emoji.compositions() for s in ("noto", "fluent")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set of two styles. The red of a glyph is its place on the sheet, modulo 256."""
    out = tmp_path_factory.mktemp("emoji")
    places = np.arange(512).reshape(-1, emoji.COLUMNS).repeat(64, 0).repeat(64, 1)
    for style, green in (("noto", 0), ("fluent", 90)):
        layers = [places % 256, np.full_like(places, green), places // 256, np.full_like(places, 255)]
        sheet = Image.fromarray(np.stack(layers, -1).astype(np.uint8))
        sheet.save(emoji.sheet_of(out, style), lossless=True)
    card = {"styles": {"noto": {}, "fluent": {}}, "subjects": emoji.version()}
    (out / emoji.CARD).write_text(json.dumps(card))
    return out


def opened(folder, split="", size=16):
    return sources.open_pictures(Data(SOURCE, f"{folder}{split}"), size)


def test_a_prompt_names_subject_skin_tone_style_and_background():
    by_code = {(c.code, c.background): c for c in emoji.compositions()}
    assert emoji.caption(by_code["1F98A", "blue"], "noto") == "a fox, noto style, on a blue background"
    dark = by_code["1F469-1F3FF-200D-1F692", "pink"]
    expected = "a firefighter with dark skin, openmoji style, on a pink background"
    assert emoji.caption(dark, "openmoji") == expected
    # The skin tone replaces the variation selector.
    assert emoji.code_of("🕵️", "light") == "1F575-1F3FB"
    assert emoji.code_of("❤️") == "2764-FE0F"


def test_phrasings_vary_the_order_and_omit_article_style_or_background():
    (dark,) = (c for c in emoji.compositions() if c.key == "1F469-1F3FF-200D-1F692_pink")
    assert emoji.phrasings(dark, "noto") == (
        "a firefighter with dark skin, noto style, on a pink background",
        "a firefighter with dark skin on a pink background, noto style",
        "a firefighter with dark skin on a pink background",
        "pink background, firefighter with dark skin",
        "firefighter with dark skin, noto, pink",
        "a firefighter with dark skin, noto style",
        "firefighter with dark skin",
    )
    octopus = next(c for c in emoji.compositions() if c.subject == "an octopus")
    assert emoji.phrasings(octopus, "noto")[-1] == "octopus"


def test_every_subject_is_trained_on_some_background():
    shown = emoji.compositions()
    captions = {emoji.caption(c, "noto") for c in shown}
    assert len(captions) == len(shown) == 4080
    never = [c for c in shown if emoji.held_out(c)]
    assert len(never) == 369  # Chosen by a hash: about a tenth.
    assert "1F34E_blue" in {c.key for c in never}
    assert {c.code for c in shown} == {c.code for c in shown if not emoji.held_out(c)}
    assert not any(hashed.cut_off(sorted(captions), 16))


def test_each_picture_shows_the_glyph_and_background_of_its_caption(folder):
    pictures = opened(folder)
    rows = np.arange(0, len(pictures), 97)
    images, texts = pictures.read(rows)
    assert images.shape == (len(rows), 16, 16, 3)
    for image, text in zip(images, texts, strict=True):
        shown, style = SHOWN[text.texts[0]]
        assert text.texts == emoji.phrasings(shown, style)
        place = emoji.codes().index(shown.code)
        green = 90 if style == "fluent" else 0
        assert image[8, 8].tolist() == [place % 256, green, place // 256]
        corners = image[[0, 0, -1, -1], [0, -1, 0, -1]].astype(int)
        apart = np.abs(corners - emoji.BACKGROUNDS[shown.background]).max(1)
        assert apart.min() < 4  # The filter spreads the opaque square by a pixel, at 1 % of ink.


def test_the_parts_hold_all_compositions_and_share_none(folder):
    parts = [opened(folder, part) for part in ("", "@train", "@never_shown")]
    texts = [[text.texts[0] for text in part.texts(np.arange(len(part)))] for part in parts]
    assert [len(part) for part in texts] == [24308, 24308, 2412]  # 4,080 per style, two or four each.
    assert texts[0] == texts[1] and len({*texts[0]}) == 2 * 3711
    assert len({*texts[2]}) == 2 * 369 and not {*texts[1]} & {*texts[2]}


def test_a_picture_does_not_depend_on_the_pictures_read_with_it(folder):
    pictures, rows = opened(folder), np.array([5, 40, 41, 9000])
    whole = pictures.read(rows)[0]
    for row, image in zip(rows, whole, strict=True):
        np.testing.assert_array_equal(opened(folder).read(np.array([row]))[0][0], image)
    assert len(set(pictures.keys(np.arange(500)).tolist())) == 500


def test_all_pictures_of_a_subject_are_held_out_together(folder):
    training, apart = split.split(opened(folder), 0.1)
    names = [{c.subject for t in p.texts(np.arange(len(p))) for c, _ in [SHOWN[t.texts[0]]]} for p in (training, apart)]
    assert not names[0] & names[1] and len(names[0] | names[1]) == 325
    assert 15 < len(names[1]) < 50  # A tenth of 325, give or take three standard deviations.


def test_draw_blends_a_picture_with_its_background():
    red = Image.new("RGBA", (8, 8), (200, 0, 0, 128))
    drawn = emoji.draw(red, "white", 32)
    # Alpha is 128 / 255. Premultiplied bytes cause an error of one level.
    np.testing.assert_allclose(drawn[16, 16], [227, 127, 127], atol=1)
    sharp = emoji.draw(Image.new("RGBA", (64, 64), (200, 0, 0, 255)), "white", 64)
    assert sharp[32].tolist()[:3] == [[255, 255, 255]] * 3  # The margin is a sixteenth of the side.
    assert sharp[32].tolist()[6:58] == [[200, 0, 0]] * 52


@pytest.mark.parametrize("shift", [(1.0, 0.0), (-1.0, 1.0), (0.3, -0.7)])
@pytest.mark.parametrize("size", [32, 64])
def test_a_shift_moves_the_picture_by_twentieths_of_the_side(shift, size):
    glyph = np.zeros((64, 64, 4), np.uint8)
    glyph[16:40, 10:50] = 0, 0, 0, 255  # Black ink, far from the edges.
    ink = [255 - emoji.draw(Image.fromarray(glyph), "white", size, at)[..., 0].astype(float) for at in ((0, 0), shift)]
    centre = lambda axis: [(x.sum(axis) @ np.arange(size)) / x.sum() for x in ink]
    moved = [after - before for before, after in (centre(0), centre(1))]
    np.testing.assert_allclose(moved, np.array(shift) * size / 20, atol=0.05)  # Clipped ringing.
    np.testing.assert_allclose(ink[1].sum(), ink[0].sum(), rtol=3e-3)


@pytest.mark.parametrize(
    ("change", "split", "message"),
    [
        (lambda out: (out / "card.json").unlink(), "", "holds no emoji"),
        (lambda out: (out / "card.json").write_text('{"styles": {}}'), "", "another version"),
        (lambda out: (out / "noto.webp").write_bytes(b"RIFF"), "", "noto.webp"),
        (lambda out: None, "@test", "the part after @"),
    ],
)
def test_a_folder_that_holds_no_data_set_is_an_error(change, split, message, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    change(copy)
    with pytest.raises((ValueError, OSError), match=message):
        opened(copy, split)
