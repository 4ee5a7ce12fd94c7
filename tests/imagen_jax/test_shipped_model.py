"""The shipped model draws what its prompts say."""

import json
import pathlib

import numpy as np
import pytest
from PIL import Image

import imagen_jax
from diffusion_jax import runs
from diffusion_jax.config import versions
from diffusion_jax.examples.emoji.rendering import BACKGROUNDS
from tests.imagen_jax.commands import ROOT

FOLDER, ENLARGER = ROOT / "models" / "emoji32", ROOT / "models" / "emoji64_sr"
# The colours in the middle of its training pictures.
HEARTS = {"red": (244, 67, 54), "yellow": (251, 192, 45)}


@pytest.mark.gate
@pytest.mark.slow
def test_the_shipped_model_draws_hearts_in_the_requested_colours():
    combinations = [(heart, around) for heart in HEARTS for around in BACKGROUNDS]
    prompts = [f"a {heart} heart, noto style, on a {around} background" for heart, around in combinations]
    images = imagen_jax.load(FOLDER).draw(prompts).images.astype(float)
    middle = slice(images.shape[1] // 2 - 2, images.shape[1] // 2 + 2)
    assert images.shape[1] == 32
    near = lambda colour, among: min(among, key=lambda n: np.abs(colour - among[n]).sum())
    corners = images[:, [0, 0, -1, -1], [0, -1, 0, -1]].mean(1)
    around = [near(colour, BACKGROUNDS) for colour in corners]
    assert sum(got == background for got, (_, background) in zip(around, combinations, strict=True)) >= 13
    hearts = [near(image[middle, middle].mean((0, 1)), HEARTS) for image in images]
    assert hearts == [heart for heart, _ in combinations]


@pytest.mark.parametrize("folder", [FOLDER, ENLARGER], ids=lambda folder: folder.name)
def test_the_shipped_config_is_current_and_the_model_opens_without_a_log_line(folder, caplog):
    written = json.loads((folder / "config.json").read_text())
    with caplog.at_level("INFO", logger="absl"):
        current = {"version": versions.VERSION, **runs.load(folder)}
    # To mend it: pack the model again (diffusion_jax.pack), and copy the new config.json.
    assert written == current and not caplog.records


@pytest.mark.parametrize(("folder", "size"), [(FOLDER, 10e6), (ENLARGER, 4e6)], ids=["emoji32", "emoji64_sr"])
def test_the_packed_model_is_small_and_holds_no_absolute_path(folder, size):
    paths = [folder / "README.md", folder / "config.json", *folder.glob("checkpoints/**/*")]
    files = [path for path in paths if path.is_file()]
    assert sum(path.stat().st_size for path in files) < size
    assert {path.suffix for path in files} == {".json", ".md", ".safetensors", ".txt"}
    written = (folder / "config.json").read_text()
    assert str(pathlib.Path.home()) not in written and '"/' not in written


@pytest.mark.gate
@pytest.mark.slow
def test_the_shipped_cascade_sharpens_the_small_picture_and_keeps_its_content():
    prompts = [f"a {heart} heart, noto style, on a white background" for heart in HEARTS]
    drawing = imagen_jax.load(FOLDER, ENLARGER).draw(prompts)
    (small,), large = drawing.smaller, drawing.images
    assert small.shape[1:] == (32, 32, 3) and large.shape[1:] == (64, 64, 3)
    means = large.reshape(-1, 32, 2, 32, 2, 3).mean((2, 4))
    assert np.abs(means - small).mean() < 3  # Of 255: it is 0.9. The two hearts differ by 24.
    bicubic = [Image.fromarray(x).resize((64, 64), Image.Resampling.BICUBIC) for x in small]
    enlarged = np.stack([np.asarray(image) for image in bicubic])
    steepest = lambda images: np.abs(np.diff(images.astype(float), axis=2)).max((1, 2, 3))
    assert (steepest(large) > 1.2 * steepest(enlarged)).all()  # The ratios are 1.36 and 1.48.
