"""Compute the Frechet distance between two sets of features (Heusel et al. 2017), in float64.

For means a, b and covariances A, B, the distance is |a - b|^2 + tr A + tr B - 2 tr (A B)^(1/2).
Write B = F'F. The last trace is then the sum of the square roots of the eigenvalues of F A F'. This
matrix is symmetric, so its eigenvalues are real. With fewer images than dimensions, write A = E'E,
where E holds the centred features, scaled by (n - 1)^(-1/2). The trace is then the sum of the
singular values of E F'. This form is exact, while the square root of a low-rank covariance would
underestimate the trace by about 1e-3.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from diffusion_jax.metrics.bootstrap import Score
from diffusion_jax.metrics.features import FeatureRows, Gaussian, check_finite, gaussian

FeatureSample = FeatureRows | Gaussian
"""Features, or their mean and covariance.

With fewer images than dimensions, a distance computed from features is more exact."""


class ReferenceFeatures(NamedTuple):
    """A set of features to which others are compared, prepared once for many distances."""

    mean: Float[np.ndarray, "D"]
    factor: Float[np.ndarray, "R D"]
    """A factor F of the covariance F'F."""


def score(sample: FeatureSample, reference: ReferenceFeatures) -> Score:
    """Return the Frechet distance between `sample` and `reference` as a score.

    The score has no interval if `sample` is a Gaussian. With at least as many images as dimensions,
    the distance and its interval share one matrix decomposition. Raises ValueError if `sample` and
    `reference` have different dimensions.
    """
    if isinstance(sample, Gaussian):
        return Score(distance(sample, reference))
    if _is_few(sample):
        return Score(distance(sample, reference), influence(sample, reference))
    _check_width(sample.shape[1], reference)
    mean, rows = _centred(sample)
    shares, cross = _row_shares(rows @ reference.factor.T)
    value = _total(mean, np.square(rows).sum(), cross, reference)
    return Score(value, _influence(mean, rows, shares, reference))


def score_at_infinity(sample: FeatureSample, reference: ReferenceFeatures, *, seed: int = 0) -> Score:
    """Return the distance extrapolated to infinitely many images (FID-infinity) as a score.

    The score's extra column "residual" is the root-mean-square residual of the fit. `seed` chooses
    the random subsets for the fit. Raises ValueError if `sample` is a Gaussian, because the fit
    needs features.
    """
    if isinstance(sample, Gaussian):
        raise ValueError(
            "FID-infinity needs the features of each image, not only their mean and covariance: write "
            "the statistics with metrics stats --keep_features"
        )
    value, residual = extrapolated(sample, reference, seed=seed)
    return Score(value, more={"residual": residual})


def frechet(a: FeatureSample, b: FeatureSample) -> float:
    """Return the Frechet distance between `a` and `b`.

    If `a` and `b` are the same set with fewer images than dimensions, rounding errors can make the
    result negative, down to -1e-3. Raises ValueError for features with NaN or infinity.
    """
    return distance(a, reference(b))


def reference(sample: FeatureSample) -> ReferenceFeatures:
    """Prepare the reference set: return its mean and a factor of its covariance.

    With fewer images than dimensions, the factor consists of the centred features, scaled by
    (n - 1)^(-1/2).
    """
    if _is_few(sample):
        return ReferenceFeatures(*_centred(sample))
    moments = _moments(sample)
    values, vectors = np.linalg.eigh(moments.cov)
    return ReferenceFeatures(moments.mean, np.sqrt(np.maximum(values, 0))[:, None] * vectors.T)


def distance(sample: FeatureSample, reference: ReferenceFeatures) -> float:
    """Return the Frechet distance between a sample and a prepared reference.

    Raises ValueError if their numbers of dimensions differ.
    """
    factor = reference.factor
    width = sample.mean.size if isinstance(sample, Gaussian) else sample.shape[1]
    _check_width(width, reference)
    if _is_few(sample):
        mean, rows = _centred(sample)
        trace = np.square(rows).sum()
        cross = np.linalg.svd(rows @ factor.T, compute_uv=False).sum()
    else:
        mean, cov, _ = _moments(sample)
        trace = np.trace(cov)
        values = np.linalg.eigvalsh(factor @ cov @ factor.T)
        cross = np.sqrt(np.maximum(values, 0)).sum()
    return _total(mean, trace, cross, reference)


def influence(features: FeatureRows, reference: ReferenceFeatures) -> Float[np.ndarray, "N"]:
    """Return each image's first-order contribution to the distance.

    The contribution of an image is n times the derivative of the distance with respect to the
    image's weight in the mean and covariance, where n is the number of images.

    The standard error of the contributions' mean estimates the standard deviation of the distance
    over sets of n images (the infinitesimal jackknife, Efron 1982). With fewer images than
    dimensions, this estimate is within a factor of 1.5 of the true value. In that case, a bootstrap
    would give an estimate several times too large, and each of its replicates would need a matrix
    decomposition.
    """
    mean, rows = _centred(features)
    shares, _ = _row_shares(rows @ reference.factor.T)
    return _influence(mean, rows, shares, reference)


def extrapolated(
    features: FeatureRows, reference: ReferenceFeatures, *, points: int = 15, seed: int = 0
) -> tuple[float, float]:
    """Return FID-infinity (Chong & Forsyth 2020) and the root-mean-square residual of its fit.

    The distance is computed for `points` random subsets, which are drawn without replacement with
    the random seed `seed`. The subset sizes n range from a tenth of the images (at least 2) to all
    images. A line in 1/n is fitted to the distances, and FID-infinity is its value at 1/n = 0.

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


def _influence(
    mean: Float[np.ndarray, "D"],
    rows: Float[np.ndarray, "N D"],
    shares: Float[np.ndarray, "N"],
    reference: ReferenceFeatures,
) -> Float[np.ndarray, "N"]:
    n = len(rows)
    from_mean = 2 * (n - 1) ** 0.5 * rows @ (mean - reference.mean)
    return from_mean + n * (np.square(rows).sum(1) - shares)


def _row_shares(rows: Float[np.ndarray, "N R"]) -> tuple[Float[np.ndarray, "N"], float]:
    """Return each row's contribution to the sum of the singular values of `rows`, and this sum.

    With the singular value decomposition rows = USV', the contributions are the diagonal of USU'.
    """
    if len(rows) < rows.shape[1]:
        squares, left = np.linalg.eigh(rows @ rows.T)
        values = np.sqrt(np.maximum(squares, 0))
        return np.square(left) @ values, values.sum()
    squares, right = np.linalg.eigh(rows.T @ rows)
    nonzero = squares > 1e-12 * squares[-1]
    shares = np.square(rows @ right[:, nonzero]) @ (1 / np.sqrt(squares[nonzero]))
    return shares, np.sqrt(np.maximum(squares, 0)).sum()


def _total(mean: Float[np.ndarray, "D"], trace: float, cross: float, reference: ReferenceFeatures) -> float:
    between = np.square(mean - reference.mean).sum()
    return float(between + trace + np.square(reference.factor).sum() - 2 * cross)


def _check_width(width: int, reference: ReferenceFeatures) -> None:
    if width != reference.mean.size:
        raise ValueError(
            f"features with {width} and {reference.mean.size} dimensions cannot be compared: "
            "use the same extractor and level for both"
        )


def _is_few(sample: FeatureSample) -> bool:
    return not isinstance(sample, Gaussian) and len(sample) < sample.shape[1]


def _moments(sample: FeatureSample) -> Gaussian:
    return sample if isinstance(sample, Gaussian) else gaussian(sample)


def _centred(features: FeatureSample) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean, and the features E, centred and scaled so that E'E is the covariance."""
    x = np.asarray(features, np.float64)
    check_finite(x)
    if len(x) < 2:
        raise ValueError(f"a covariance needs at least 2 images, but there are {len(x)}")
    mean = x.mean(0)
    return mean, (x - mean) / np.sqrt(len(x) - 1)
