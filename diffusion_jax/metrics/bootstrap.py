"""Scores, and their confidence intervals by the bootstrap (Efron 1979) over images."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Score(NamedTuple):
    """A score of a set of images."""

    value: float
    each: Float[np.ndarray, "N"] | None = None
    """Each image's part in it, to first order: their spread makes the interval. None: no interval.
    """
    more: Mapping[str, float] | None = None
    """Numbers that belong to it, by what their columns add to its name: {"deviation": 0.1}."""
    decimals: int | None = None
    """To how many it and its interval are rounded; None: not at all."""


class Interval(NamedTuple):
    """The two ends of a score's confidence interval."""

    low: float
    high: float


def mean(values: Float[np.ndarray, "N"]) -> Score:
    """The mean over images, of which each has its own value as its part."""
    return Score(float(values.mean()), values)


def interval(
    each: Float[np.ndarray, "N"],
    score: float,
    *,
    replicates: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The interval about a score, which the mean of its images' parts moves (see Score.each).

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
