"""Kernel distances between two sets of features, KID and CMMD, computed in blocks in float64.

Both are squared MMDs: E k(x, x') + E k(y, y') - 2 E k(x, y).
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float

from diffusion_jax.metrics.bootstrap import Score
from diffusion_jax.metrics.clip_score import normalised
from diffusion_jax.metrics.features import Rows

_SUBSET = 1000
_SIGMA, _SCALE = 10.0, 1000.0  # The constants of CMMD.
_BLOCK = 4096
_Kernel = Callable[[np.ndarray, np.ndarray], np.ndarray]


def score_kid(generated: Rows, real: Rows, *, size: int | None = None, seed: int = 0) -> Score:
    """Return KID as a score.

    The default subset size is 1000, or the number of images if that is smaller.
    """
    size = size or min(_SUBSET, len(generated), len(real))
    value, deviation = kid(real, generated, size=size, seed=seed)
    return Score(value, _influence(_cubic, generated, real), {"deviation": deviation})


def score_cmmd(generated: Rows, real: Rows) -> Score:
    """Normalise CLIP image embeddings and return their CMMD as a score."""
    generated, real = normalised(generated), normalised(real)
    kernel = lambda a, b: _SCALE * _gaussian(a, b, _SIGMA)
    return Score(cmmd(real, generated), _influence(kernel, generated, real))


def kid(
    x: Rows, y: Rows, *, subsets: int = 100, size: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Return the mean and standard deviation of KID over pairs of random subsets.

    KID (Binkowski et al. 2018) is an unbiased estimate, so it may be negative.

    Args:
        x: features of the first set.
        y: features of the second set.
        subsets: number of pairs of subsets.
        size: number of images per subset.
        seed: random seed for choosing the subsets.

    Raises:
        ValueError: a set has fewer than `size` images.
    """
    if min(len(x), len(y)) < size:
        raise ValueError(
            f"KID with subsets of {size} images needs as many on both sides, but there are "
            f"{len(x)} and {len(y)}: choose a smaller subset"
        )
    rng = np.random.default_rng(seed)
    draw = lambda rows: rows[rng.choice(len(rows), size, replace=False)]
    values = [kid_of_all(draw(x), draw(y)) for _ in range(subsets)]
    return float(np.mean(values)), float(np.std(values))


def kid_of_all(x: Rows, y: Rows) -> float:
    """Return the unbiased squared MMD of two complete sets for the kernel (x.y / D + 1)^3."""
    n, m = len(x), len(y)
    if min(n, m) < 2:
        raise ValueError(f"KID needs at least 2 images on both sides, but there are {n} and {m}")
    pair_sum = lambda rows: _total(_cubic, rows, rows) - _diagonal(rows)
    within = pair_sum(x) / (n * (n - 1)) + pair_sum(y) / (m * (m - 1))
    return float(within - 2 * _total(_cubic, x, y) / (n * m))


def cmmd(x: Rows, y: Rows) -> float:
    """Return CMMD (Jayasumana et al. 2024): 1000 times the biased MMD^2 with a Gaussian kernel.

    The caller passes CLIP image embeddings, normalised to length 1.
    """
    kernel = lambda a, b: _gaussian(a, b, _SIGMA)
    within = _total(kernel, x, x) / len(x) ** 2 + _total(kernel, y, y) / len(y) ** 2
    return float(_SCALE * (within - 2 * _total(kernel, x, y) / (len(x) * len(y))))


def _influence(kernel: _Kernel, generated: Rows, real: Rows) -> Float[np.ndarray, "N"]:
    """Return each generated image's first-order contribution to the squared MMD."""
    means = lambda rows: np.concatenate([
        sum(kernel(a, b).sum(1) for b in _blocks(rows)) / len(rows) for a in _blocks(generated)
    ])  # fmt: skip
    return 2 * (means(generated) - means(real))


def _total(kernel: _Kernel, x: Rows, y: Rows) -> float:
    """Sum the kernel over all pairs of a row of `x` and a row of `y`."""
    return sum(float(kernel(a, b).sum()) for a in _blocks(x) for b in _blocks(y))


def _blocks(rows: Rows) -> Iterator[Float[np.ndarray, "M D"]]:
    return (rows[i : i + _BLOCK].astype(np.float64) for i in range(0, len(rows), _BLOCK))


def _cubic(x: np.ndarray, y: np.ndarray) -> Float[np.ndarray, "N M"]:
    return (x @ y.T / x.shape[1] + 1) ** 3


def _diagonal(x: Rows) -> float:
    norms = np.square(x.astype(np.float64)).sum(1)
    return float(((norms / x.shape[1] + 1) ** 3).sum())


def _gaussian(x: np.ndarray, y: np.ndarray, sigma: float) -> Float[np.ndarray, "N M"]:
    return np.exp(-squared_distances(x, y) / (2 * sigma**2))


def squared_distances(
    x: Float[np.ndarray, "N D"], y: Float[np.ndarray, "M D"]
) -> Float[np.ndarray, "N M"]:
    """Return the squared distances [N, M] between rows of `x` and rows of `y`, clipped at 0."""
    norms = np.square(x).sum(1)[:, None] + np.square(y).sum(1)
    return np.maximum(norms - 2 * x @ y.T, 0)
