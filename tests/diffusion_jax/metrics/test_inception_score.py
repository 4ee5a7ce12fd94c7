"""The Inception Score: closed forms, a loop in numpy, and its standard error."""

import numpy as np
import pytest

from diffusion_jax.metrics import inception_score


def draw(n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, 7)).astype(np.float32)


def test_equal_images_score_1_and_perfect_classes_score_their_number():
    assert inception_score.score(np.ones((9, 7))).value == pytest.approx(1, abs=1e-12)
    assert inception_score.score(np.tile(800 * np.eye(7), (3, 1))).value == pytest.approx(7)


def test_the_inception_score_matches_a_loop_over_parts(monkeypatch):
    """The parts are consecutive images, and the last part is smaller."""
    monkeypatch.setattr(inception_score, "_PART", 8)
    x = draw(20)
    expected = []
    for part in (x[:8], x[8:16], x[16:]):
        p = np.exp(part.astype(float)) / np.exp(part.astype(float)).sum(1, keepdims=True)
        mean = p.mean(0)
        divergences = [sum(q * np.log(q / m) for q, m in zip(row, mean, strict=True)) for row in p]
        expected.append(np.exp(np.mean(divergences)))
    score = inception_score.score(x)
    assert score.value == pytest.approx(np.mean(expected), rel=1e-12)
    assert score.each is not None and len(score.each) == 20


def test_influences_predict_the_standard_error_of_the_inception_score():
    scores = [inception_score.score(3 * draw(200, seed)) for seed in range(60)]
    expected = np.std([score.value for score in scores])
    errors = [np.std(score.each) / 200**0.5 for score in scores]
    assert np.mean(errors) == pytest.approx(expected, rel=0.25)
