"""Confidence intervals of scores by the bootstrap (Efron 1979) over images."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Interval(NamedTuple):
    """Where a score lies with the confidence asked for."""

    low: float
    high: float


def interval(
    each: Float[np.ndarray, "N"],
    score: float,
    *,
    replicates: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The interval about a score, of which `each` image's part is given: their mean moves it.

    Percentiles of the mean over images drawn again with replacement. Of a Frechet distance the
    parts are frechet.influence. It says nothing of the bias that all scores of n images share (see
    frechet.extrapolated).
    """
    if replicates < 2 or not 0 < confidence < 1:
        raise ValueError(
            f"an interval needs 2 replicates or more and a confidence between 0 and 1: these are "
            f"{replicates} and {confidence}"
        )
    rng, n = np.random.default_rng(seed), len(each)
    means = [each[rng.integers(0, n, n)].mean() for _ in range(replicates)]
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(means, [tail, 100 - tail]) - each.mean() + score
    return Interval(float(low), float(high))
