"""Precision and recall of generated images by nearest neighbours (Kynkaanniemi et al. 2019).

An image lies among others if it is within the k-th neighbour's distance of any of them. Blocks of
distances are made and dropped, so that memory is 2048 rows', not all pairs'.
"""

import numpy as np
from jaxtyping import Float

from diffusion_jax.metrics import bootstrap
from diffusion_jax.metrics.bootstrap import Score
from diffusion_jax.metrics.features import Rows
from diffusion_jax.metrics.mmd import squared_distances

_BLOCK = 2048


def precision(generated: Rows, real: Rows, *, k: int = 3) -> Score:
    """Fidelity: the share of generated images that lie among the real ones, from 0 to 1.

    ValueError unless both sides have more than k images.
    """
    generated, real = _about_the_real(generated, real, k)
    return bootstrap.mean(_among(generated, real, k))


def recall(generated: Rows, real: Rows, *, k: int = 3) -> Score:
    """Variety: the share of real images that lie among the generated ones; else as `precision`.

    Its interval is that over the real images.
    """
    generated, real = _about_the_real(generated, real, k)
    return bootstrap.mean(_among(real, generated, k))


def _about_the_real(generated: Rows, real: Rows, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Both less the mean of the real ones, about which distances lose fewer digits."""
    if min(len(real), len(generated)) <= k:
        raise ValueError(
            f"the {k} nearest neighbours need more than {k} images on both sides: there are "
            f"{len(real)} and {len(generated)}"
        )
    centre = real.mean(0, dtype=np.float64)
    return generated - centre, real - centre


def _among(
    x: Float[np.ndarray, "N D"], y: Float[np.ndarray, "M D"], k: int
) -> Float[np.ndarray, "N"]:
    """1 for each row of x that lies among those of y, else 0."""
    radii = _radii(y, k)
    starts = range(0, len(x), _BLOCK)
    within = [(squared_distances(x[i : i + _BLOCK], y) <= radii).any(1) for i in starts]
    return np.concatenate(within).astype(np.float64)


def _radii(x: Float[np.ndarray, "N D"], k: int) -> Float[np.ndarray, "N"]:
    """The squared distance of each row to its k-th neighbour."""
    radii = np.empty(len(x))
    for start in range(0, len(x), _BLOCK):
        part = slice(start, start + _BLOCK)
        squares = squared_distances(x[part], x)
        rows = np.arange(len(squares))
        squares[rows, start + rows] = np.inf  # No row is its own neighbour.
        radii[part] = np.partition(squares, k - 1, axis=1)[:, k - 1]
    return radii
