"""Confidence intervals of scores by the bootstrap (Efron 1979) over images."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from diffusion_jax.metrics.features import Rows


class Interval(NamedTuple):
    """Where a score lies with the confidence asked for."""

    low: float
    high: float


def interval(
    score: Callable[[Rows], float],
    features: Rows,
    *,
    replicates: int = 30,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The interval about score(features) of what drawing other images would have made of it.

    Percentiles of the score of images drawn again with replacement, moved to lie about the score
    itself: drawn sets repeat images, by which a Frechet distance comes out larger each time. It
    says nothing of the bias that all scores of n images share (see frechet.extrapolated).
    """
    if replicates < 2 or not 0 < confidence < 1:
        raise ValueError(
            f"an interval needs 2 replicates or more and a confidence between 0 and 1: these are "
            f"{replicates} and {confidence}"
        )
    rng, n = np.random.default_rng(seed), len(features)
    values = np.array([score(features[rng.integers(0, n, n)]) for _ in range(replicates)])
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(values, [tail, 100 - tail]) - values.mean() + score(features)
    return Interval(float(low), float(high))
