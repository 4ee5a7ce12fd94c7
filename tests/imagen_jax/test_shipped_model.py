"""The models that come with the project draw what they are asked for."""

import pathlib

import numpy as np
import pytest

import imagen_jax
from tests.imagen_jax.commands import ROOT

FOLDERS = [ROOT / "models" / "emoji32", ROOT / "models" / "emoji64_sr"]
# Of the pictures that it learned: what lies around, and what in the middle.
COLOURS = {"white": (255, 255, 255), "blue": (140, 190, 240), "purple": (187, 154, 217)}
HEARTS = {"red": (244, 67, 54), "yellow": (251, 192, 45)}


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.parametrize("stages", (1, 2))
def test_hearts_have_the_colours_asked_for_on_the_backgrounds_asked_for(stages):
    asked = [(heart, around) for heart in HEARTS for around in COLOURS]
    prompts = [f"a {heart} heart, noto style, on a {around} background" for heart, around in asked]
    images = imagen_jax.load(*FOLDERS[:stages]).draw(prompts).images.astype(float)
    middle = slice(images.shape[1] // 2 - 2, images.shape[1] // 2 + 2)
    assert images.shape[1] == 32 * stages
    for image, (heart, around) in zip(images, asked, strict=True):
        corners = image[[0, 0, -1, -1], [0, -1, 0, -1]].mean(0)
        near = lambda colour, among: min(among, key=lambda n: np.abs(colour - among[n]).sum())
        assert near(corners, COLOURS) == around
        assert near(image[middle, middle].mean((0, 1)), HEARTS) == heart


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_it_is_small_and_names_no_place(folder):
    kept = [folder / "README.md", folder / "config.json", *folder.glob("checkpoints/**/*")]
    files = [path for path in kept if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10e6
    assert {path.suffix for path in files} == {".json", ".md", ".safetensors", ".txt"}
    written = (folder / "config.json").read_text()
    assert str(pathlib.Path.home()) not in written and '"/' not in written
