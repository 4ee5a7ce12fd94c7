"""Streams of features: the same moments however they come, and what is not finite left out."""

import numpy as np
import pytest

from diffusion_jax.metrics import features


def draw(n=2500, d=5):
    return (100 + np.random.default_rng(0).normal(size=(n, d))).astype(np.float32)


def stream_of(rows, batch, keep):
    stream = features.Stream(rows.shape[1], keep=keep)
    for start in range(0, len(rows), batch):
        stream.add(rows[start : start + batch])
    return stream


@pytest.mark.parametrize("keep", [True, False])
def test_the_batch_changes_no_digit(keep):
    rows = draw()
    found = [stream_of(rows, batch, keep).gaussian() for batch in (7, 64, 2500)]
    for one in found[1:]:
        np.testing.assert_array_equal(one.mean, found[0].mean)
        np.testing.assert_array_equal(one.cov, found[0].cov)
    # One pass in float32 would lose four digits here: the mean is a hundred times the spread.
    np.testing.assert_allclose(found[0].cov, np.cov(rows.T.astype(np.float64)), atol=1e-12)
    np.testing.assert_allclose(found[0].mean, rows.mean(0, dtype=np.float64), rtol=1e-14)
    assert found[0].n == 2500


def test_rows_that_are_not_finite_are_left_out_and_counted():
    rows = draw(40)
    rows[3, 1], rows[17, 4] = np.nan, np.inf
    stream = stream_of(rows, 9, keep=True)
    assert (stream.n, stream.not_finite) == (38, 2)
    np.testing.assert_array_equal(stream.features(), np.delete(rows, [3, 17], 0))
    expected = features.gaussian(np.delete(rows, [3, 17], 0))
    np.testing.assert_array_equal(stream.gaussian().cov, expected.cov)


def test_a_stream_may_be_asked_again_after_more_rows():
    rows = draw(1500)
    stream = features.Stream(5, keep=False)
    stream.add(rows[:700])
    assert stream.gaussian().n == 700
    stream.add(rows[700:])
    np.testing.assert_allclose(stream.gaussian().cov, np.cov(rows.T.astype(float)), atol=1e-12)


def test_what_cannot_be_says_so():
    stream = features.Stream(3, keep=False)
    with pytest.raises(ValueError, match=r"features have shape \(2, 4\), not \[N, 3\]"):
        stream.add(np.zeros((2, 4), np.float32))
    stream.add(np.array([[0, 0, 0], [0, np.nan, 0]], np.float32))
    message = "a covariance needs at least 2 images, but there are 1, and 1 were not finite"
    with pytest.raises(ValueError, match=message):
        stream.gaussian()
    with pytest.raises(ValueError, match="keep=False"):
        stream.features()
