"""Compute confidence intervals of scores by bootstrapping over images (Efron 1979)."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Score(NamedTuple):
    """The score of a set of images, with the data for its confidence interval and table columns."""

    value: float
    each: Float[np.ndarray, "N"] | None = None
    """First-order contribution of each image to the score, for the confidence interval. None for a
    score without an interval."""
    more: Mapping[str, float] | None = None
    """Additional columns, keyed by suffix: {"deviation": 0.1} adds the column NAME_deviation."""
    decimals: int | None = None
    """Number of decimals to round all columns to. None means no rounding."""


class ConfidenceInterval(NamedTuple):
    """A score's confidence interval."""

    low: float
    high: float


def mean(values: Float[np.ndarray, "N"]) -> Score:
    """Return the mean of `values`, one per image, as a score."""
    return Score(float(values.mean()), values)


def interval(
    each: Float[np.ndarray, "N"], score: float, *, replicates: int = 1000, confidence: float = 0.95, seed: int = 0
) -> ConfidenceInterval:
    """Return the percentile bootstrap interval of a score, to first order.

    Each replicate resamples the images' contributions with replacement. Its score is the original
    score, plus the mean of the resampled contributions, minus the mean of all contributions. The
    interval does not include the score's bias, which depends on the number of images. For FID,
    fid.extrapolated removes most of this bias.

    Args:
        each: first-order contribution of each image, for example from fid.influence.
        score: the score.
        replicates: number of resamplings.
        confidence: probability covered by the interval.
        seed: seed of the resampling.

    Raises:
        ValueError: there are fewer than 2 replicates, or the confidence is not between 0 and 1.
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
    return ConfidenceInterval(float(low), float(high))
