"""The models that come with the project draw what they are asked for."""

import pathlib

import numpy as np
import pytest

import imagen_jax
from diffusion_jax.examples.emoji.prepare import BACKGROUNDS
from tests.imagen_jax.commands import ROOT

FOLDERS = [ROOT / "models" / "emoji32", ROOT / "models" / "emoji64_sr"]
# The colours in the middle of the pictures that it learned.
HEARTS = {"red": (244, 67, 54), "yellow": (251, 192, 45)}


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.parametrize("stages", (1, 2))
def test_hearts_have_the_colours_asked_for_and_most_backgrounds_too(stages):
    asked = [(heart, around) for heart in HEARTS for around in BACKGROUNDS]
    prompts = [f"a {heart} heart, noto style, on a {around} background" for heart, around in asked]
    images = imagen_jax.load(*FOLDERS[:stages]).draw(prompts).images.astype(float)
    middle = slice(images.shape[1] // 2 - 2, images.shape[1] // 2 + 2)
    assert images.shape[1] == 32 * stages
    near = lambda colour, among: min(among, key=lambda n: np.abs(colour - among[n]).sum())
    corners = images[:, [0, 0, -1, -1], [0, -1, 0, -1]].mean(1)
    around = [near(colour, BACKGROUNDS) for colour in corners]
    assert sum(got == background for got, (_, background) in zip(around, asked, strict=True)) >= 13
    hearts = [near(image[middle, middle].mean((0, 1)), HEARTS) for image in images]
    assert hearts == [heart for heart, _ in asked]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_it_is_small_and_names_no_place(folder):
    kept = [folder / "README.md", folder / "config.json", *folder.glob("checkpoints/**/*")]
    files = [path for path in kept if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10e6
    assert {path.suffix for path in files} == {".json", ".md", ".safetensors", ".txt"}
    written = (folder / "config.json").read_text()
    assert str(pathlib.Path.home()) not in written and '"/' not in written
