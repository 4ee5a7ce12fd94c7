"""Streams of features. Moments do not depend on batches, and skip rows that are not finite."""

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
def test_moments_are_bit_for_bit_equal_for_every_batch_size(keep):
    rows = draw()
    gaussians = [stream_of(rows, batch, keep).gaussian() for batch in (7, 64, 2500)]
    for one in gaussians[1:]:
        np.testing.assert_array_equal(one.mean, gaussians[0].mean)
        np.testing.assert_array_equal(one.cov, gaussians[0].cov)
    # One pass in float32 would lose four digits: the mean is a hundred times the deviation.
    np.testing.assert_allclose(gaussians[0].cov, np.cov(rows.T.astype(np.float64)), atol=1e-12)
    np.testing.assert_allclose(gaussians[0].mean, rows.mean(0, dtype=np.float64), rtol=1e-14)
    assert gaussians[0].n == 2500


def test_rows_that_are_not_finite_are_left_out_and_counted():
    rows = draw(40)
    rows[3, 1], rows[17, 4] = np.nan, np.inf
    stream = stream_of(rows, 9, keep=True)
    assert (stream.n, stream.not_finite) == (38, 2)
    np.testing.assert_array_equal(stream.features(), np.delete(rows, [3, 17], 0))
    expected = features.gaussian(np.delete(rows, [3, 17], 0))
    np.testing.assert_array_equal(stream.gaussian().cov, expected.cov)


def test_moments_can_be_read_before_and_after_adding_rows():
    rows = draw(1500)
    stream = features.Stream(5, keep=False)
    stream.add(rows[:700])
    assert stream.gaussian().n == 700
    stream.add(rows[700:])
    np.testing.assert_allclose(stream.gaussian().cov, np.cov(rows.T.astype(float)), atol=1e-12)


def test_wrong_shapes_too_few_rows_and_dropped_features_are_errors():
    stream = features.Stream(3, keep=False)
    with pytest.raises(ValueError, match=r"features have shape \(2, 4\), not \[N, 3\]"):
        stream.add(np.zeros((2, 4), np.float32))
    stream.add(np.array([[0, 0, 0], [0, np.nan, 0]], np.float32))
    message = "a covariance needs at least 2 images, but there are 1, and 1 were not finite"
    with pytest.raises(ValueError, match=message):
        stream.gaussian()
    with pytest.raises(ValueError, match="keep=False"):
        stream.features()
