"""Bootstrap intervals, against the known interval of a mean."""

import numpy as np
import pytest

from diffusion_jax.metrics import bootstrap


def test_the_interval_of_a_mean_spans_1_96_standard_errors_each_way():
    x = np.random.default_rng(0).normal(size=400)
    interval = bootstrap.interval(x, 7.0, replicates=2000)
    half = 1.96 * x.std() / 20
    np.testing.assert_allclose(interval, [7 - half, 7 + half], atol=0.1 * half)
    assert interval == bootstrap.interval(x, 7.0, replicates=2000)
    narrow = bootstrap.interval(x, 7.0, replicates=2000, confidence=0.68)
    np.testing.assert_allclose(narrow, [7 - half / 1.96, 7 + half / 1.96], atol=0.1 * half)


@pytest.mark.parametrize("change", [{"replicates": 1}, {"confidence": 95.0}])
def test_too_few_replicates_or_an_invalid_confidence_is_an_error(change):
    with pytest.raises(ValueError, match="at least 2 replicates and a confidence between 0 and 1"):
        bootstrap.interval(np.zeros(3), 0.0, **change)
