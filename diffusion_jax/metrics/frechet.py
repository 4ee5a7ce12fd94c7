"""The Frechet distance between two sets of features (Heusel et al. 2017), in float64.

The distance is |mean a - mean b|^2 + tr A + tr B - 2 tr (A B)^(1/2). With B = F'F, the last trace
is the sum of the square roots of the eigenvalues of F A F', which is symmetric, so that they are
real. With fewer images than dimensions, A = E'E where E are the centred features, and the trace is
the sum of the singular values of E F'. This is exact, whereas square roots of low-rank covariances
underestimate it by about 1e-3.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from diffusion_jax.metrics.bootstrap import Score
from diffusion_jax.metrics.features import Gaussian, Rows, gaussian

Sample = Rows | Gaussian
"""Features, or their moments, which are less exact if there are fewer images than dimensions."""


class Reference(NamedTuple):
    """One side of the distance, prepared once for many comparisons."""

    mean: Float[np.ndarray, "D"]
    factor: Float[np.ndarray, "R D"]
    """F, with covariance F' F."""


def score(sample: Sample, reference: Reference) -> Score:
    """Return the distance as a score, which has no interval if `sample` is a Gaussian."""
    each = None if isinstance(sample, Gaussian) else influence(sample, reference)
    return Score(distance(sample, reference), each)


def score_at_infinity(sample: Sample, reference: Reference, *, seed: int = 0) -> Score:
    """Return FID-infinity as a score. Raises ValueError if `sample` is a Gaussian."""
    if isinstance(sample, Gaussian):
        raise ValueError("FID-infinity needs the features of each image, not only their moments")
    value, residual = extrapolated(sample, reference, seed=seed)
    return Score(value, more={"residual": residual})


def frechet(a: Sample, b: Sample) -> float:
    """Return the distance. For equal sets of low rank, rounding may make it as low as -1e-3."""
    return distance(a, reference(b))


def reference(sample: Sample) -> Reference:
    """Prepare one side: factor its covariance, or centre its features if they are few."""
    if _is_few(sample):
        return Reference(*_centred(sample))
    moments = _moments(sample)
    values, vectors = np.linalg.eigh(moments.cov)
    return Reference(moments.mean, np.sqrt(np.maximum(values, 0))[:, None] * vectors.T)


def distance(sample: Sample, reference: Reference) -> float:
    """Return the distance to a prepared side. Raises ValueError if the dimensions differ."""
    factor = reference.factor
    width = sample.mean.size if isinstance(sample, Gaussian) else sample.shape[1]
    if width != reference.mean.size:
        raise ValueError(
            f"features with {width} and {reference.mean.size} dimensions cannot be compared: "
            "use the same extractor and level for both"
        )
    if _is_few(sample):
        mean, rows = _centred(sample)
        trace = np.square(rows).sum()
        cross = np.linalg.svd(rows @ factor.T, compute_uv=False).sum()
    else:
        mean, cov, _ = _moments(sample)
        trace = np.trace(cov)
        values = np.linalg.eigvalsh(factor @ cov @ factor.T)
        cross = np.sqrt(np.maximum(values, 0)).sum()
    between = np.square(mean - reference.mean).sum()
    return float(between + trace + np.square(factor).sum() - 2 * cross)


def influence(features: Rows, reference: Reference) -> Float[np.ndarray, "N"]:
    """Return each image's first-order contribution to the distance.

    The contribution is n times the derivative of the distance by the image's weight.

    The spread of the contributions' mean estimates the spread of the distance over sets of n images
    (the infinitesimal jackknife, Efron 1982). With fewer images than dimensions, the estimate is
    within a factor of 1.5; a bootstrap would overestimate the spread several times there, and each
    replicate would need a decomposition.
    """
    mean, rows = _centred(features)
    n = len(rows)
    from_mean = 2 * (n - 1) ** 0.5 * rows @ (mean - reference.mean)
    return from_mean + n * (np.square(rows).sum(1) - _row_shares(rows @ reference.factor.T))


def extrapolated(
    features: Rows, reference: Reference, *, points: int = 15, seed: int = 0
) -> tuple[float, float]:
    """Return FID-infinity (Chong & Forsyth 2020) and the root-mean-square residual of its fit.

    FID-infinity is the value at 1/n = 0 of a line fitted to the distances of `points` subsets.
    Their sizes range from a tenth of the images (at least 2) to all, drawn without replacement.

    Raises:
        ValueError: there are fewer than 20 images.
    """
    n = len(features)
    if n < 20:
        raise ValueError(f"FID-infinity needs at least 20 images, but there are {n}")
    rng = np.random.default_rng(seed)
    sizes = np.unique(np.linspace(max(2, n // 10), n, points).astype(int))
    draw = lambda size: features[rng.permutation(n)[:size]]
    values = np.array([distance(draw(size), reference) for size in sizes])
    slope, value = np.polyfit(1 / sizes, values, 1)
    residual = np.sqrt(np.square(values - value - slope / sizes).mean())
    return float(value), float(residual)


def _row_shares(rows: Float[np.ndarray, "N R"]) -> Float[np.ndarray, "N"]:
    """Return each row's share of the sum of the singular values, the diagonal of U S U'."""
    if len(rows) < rows.shape[1]:
        squares, left = np.linalg.eigh(rows @ rows.T)
        return np.square(left) @ np.sqrt(np.maximum(squares, 0))
    squares, right = np.linalg.eigh(rows.T @ rows)
    nonzero = squares > 1e-12 * squares[-1]
    return np.square(rows @ right[:, nonzero]) @ (1 / np.sqrt(squares[nonzero]))


def _is_few(sample: Sample) -> bool:
    return not isinstance(sample, Gaussian) and len(sample) < sample.shape[1]


def _moments(sample: Sample) -> Gaussian:
    return sample if isinstance(sample, Gaussian) else gaussian(sample)


def _centred(features: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean, and rows E whose E' E is the covariance."""
    x = np.asarray(features, np.float64)
    if len(x) < 2:
        raise ValueError(f"a covariance needs at least 2 images, but there are {len(x)}")
    mean = x.mean(0)
    return mean, (x - mean) / np.sqrt(len(x) - 1)
