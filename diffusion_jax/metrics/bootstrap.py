"""Scores, and their confidence intervals by bootstrapping over images (Efron 1979)."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Score(NamedTuple):
    """A score of a set of images."""

    value: float
    each: Float[np.ndarray, "N"] | None = None
    """First-order contribution of each image, from which the interval is computed; None for scores
    without an interval."""
    more: Mapping[str, float] | None = None
    """Further columns by suffix: {"deviation": 0.1} adds the column NAME_deviation."""
    decimals: int | None = None
    """Number of decimals that all columns are rounded to; None does not round."""


class Interval(NamedTuple):
    """A score's confidence interval."""

    low: float
    high: float


def mean(values: Float[np.ndarray, "N"]) -> Score:
    """Return the score that is the mean of the images' values."""
    return Score(float(values.mean()), values)


def interval(
    each: Float[np.ndarray, "N"],
    score: float,
    *,
    replicates: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return the percentile bootstrap interval of a score, to first order.

    The images' contributions are resampled with replacement, and the deviations of their mean are
    added to the score. The interval does not include the bias that depends on the number of images
    (see frechet.extrapolated).

    Args:
        each: contribution of each image (Score.each), such as frechet.influence.
        score: the score.
        replicates: number of resamplings.
        confidence: probability covered by the interval.
        seed: seed of the resampling.
    """
    if replicates < 2 or not 0 < confidence < 1:
        raise ValueError(
            f"replicates is {replicates} and confidence {confidence}: an interval needs at least "
            "2 replicates and a confidence between 0 and 1"
        )
    rng, n = np.random.default_rng(seed), len(each)
    means = [each[rng.integers(0, n, n)].mean() for _ in range(replicates)]
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(means, [tail, 100 - tail]) - each.mean() + score
    return Interval(float(low), float(high))
