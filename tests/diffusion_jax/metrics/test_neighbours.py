"""Precision, recall, density and coverage: points on a line, and a loop over pairs."""

import numpy as np
import pytest

from diffusion_jax.metrics import neighbours


def both(generated, real):
    real = neighbours.RealFeatures(real)
    return tuple(f(generated, real).value for f in (neighbours.precision, neighbours.recall))


def test_precision_and_recall_of_points_on_a_line_match_counts_by_hand():
    """The third neighbour of real points 0, 1, ... 9 is 2 away, but 3 away at the ends."""
    real = np.arange(10.0)[:, None]
    generated = np.array([4.5, 11.9, 12.1, 100, 100.1, 100.2])[:, None]
    spheres = neighbours.RealFeatures(real)
    score = neighbours.precision(generated, spheres)
    assert score.value == pytest.approx(2 / 6)
    assert score.each is not None and score.each.tolist() == [1, 1, 0, 0, 0, 0]
    # The balls of 4.5 (radius 95.5) and of 11.9 (radius 88.1) contain every real point.
    assert neighbours.recall(generated, spheres).value == 1
    assert both(real + 1000, real) == (0, 0)
    assert both(real, real) == (1, 1)


def test_density_and_coverage_of_points_on_a_line_match_counts_by_hand():
    """The fifth neighbour of real points 0, 1, ... 9 is 3 away in the middle, 5 at the ends."""
    real = neighbours.RealFeatures(np.arange(10.0)[:, None])
    generated = np.array([4.5, 4.6, 4.7, 4.8, 14.0, 100])[:, None]
    # 4.5 lies in the balls of 0 (radius 5), 1 (4), 2 to 7 (3), 8 (4) and 9 (5): all ten.
    density = neighbours.density(generated, real)
    assert density.each is not None
    np.testing.assert_allclose(density.each, [2, 2, 2, 2, 0.2, 0])
    assert density.value == pytest.approx(8.2 / 6)
    assert neighbours.coverage(generated, real).value == 1
    far = neighbours.coverage(np.array([14.0] * 6)[:, None], real)
    assert far.each is not None and far.each.tolist() == [0] * 9 + [1]
    assert neighbours.coverage(np.arange(10.0)[:, None], real).value == 1


def test_all_four_scores_match_a_loop_over_pairs(monkeypatch):
    """Compares in float64, with more images than a block has rows, and sets of different sizes."""
    monkeypatch.setattr(neighbours, "_BLOCK", 7)
    rng = np.random.default_rng(1)
    real, generated = rng.normal(size=(300, 8)) + 5, rng.normal(size=(200, 8)) * 0.8 + 5.3
    away = lambda x, y: np.sqrt(np.square(x[:, None] - y).sum(-1))
    radius = lambda x, k: np.sort(away(x, x))[:, k]  # The nearest is the image itself.
    across = away(generated, real)
    expected = {
        "precision": (across <= radius(real, 3)).any(1),
        "recall": (across <= radius(generated, 3)[:, None]).any(0),
        "density": (across <= radius(real, 5)).sum(1) / 5,
        "coverage": (across <= radius(real, 5)).any(0),
    }
    spheres = neighbours.RealFeatures(real)
    for name, each in expected.items():
        score = getattr(neighbours, name)(generated, spheres)
        assert score.each is not None and 0 < score.value != 1
        np.testing.assert_array_equal(score.each, each)


def test_distances_are_computed_once_for_all_four_scores(monkeypatch):
    calls = []
    inside = neighbours._inside
    monkeypatch.setattr(neighbours, "_inside", lambda *a: calls.append(1) or inside(*a))
    rng = np.random.default_rng(0)
    real, rows = neighbours.RealFeatures(rng.normal(size=(20, 3))), rng.normal(size=(10, 3))
    scores = (neighbours.precision, neighbours.recall, neighbours.density, neighbours.coverage)
    values = [metric(rows, real).value for metric in scores]
    assert len(calls) == 1
    far = rows + 9
    assert [metric(far, real).value for metric in scores] == [0, 0, 0, 0] != values
    assert len(calls) == 2


def test_precision_and_recall_of_too_few_images_are_errors():
    for metric in (neighbours.precision, neighbours.recall):
        with pytest.raises(ValueError, match=r"more than 3 images in each set, but there are 3 real and 9"):
            metric(np.zeros((9, 2)), neighbours.RealFeatures(np.zeros((3, 2))))
