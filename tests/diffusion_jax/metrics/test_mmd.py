"""KID and CMMD against sums over pairs written out, and what they are where nothing differs."""

import numpy as np
import pytest

from diffusion_jax.metrics import mmd


def draw(n, seed, shift=0.0):
    return np.random.default_rng(seed).normal(size=(n, 6)).astype(np.float32) + np.float32(shift)


def pairs(x, y, kernel):
    return np.array([[kernel(a, b) for b in y.astype(float)] for a in x.astype(float)])


@pytest.mark.parametrize("block", [4, 4096])
def test_sums_over_pairs(monkeypatch, block):
    monkeypatch.setattr(mmd, "_BLOCK", block)
    x, y = draw(9, 0), draw(7, 1, 0.5)
    cubic = lambda a, b: (a @ b / 6 + 1) ** 3
    unbiased = lambda k: (k.sum() - np.trace(k)) / (len(k) * (len(k) - 1))
    xx, yy, xy = pairs(x, x, cubic), pairs(y, y, cubic), pairs(x, y, cubic)
    expected = unbiased(xx) + unbiased(yy) - 2 * xy.mean()
    assert mmd.kid_of_all(x, y) == pytest.approx(expected, rel=1e-12)
    bell = lambda a, b: np.exp(-np.square(a - b).sum() / 200)
    biased = pairs(x, x, bell).mean() + pairs(y, y, bell).mean() - 2 * pairs(x, y, bell).mean()
    assert mmd.cmmd(x, y) == pytest.approx(1000 * biased, rel=1e-9)


def test_kid_of_one_distribution_is_about_0_either_way():
    values = [mmd.kid_of_all(draw(60, 2 * i), draw(60, 2 * i + 1)) for i in range(40)]
    assert min(values) < 0 < max(values)
    assert abs(np.mean(values)) < 3 * np.std(values) / 40**0.5


def test_kids_subsets_are_drawn_by_the_seed():
    x, y = draw(200, 0), draw(150, 1, 0.3)
    mean, deviation = mmd.kid(x, y, subsets=50, size=80, seed=3)
    assert (mean, deviation) == mmd.kid(x, y, subsets=50, size=80, seed=3)
    assert mean == pytest.approx(mmd.kid_of_all(x, y), abs=4 * deviation / 50**0.5)
    assert 0 < deviation < mean
    whole = mmd.kid(x[:150], y, subsets=3, size=150)
    assert whole == (pytest.approx(mmd.kid_of_all(x[:150], y)), pytest.approx(0, abs=1e-12))


def test_too_few_images_say_so():
    with pytest.raises(ValueError, match=r"subsets of 100 images needs as many on both .* 9"):
        mmd.kid(draw(9, 0), draw(200, 1), size=100)
    with pytest.raises(ValueError, match="KID needs at least 2 images on both sides"):
        mmd.kid_of_all(draw(1, 0), draw(5, 1))


@pytest.mark.parametrize("metric", [mmd.score_kid, mmd.score_cmmd])
def test_the_spread_of_the_images_parts_is_that_of_the_score(metric):
    """Over sets of generated images: a standard error of each set, against their own deviation."""
    real = draw(150, 0)
    scores = [metric(draw(120, seed, 0.4), real) for seed in range(1, 41)]
    expected = np.std([score.value for score in scores])
    errors = [np.std(score.each) / len(score.each) ** 0.5 for score in scores]
    assert np.mean(errors) == pytest.approx(expected, rel=0.25)
