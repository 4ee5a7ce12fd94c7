"""Detecting copies of training pictures, with pixels as features."""

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.data import pictures
from diffusion_jax.evaluate import copies, scorers
from diffusion_jax.metrics import features, neighbours, stats_files

RNG = np.random.default_rng(0)
TRAINING, UNSEEN = (RNG.integers(0, 256, (n, 4, 4, 3), np.uint8) for n in (150, 400))
PROMPTS = [f"prompt {i}" for i in range(40)]
pixels = lambda images: np.reshape(images, (len(images), -1)).astype(np.float64)


def scorer_of(kept=True, real=UNSEEN):
    """Return a scorer whose judge uses pixels, with or without stored features of real pictures."""
    rows = pixels(real)
    real = stats_files.Stats(features.gaussian(rows), rows if kept else None, None)
    judge = scorers.Reference({}, ("pixels",), lambda images, _: (pixels(images),), real)
    return scorers.Scorer(PROMPTS, {"toy": judge})


class Plain(pictures.Pictures):
    def __init__(self, images=TRAINING):
        self.images = images

    def __len__(self):
        return len(self.images)

    def read(self, rows):
        return self.images[rows], [f"training {i}" for i in rows]


def open_training(real=UNSEEN):
    return copies.Training(Plain(), scorer_of(real=real))


@pytest.mark.parametrize("n", [7, 5000])
def test_nearest_matches_a_search_over_all_distances(n, monkeypatch):
    monkeypatch.setattr(neighbours, "_BLOCK", 1024)
    rows, among = RNG.normal(size=(300, 5)) + 100, RNG.normal(size=(n, 5)) + 100
    distances, indices = neighbours.nearest(rows, among)
    all_of_them = np.linalg.norm(rows[:, None] - among, axis=2)
    np.testing.assert_array_equal(indices, all_of_them.argmin(1))
    np.testing.assert_allclose(distances, all_of_them.min(1), rtol=1e-3)


def test_copies_of_training_pictures_are_close_and_random_pictures_as_seldom_as_unseen_ones(tmp_path):
    opened = open_training()
    chosen = RNG.permutation(150)[:40]
    noisy = TRAINING[chosen].astype(int) + RNG.integers(-9, 10, (40, 4, 4, 3))
    drawn = np.clip(noisy, 0, 255).astype(np.uint8)
    requested = []

    def draw(indices):
        requested.extend(indices)
        return drawn[indices]

    (row,) = copies.write(tmp_path, "guidance_1.png", opened, {"pixels": pixels(drawn)}, draw)
    nearest = opened.nearest("pixels", pixels(drawn))
    np.testing.assert_array_equal(nearest.indices, chosen)
    assert (row["close"], row["close_low"], row["drawn"], row["training"]) == (1, 1, 40, 150)
    assert row["median_distance"] < 50 < 400 < row["median_distance_of_unseen"]
    np.testing.assert_array_equal(requested, np.argsort(nearest.distances)[:16])
    assert (tmp_path / "copies_pixels_guidance_1.png").is_file()

    others = pixels(RNG.integers(0, 256, (2000, 4, 4, 3)))
    row = opened.describe("pixels", opened.nearest("pixels", others))
    assert row["close_low"] < copies.CLOSE < row["close_high"] + 0.02
    # The standard deviation with 2,000 and 400 pictures is 0.012.
    assert abs(row["close"] - copies.CLOSE) < 0.02


@pytest.mark.parametrize(("count", "pairs"), [(5, 5), (8, 8), (12, 8), (16, 16)])
@pytest.mark.usefixtures("unchecked")
def test_each_drawn_picture_is_above_its_nearest_training_picture(count, pairs, monkeypatch):
    monkeypatch.setattr(copies.sheets, "contact_sheet", lambda *a, **options: (*a, options))
    drawn = TRAINING[:count]
    nearest = copies.Nearest(np.zeros(count), np.arange(count))
    redraw, prompts = lambda rows: drawn[np.asarray(rows)], [f"fox {i}" for i in range(count)]
    images, labels, options = open_training().sheet(nearest, redraw, prompts)
    assert labels[:2] == ["fox 0 (distance 0)", "fox 1 (distance 0)"]
    rows = images.reshape(-1, options["columns"], *images.shape[1:])
    assert len(images) == 2 * pairs
    np.testing.assert_array_equal(rows[::2], rows[1::2])


@pytest.mark.parametrize("real", [UNSEEN, TRAINING])
def test_a_judge_whose_real_pictures_are_training_pictures_is_warned_about(real, tmp_path, caplog):
    drawn = RNG.integers(0, 256, (40, 4, 4, 3)).astype(np.uint8)
    opened = open_training(real)
    with caplog.at_level("WARNING"):
        copies.write(tmp_path, "one.png", opened, {"pixels": pixels(drawn)}, lambda i: drawn[i])
    assert ("this share says nothing" in caplog.text) == (real is TRAINING)


def test_the_flag_unseen_replaces_the_pictures_of_the_judge():
    """The judge's own pictures are the training pictures, whose distance would be 0."""
    named = copies.Training(Plain(), scorer_of(kept=False, real=TRAINING), Plain(UNSEEN))
    expected = open_training()
    np.testing.assert_array_equal(named.unseen_features["pixels"], pixels(UNSEEN))
    np.testing.assert_array_equal(named.unseen["pixels"].distances, expected.unseen["pixels"].distances)


def test_missing_or_invalid_flags_of_the_search_for_copies_are_errors(tmp_path):
    Image.fromarray(TRAINING[0]).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a picture")
    data = f"folder:{tmp_path}"
    scorer = scorer_of(kept=False)
    assert copies.open_training("", "", scorer, 4) is None
    opened = copies.open_training(data, data, scorer, 4)
    np.testing.assert_array_equal(opened.unseen["pixels"].distances, [0])
    for copied, unseen, judges, message in (
        ("", "folder:/y", scorer, "--unseen=folder:/y is used by --copies only"),
        ("folder:/x", "", scorer, "--copies=folder:/x also needs real pictures"),
        ("folder:/x", data, scorers.Scorer(PROMPTS, {}), "--copies=folder:/x needs features of pictures"),
        (data, "foldr:/x", scorer, "--unseen=foldr:/x: data source"),
        ("foldr:/x", "", scorer_of(), "--copies=foldr:/x: data source"),
        ("folder:/nowhere", "", scorer_of(), "/nowhere"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            copies.open_training(copied, unseen, judges, 4)
