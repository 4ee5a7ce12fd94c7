"""Start describes the training pictures, and writes small copies to train on."""

import io
import pathlib

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config.settings import Data
from diffusion_jax.start import training_pictures


@pytest.fixture
def tall(tmp_path):
    """Return three pictures that are twice as tall as wide."""
    folder = tmp_path / "set"
    folder.mkdir()
    for name in "abc":
        Image.new("RGB", (100, 200), "red").save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"picture {name}")
    return training_pictures.read(Data("folder", str(folder)))


def test_tall_pictures_are_detected_and_can_be_padded(tall, tmp_path):
    assert tall.report["aspect"]["p95"] == 2 and tall.side == 100
    padded = training_pictures.shrink(tall, 64, tmp_path / "small", pad=True)
    assert (padded.data.source, padded.data.text) == ("webdataset", "txt")
    assert padded.report["aspect"]["p95"] == 1 and padded.side == 64
    assert padded.records.texts(range(3)) == ["picture a", "picture b", "picture c"]
    first = np.asarray(Image.open(io.BytesIO(padded.records.read([0])[0].image)))
    assert (first[:, 16:48] == [255, 0, 0]).all() and (first[:, :16] == 255).all()


def test_the_description_lists_files_that_are_ignored(tall):
    root = pathlib.Path(tall.data.path)
    (root / "d.png").touch()
    (root / "e.svg").touch()
    rows = training_pictures.described(training_pictures.read(tall.data._replace(uncaptioned="drop")))
    assert [row for row in rows if row[0] in ("files", "left out")] == [
        ("files", "3 pictures, 3 texts"),
        ("left out", "1 format: e.svg"),
        ("left out", "1 no_caption: d.png"),
    ]
