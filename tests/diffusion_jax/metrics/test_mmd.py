"""KID and CMMD against explicit sums over pairs."""

import numpy as np
import pytest

from diffusion_jax.metrics import mmd


def draw(n, seed, shift=0.0):
    return np.random.default_rng(seed).normal(size=(n, 6)).astype(np.float32) + np.float32(shift)


def pairs(x, y, kernel):
    return np.array([[kernel(a, b) for b in y.astype(float)] for a in x.astype(float)])


@pytest.mark.parametrize("block", [4, 4096])
def test_kid_and_cmmd_match_explicit_sums_over_pairs(monkeypatch, block):
    monkeypatch.setattr(mmd, "_BLOCK", block)
    x, y = draw(9, 0), draw(9, 1, 0.5)
    cubic = lambda a, b: (a @ b / 6 + 1) ** 3
    unbiased = lambda k: (k.sum() - np.trace(k)) / (len(k) * (len(k) - 1))
    xx, yy, xy = pairs(x, x, cubic), pairs(y, y, cubic), pairs(x, y, cubic)
    expected = unbiased(xx) + unbiased(yy) - 2 * xy.mean()
    of_all = mmd.kid(x, y, subsets=1, size=9)
    assert of_all.mean == pytest.approx(expected, rel=1e-6)  # In float32.
    # The influence is the derivative by an image's weight.
    np.testing.assert_allclose(of_all.influence, 2 * (yy.mean(1) - xy.mean(0)), rtol=1e-5)
    bell = lambda a, b: np.exp(-np.square(a - b).sum() / 200)
    biased = pairs(x, x, bell).mean() + pairs(y, y, bell).mean() - 2 * pairs(x, y, bell).mean()
    assert mmd.cmmd(x, y) == pytest.approx(1000 * biased, rel=1e-9)


def test_kid_averages_over_subsets_drawn_from_its_seed():
    """The KID of each subset is computed again in float64."""
    x, y = draw(200, 0), draw(150, 1, 0.3)
    kid = mmd.kid(x, y, subsets=5, size=80, seed=3)
    rng = np.random.default_rng(3)
    values = []
    for _ in range(5):
        a, b = (rows[rng.choice(len(rows), 80, replace=False)].astype(float) for rows in (x, y))
        cubic = lambda a, b: (a @ b.T / 6 + 1) ** 3
        within = sum(cubic(rows, rows).sum() - np.trace(cubic(rows, rows)) for rows in (a, b))
        values.append(within / (80 * 79) - 2 * cubic(a, b).mean())
    assert kid[:2] == pytest.approx((np.mean(values), np.std(values)), rel=1e-5)
    assert kid[:2] == mmd.kid(x, y, subsets=5, size=80, seed=3)[:2]
    assert kid[:2] != mmd.kid(x, y, subsets=5, size=80, seed=4)[:2]
    assert mmd.kid(x[:150], y, subsets=3, size=150).deviation == pytest.approx(0, abs=1e-12)


def test_kid_is_accurate_if_the_mean_is_far_above_the_deviation():
    """Inception's features are positive, so the kernel is nearly constant."""
    x, y = draw(300, 0) * 0.1 + 3, draw(300, 1) * 0.1 + 3.01
    cubic = lambda a, b: (a.astype(float) @ b.T.astype(float) / 6 + 1) ** 3
    within = sum(cubic(r, r).sum() - np.trace(cubic(r, r)) for r in (x, y)) / (300 * 299)
    expected = within - 2 * cubic(x, y).mean()
    assert mmd.kid(x, y, subsets=1, size=300).mean == pytest.approx(expected, rel=1e-3)
    assert abs(expected) < 1e-3 * cubic(x, y).mean()


def test_kid_of_too_few_images_is_an_error():
    with pytest.raises(ValueError, match=r"subsets of 100 images needs at least 100 .* 9"):
        mmd.kid(draw(9, 0), draw(200, 1), size=100)
    with pytest.raises(ValueError, match="KID needs at least 2 images per subset"):
        mmd.kid(draw(1, 0), draw(5, 1), size=1)


@pytest.mark.parametrize("metric", [mmd.score_kid, mmd.score_cmmd])
def test_influences_predict_the_standard_error_of_kid_and_cmmd(metric):
    """Compare the standard error of each set with the deviation over 40 sets."""
    real = draw(150, 0)
    scores = [metric(draw(120, seed, 0.4), real) for seed in range(1, 41)]
    expected = np.std([score.value for score in scores])
    errors = [np.std(score.each) / len(score.each) ** 0.5 for score in scores]
    assert np.mean(errors) == pytest.approx(expected, rel=0.25)
