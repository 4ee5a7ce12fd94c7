"""Precision and recall: points on a line, and blocks that change nothing."""

import numpy as np
import pytest

from diffusion_jax.metrics import neighbours


def test_points_on_a_line():
    """Real points at 0, 1, ... 9: the third neighbour of inner ones is 2 away, of the ends 3."""
    real = np.arange(10.0)[:, None]
    generated = np.array([4.5, 11.9, 12.1, 100, 100.1, 100.2])[:, None]
    precision, recall = neighbours.precision_recall(real, generated)
    assert precision == pytest.approx(2 / 6)
    # Among generated ones, 4.5 reaches to 95.5 around it, and 11.9 to 88.1: every real point.
    assert recall == 1
    far = neighbours.precision_recall(real, real + 1000)
    assert far == (0, 0)
    assert neighbours.precision_recall(real, real) == (1, 1)


def test_blocks_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    real, generated = rng.normal(size=(50, 3)), rng.normal(size=(40, 3)) * 0.6 + 0.8
    whole = neighbours.precision_recall(real, generated)
    monkeypatch.setattr(neighbours, "_BLOCK", 7)
    assert neighbours.precision_recall(real, generated) == whole
    assert 0 < whole.precision < 1 and 0 < whole.recall < 1


def test_too_few_images_say_so():
    with pytest.raises(ValueError, match="need more than 3 images on both sides: there are 3 and"):
        neighbours.precision_recall(np.zeros((3, 2)), np.zeros((9, 2)))
