"""The Frechet distance of two sets of features (Heusel et al. 2017), in float64, without sqrtm.

|mean a - mean b|^2 + tr A + tr B - 2 tr (A B)^(1/2). With B = F'F the last trace is the sum of the
square roots of the eigenvalues of F A F', symmetric and never complex. Where there are fewer images
than dimensions, A = E'E with E the centred features, and it is the sum of the singular values of
E F': exact, where square roots of covariances of low rank read low by about 1e-3.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from diffusion_jax.metrics.bootstrap import Score
from diffusion_jax.metrics.features import Gaussian, Rows, gaussian

Sample = Rows | Gaussian
"""Features, or their moments; features are exact where they are fewer than dimensions."""


class Reference(NamedTuple):
    """One side of the distance, prepared once for many."""

    mean: Float[np.ndarray, "D"]
    factor: Float[np.ndarray, "R D"]
    """factor' factor is the covariance."""


def score(sample: Sample, reference: Reference) -> Score:
    """The distance as a metric; of moments alone it has no interval."""
    each = None if isinstance(sample, Gaussian) else influence(sample, reference)
    return Score(distance(sample, reference), each)


def score_at_infinity(sample: Sample, reference: Reference, *, seed: int = 0) -> Score:
    """FID-infinity as a metric; ValueError of moments alone (see `extrapolated`)."""
    if isinstance(sample, Gaussian):
        raise ValueError("an extrapolation over n needs the features of each image")
    value, residual = extrapolated(sample, reference, seed=seed)
    return Score(value, more={"residual": residual})


def frechet(a: Sample, b: Sample) -> float:
    """The distance; may be -1e-3 for equal sets of low rank. ValueError if they cannot compare."""
    return distance(a, reference(b))


def reference(sample: Sample) -> Reference:
    """Takes the root of a covariance, or the features themselves where they are few."""
    if _is_few(sample):
        return Reference(*_centred(sample))
    moments = _moments(sample)
    values, vectors = np.linalg.eigh(moments.cov)
    return Reference(moments.mean, np.sqrt(np.maximum(values, 0))[:, None] * vectors.T)


def distance(sample: Sample, reference: Reference) -> float:
    """The distance to a prepared side; see `frechet`."""
    factor = reference.factor
    width = sample.mean.size if isinstance(sample, Gaussian) else sample.shape[1]
    if width != reference.mean.size:
        raise ValueError(
            f"features of {width} and of {reference.mean.size} dimensions cannot be compared: "
            "they are of different extractors or levels"
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
    """Each image's part in the distance, to first order: n times its derivative by their weight.

    The spread of their mean is that of the distance over sets of n images: the infinitesimal
    jackknife (Efron 1982). With fewer images than dimensions it is so within a half; sets drawn
    with replacement would overstate it several times there, and take a decomposition each.
    """
    mean, rows = _centred(features)
    n = len(rows)
    of_mean = 2 * (n - 1) ** 0.5 * rows @ (mean - reference.mean)
    return of_mean + n * (np.square(rows).sum(1) - _row_shares(rows @ reference.factor.T))


def extrapolated(
    features: Rows, reference: Reference, *, points: int = 15, seed: int = 0
) -> tuple[float, float]:
    """FID-infinity (Chong & Forsyth 2020): the value at 1/n = 0 of a line through `points` sizes.

    The sizes go from a tenth of the images (two at least) to all, drawn without replacement.
    Returns the value and the line's root-mean-square residual.
    """
    n = len(features)
    if n < 20:
        raise ValueError(f"an extrapolation over n needs 20 images or more: there are {n}")
    rng = np.random.default_rng(seed)
    sizes = np.unique(np.linspace(max(2, n // 10), n, points).astype(int))
    draw = lambda size: features[rng.permutation(n)[:size]]
    values = np.array([distance(draw(size), reference) for size in sizes])
    slope, value = np.polyfit(1 / sizes, values, 1)
    residual = np.sqrt(np.square(values - value - slope / sizes).mean())
    return float(value), float(residual)


def _row_shares(rows: Float[np.ndarray, "N R"]) -> Float[np.ndarray, "N"]:
    """Each row's part of the sum of the singular values: with U S V' the diagonal of U S U'."""
    if len(rows) < rows.shape[1]:
        squares, left = np.linalg.eigh(rows @ rows.T)
        return np.square(left) @ np.sqrt(np.maximum(squares, 0))
    squares, right = np.linalg.eigh(rows.T @ rows)
    kept = squares > 1e-12 * squares[-1]
    return np.square(rows @ right[:, kept]) @ (1 / np.sqrt(squares[kept]))


def _is_few(sample: Sample) -> bool:
    return not isinstance(sample, Gaussian) and len(sample) < sample.shape[1]


def _moments(sample: Sample) -> Gaussian:
    return sample if isinstance(sample, Gaussian) else gaussian(sample)


def _centred(features: Sample) -> tuple[np.ndarray, np.ndarray]:
    """The mean, and rows whose product with themselves is the covariance."""
    x = np.asarray(features, np.float64)
    if len(x) < 2:
        raise ValueError(f"a covariance needs 2 images or more: there are {len(x)}")
    mean = x.mean(0)
    return mean, (x - mean) / np.sqrt(len(x) - 1)
