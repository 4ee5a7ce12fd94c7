"""Compute KID and CMMD, two kernel distances between sets of features.

Both are squared maximum mean discrepancies (MMD): E k(x, x') + E k(y, y') - 2 E k(x, y). CMMD is
computed in float64. KID evaluates the kernel once for each pair of images, in float32 on one
device. Both evaluate the kernel for blocks of images to save memory.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from diffusion_jax.metrics.bootstrap import Score
from diffusion_jax.metrics.clip_score import normalised
from diffusion_jax.metrics.features import FeatureRows, check_finite

_SUBSET = 1000
_SIGMA, _SCALE = 10.0, 1000.0  # The width of CMMD's kernel, and CMMD's factor.
_BLOCK = 2048
_Kernel = Callable[[np.ndarray, np.ndarray], np.ndarray]


def score_kid(generated: FeatureRows, real: FeatureRows, *, size: int | None = None, seed: int = 0) -> Score:
    """Return the KID between generated and real features, averaged over 100 pairs of subsets.

    The score's extra column "deviation" is the standard deviation over the pairs. `size` is the
    number of images per subset. The default is 1000, or the size of the smaller set if that is
    less. `seed` chooses the subsets. Raises ValueError if a set has fewer than `size` images.
    """
    size = size or min(_SUBSET, len(generated), len(real))
    result = kid(real, generated, size=size, seed=seed)
    return Score(result.mean, result.influence, {"deviation": result.deviation})


def score_cmmd(generated: FeatureRows, real: FeatureRows) -> Score:
    """Return the CMMD between two sets of CLIP image embeddings as a score.

    The embeddings are scaled to norm 1 first. Raises ValueError if one has NaN or infinity.
    """
    generated, real = normalised(generated), normalised(real)
    kernel = lambda a, b: _SCALE * _gaussian(a, b, _SIGMA)
    return Score(cmmd(real, generated), _influence(kernel, generated, real))


class Kid(NamedTuple):
    """Kernel Inception distance (KID) of two sets of images, over pairs of random subsets."""

    mean: float
    """Mean over pairs of random subsets."""
    deviation: float
    """Standard deviation over pairs of random subsets."""
    influence: Float[np.ndarray, "N"]
    """First-order contribution of each image of the second set to the KID between the full sets."""


def kid(x: FeatureRows, y: FeatureRows, *, subsets: int = 100, size: int = 1000, seed: int = 0) -> Kid:
    """Return KID's mean and deviation over pairs of random subsets of `x` and `y`.

    The result also has the contribution of each image of `y`. KID (Binkowski et al. 2018) is the
    unbiased squared MMD for the kernel (x.y / D + 1)^3, so it may be negative. The kernel matrix K
    is computed once for all subsets: its sum over all pairs of images in a subset is w'Kw, where w
    is 1 for images in the subset and 0 for other images.

    Args:
        x: features of the first set, [N, D].
        y: features of the second set, [M, D].
        subsets: number of pairs of subsets.
        size: number of images per subset, at least 2.
        seed: random seed for choosing the subsets.

    Raises:
        ValueError: a set has fewer than `size` images or features with NaN or infinity, or `size`
            is less than 2.
    """
    check_finite(x, y)
    if size < 2:
        raise ValueError(f"KID needs at least 2 images per subset, but the size is {size}")
    if min(len(x), len(y)) < size:
        raise ValueError(
            f"KID with subsets of {size} images needs at least {size} images in each set, but "
            f"there are {len(x)} and {len(y)}: choose a smaller size (--kid_subset in commands)"
        )
    rng = np.random.default_rng(seed)
    members = [np.zeros((len(rows), subsets + 1), np.float32) for rows in (x, y)]
    for subset in range(subsets):
        for mask in members:
            mask[rng.choice(len(mask), size, replace=False), subset] = 1
    for mask in members:
        mask[:, -1] = 1  # All images.
    # A constant subtracted from the kernel cancels in the MMD. Here it avoids rounding errors.
    origin = float((x.mean(0, dtype=np.float64) @ y.mean(0, dtype=np.float64) / x.shape[1] + 1) ** 3)
    in_x, in_y = members
    xx, yx, yy = (_kernel_sums(*pair, origin) for pair in ((x, x, in_x), (y, x, in_x), (y, y, in_y)))
    within = (in_x * xx).sum(0) + (in_y * yy).sum(0)
    within -= _diagonal(x, origin) @ in_x + _diagonal(y, origin) @ in_y
    values = (within / (size * (size - 1)) - 2 * (in_y * yx).sum(0) / size**2)[:-1]
    influence = 2 * (yy[:, -1] / len(y) - yx[:, -1] / len(x))
    return Kid(float(values.mean()), float(values.std()), influence)


def cmmd(x: FeatureRows, y: FeatureRows) -> float:
    """Return CMMD (Jayasumana et al. 2024): 1000 times the biased MMD^2 with a Gaussian kernel.

    `x` and `y` are CLIP image embeddings, one row per image, scaled to L2 norm 1. Raises ValueError
    for embeddings with NaN or infinity.
    """
    check_finite(x, y)
    kernel = lambda a, b: _gaussian(a, b, _SIGMA)
    within = _total(kernel, x, x) / len(x) ** 2 + _total(kernel, y, y) / len(y) ** 2
    return float(_SCALE * (within - 2 * _total(kernel, x, y) / (len(x) * len(y))))


def _influence(kernel: _Kernel, generated: FeatureRows, real: FeatureRows) -> Float[np.ndarray, "N"]:
    """Return each generated image's first-order contribution to the squared MMD."""
    means = lambda rows: np.concatenate(
        [sum(kernel(a, b).sum(1) for b in _blocks(rows)) / len(rows) for a in _blocks(generated)]
    )
    return 2 * (means(generated) - means(real))


def _total(kernel: _Kernel, x: FeatureRows, y: FeatureRows) -> float:
    return sum(float(kernel(a, b).sum()) for a in _blocks(x) for b in _blocks(y))


def _blocks(rows: FeatureRows) -> Iterator[Float[np.ndarray, "M D"]]:
    return (rows[i : i + _BLOCK].astype(np.float64) for i in range(0, len(rows), _BLOCK))


def _kernel_sums(
    x: FeatureRows, y: FeatureRows, weights: Float[np.ndarray, "M S"], origin: float
) -> Float[np.ndarray, "N S"]:
    """Return sum_m (k(x_n, y_m) - origin) * weights[m, s], where k is KID's kernel."""
    columns, weighted = jnp.asarray(y, jnp.float32), jnp.asarray(weights)
    parts = (jnp.asarray(x[i : i + _BLOCK], jnp.float32) for i in range(0, len(x), _BLOCK))
    sums = [np.asarray(_cubic_sums(part, columns, weighted, origin), float) for part in parts]
    return np.concatenate(sums)


@jax.jit
def _cubic_sums(
    x: Float[Array, "B D"], y: Float[Array, "M D"], weights: Float[Array, "M S"], origin: Float[Array, ""]
) -> Float[Array, "B S"]:
    exact = jax.lax.Precision.HIGHEST
    kernel = (jnp.matmul(x, y.T, precision=exact) / x.shape[1] + 1) ** 3 - origin
    return jnp.matmul(kernel, weights, precision=exact)


def _diagonal(x: FeatureRows, origin: float) -> Float[np.ndarray, "N"]:
    return (np.square(x.astype(np.float64)).sum(1) / x.shape[1] + 1) ** 3 - origin


def _gaussian(x: np.ndarray, y: np.ndarray, sigma: float) -> Float[np.ndarray, "N M"]:
    return np.exp(-squared_distances(x, y) / (2 * sigma**2))


def squared_distances(x: Float[np.ndarray, "N D"], y: Float[np.ndarray, "M D"]) -> Float[np.ndarray, "N M"]:
    """Return the squared distances [N, M] between rows of `x` and rows of `y`, clipped at 0."""
    norms = np.square(x).sum(1)[:, None] + np.square(y).sum(1)
    return np.maximum(norms - 2 * x @ y.T, 0)
