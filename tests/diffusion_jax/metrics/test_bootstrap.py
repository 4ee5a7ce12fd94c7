"""Intervals: the mean's is known, and a biased score's lies about the score."""

import numpy as np
import pytest

from diffusion_jax.metrics import bootstrap


def test_the_interval_of_a_mean_is_1_96_standard_errors_each_way():
    x = np.random.default_rng(0).normal(size=(400, 1))
    found = bootstrap.interval(lambda rows: float(rows.mean()), x, replicates=2000)
    half = 1.96 * x.std() / 20
    np.testing.assert_allclose(found, [x.mean() - half, x.mean() + half], atol=0.1 * half)
    again = bootstrap.interval(lambda rows: float(rows.mean()), x, replicates=2000)
    assert again == found


def test_the_bias_of_drawing_again_is_taken_out():
    """The number of different rows is n in the set, and 0.63 n in all that are drawn from it."""
    x = np.arange(1000.0)[:, None]
    low, high = bootstrap.interval(lambda rows: float(len(np.unique(rows))), x, replicates=200)
    assert 950 < low < 1000 < high < 1050


@pytest.mark.parametrize("change", [{"replicates": 1}, {"confidence": 95.0}])
def test_what_cannot_be_says_so(change):
    with pytest.raises(ValueError, match="2 replicates or more and a confidence between 0 and 1"):
        bootstrap.interval(lambda rows: 0.0, np.zeros((3, 1)), **change)
