"""Intervals: the mean's is known, and lies about whatever score it is a part of."""

import numpy as np
import pytest

from diffusion_jax.metrics import bootstrap


def test_the_interval_of_a_mean_is_1_96_standard_errors_each_way():
    x = np.random.default_rng(0).normal(size=400)
    found = bootstrap.interval(x, 7.0, replicates=2000)
    half = 1.96 * x.std() / 20
    np.testing.assert_allclose(found, [7 - half, 7 + half], atol=0.1 * half)
    assert found == bootstrap.interval(x, 7.0, replicates=2000)
    narrow = bootstrap.interval(x, 7.0, replicates=2000, confidence=0.68)
    np.testing.assert_allclose(narrow, [7 - half / 1.96, 7 + half / 1.96], atol=0.1 * half)


@pytest.mark.parametrize("change", [{"replicates": 1}, {"confidence": 95.0}])
def test_what_cannot_be_says_so(change):
    with pytest.raises(ValueError, match="at least 2 replicates and a confidence between 0 and 1"):
        bootstrap.interval(np.zeros(3), 0.0, **change)
