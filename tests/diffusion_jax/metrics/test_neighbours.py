"""Precision and recall: points on a line, and blocks that change nothing."""

import numpy as np
import pytest

from diffusion_jax.metrics import neighbours


def both(generated, real):
    return tuple(f(generated, real).value for f in (neighbours.precision, neighbours.recall))


def test_points_on_a_line():
    """Real points at 0, 1, ... 9: the third neighbour of inner ones is 2 away, of the ends 3."""
    real = np.arange(10.0)[:, None]
    generated = np.array([4.5, 11.9, 12.1, 100, 100.1, 100.2])[:, None]
    score = neighbours.precision(generated, real)
    assert score.value == pytest.approx(2 / 6)
    assert score.each is not None and score.each.tolist() == [1, 1, 0, 0, 0, 0]
    # Among generated ones, 4.5 reaches to 95.5 around it, and 11.9 to 88.1: every real point.
    assert neighbours.recall(generated, real).value == 1
    assert both(real + 1000, real) == (0, 0)
    assert both(real, real) == (1, 1)


def test_density_and_coverage_of_points_on_a_line():
    """Real points at 0, 1, ... 9: the fifth neighbour of 4 and 5 is 3 away, of the ends 5."""
    real = np.arange(10.0)[:, None]
    generated = np.array([4.5, 4.6, 4.7, 4.8, 14.0, 100])[:, None]
    # 4.5 lies in the balls of 0 (5 away at most), 1 (4), 2 to 7 (3), 8 (4) and 9 (5): all ten.
    density = neighbours.density(generated, real)
    assert density.each is not None
    np.testing.assert_allclose(density.each, [2, 2, 2, 2, 0.2, 0])
    assert density.value == pytest.approx(8.2 / 6)
    assert neighbours.coverage(generated, real).value == 1
    far = neighbours.coverage(np.array([14.0] * 6)[:, None], real)
    assert far.each is not None and far.each.tolist() == [0] * 9 + [1]
    assert neighbours.coverage(real, real).value == 1


def test_blocks_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    real, generated = rng.normal(size=(50, 3)), rng.normal(size=(40, 3)) * 0.6 + 0.8
    precision, recall = both(generated, real)
    monkeypatch.setattr(neighbours, "_BLOCK", 7)
    assert both(generated, real) == (precision, recall)
    assert 0 < precision < 1 and 0 < recall < 1


def test_too_few_images_say_so():
    for metric in (neighbours.precision, neighbours.recall):
        with pytest.raises(
            ValueError, match="more than 3 images on both sides, but there are 3 and 9"
        ):
            metric(np.zeros((9, 2)), np.zeros((3, 2)))
