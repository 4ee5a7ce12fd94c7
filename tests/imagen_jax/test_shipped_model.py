"""The shipped model draws what its prompts say."""

import json
import pathlib

import numpy as np
import pytest

import imagen_jax
from diffusion_jax import runs
from diffusion_jax.config import versions
from diffusion_jax.examples.emoji.rendering import BACKGROUNDS
from tests.imagen_jax.commands import ROOT

FOLDER = ROOT / "models" / "emoji32"
# The colours in the middle of its training pictures.
HEARTS = {"red": (244, 67, 54), "yellow": (251, 192, 45)}


@pytest.mark.gate
@pytest.mark.slow
def test_the_shipped_model_draws_hearts_in_the_requested_colours():
    combinations = [(heart, around) for heart in HEARTS for around in BACKGROUNDS]
    prompts = [
        f"a {heart} heart, noto style, on a {around} background" for heart, around in combinations
    ]
    images = imagen_jax.load(FOLDER).draw(prompts).images.astype(float)
    middle = slice(images.shape[1] // 2 - 2, images.shape[1] // 2 + 2)
    assert images.shape[1] == 32
    near = lambda colour, among: min(among, key=lambda n: np.abs(colour - among[n]).sum())
    corners = images[:, [0, 0, -1, -1], [0, -1, 0, -1]].mean(1)
    around = [near(colour, BACKGROUNDS) for colour in corners]
    assert (
        sum(got == background for got, (_, background) in zip(around, combinations, strict=True))
        >= 13
    )
    hearts = [near(image[middle, middle].mean((0, 1)), HEARTS) for image in images]
    assert hearts == [heart for heart, _ in combinations]


def test_the_shipped_config_is_current_and_the_model_opens_without_a_log_line(caplog):
    written = json.loads((FOLDER / "config.json").read_text())
    with caplog.at_level("INFO", logger="absl"):
        current = {"version": versions.VERSION, **runs.load(FOLDER)}
    # To mend it: pack models/emoji32 again (diffusion_jax.pack), and copy the new config.json.
    assert written == current and not caplog.records


def test_the_packed_model_is_small_and_holds_no_absolute_path():
    paths = [FOLDER / "README.md", FOLDER / "config.json", *FOLDER.glob("checkpoints/**/*")]
    files = [path for path in paths if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10e6
    assert {path.suffix for path in files} == {".json", ".md", ".safetensors", ".txt"}
    written = (FOLDER / "config.json").read_text()
    assert str(pathlib.Path.home()) not in written and '"/' not in written
