"""Nearest-neighbour metrics for the fidelity and variety of generated images.

Precision and recall are defined by Kynkaanniemi et al. (2019), density and coverage by Naeem et al.
(2020). Each image has a k-NN sphere in feature space. The sphere is centred at the image, and its
radius is the distance to the image's k-th nearest neighbour in the same set. Distances are computed
for 2048 rows at a time to save memory.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from diffusion_jax.metrics import bootstrap
from diffusion_jax.metrics.bootstrap import Score
from diffusion_jax.metrics.features import Rows
from diffusion_jax.metrics.mmd import squared_distances

_BLOCK = 2048


def precision(generated: Rows, real: Rows, *, k: int = 3) -> Score:
    """Return precision: the share of generated images inside any real image's k-NN sphere.

    Precision measures fidelity.

    Raises:
        ValueError: a set has no more than k images.
    """
    generated, real = _centred(generated, real, k)
    return _share(_balls(generated, real, k) > 0)


def recall(generated: Rows, real: Rows, *, k: int = 3) -> Score:
    """Return recall: the share of real images inside any generated image's k-NN sphere.

    Recall measures variety. Its interval resamples the real images.

    Raises:
        ValueError: a set has no more than k images.
    """
    generated, real = _centred(generated, real, k)
    return _share(_balls(real, generated, k) > 0)


def density(generated: Rows, real: Rows, *, k: int = 5) -> Score:
    """Return density: the mean number of real k-NN spheres per generated image, divided by k.

    A sphere counts for each generated image that it contains.

    Density measures fidelity and is robust to outliers among the real images. It is 0 or more, and
    about 1 if both sets have the same distribution.

    Raises:
        ValueError: a set has no more than k images.
    """
    generated, real = _centred(generated, real, k)
    return bootstrap.mean(_balls(generated, real, k) / k)


def coverage(generated: Rows, real: Rows, *, k: int = 5) -> Score:
    """Return coverage: the share of real images whose k-NN sphere contains a generated image.

    Coverage measures variety. Its interval resamples the real images.

    Raises:
        ValueError: a set has no more than k images.
    """
    generated, real = _centred(generated, real, k)
    radii = _radii(real, k)
    nearest = [squared_distances(real[i : i + _BLOCK], generated).min(1) for i in _starts(real)]
    return _share(np.concatenate(nearest) <= radii)


def _share(true: Bool[np.ndarray, "N"]) -> Score:
    return bootstrap.mean(true.astype(np.float64))


def _centred(generated: Rows, real: Rows, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Subtract the mean of the real images from both sets, for more precise distances."""
    if min(len(real), len(generated)) <= k:
        raise ValueError(
            f"the {k} nearest neighbours need more than {k} images on both sides, but there are "
            f"{len(real)} and {len(generated)}"
        )
    centre = real.mean(0, dtype=np.float64)
    return generated - centre, real - centre


def _balls(
    x: Float[np.ndarray, "N D"], y: Float[np.ndarray, "M D"], k: int
) -> Int[np.ndarray, "N"]:
    """Count, for each row of x, the rows of y whose k-NN sphere contains it."""
    radii = _radii(y, k)
    within = [(squared_distances(x[i : i + _BLOCK], y) <= radii).sum(1) for i in _starts(x)]
    return np.concatenate(within)


def _starts(x: Float[np.ndarray, "N D"]) -> range:
    return range(0, len(x), _BLOCK)


def _radii(x: Float[np.ndarray, "N D"], k: int) -> Float[np.ndarray, "N"]:
    """Return the squared distance of each row to its k-th nearest neighbour."""
    radii = np.empty(len(x))
    for start in _starts(x):
        part = slice(start, start + _BLOCK)
        squares = squared_distances(x[part], x)
        rows = np.arange(len(squares))
        squares[rows, start + rows] = np.inf  # No row is its own neighbour.
        radii[part] = np.partition(squares, k - 1, axis=1)[:, k - 1]
    return radii
