"""Precision and recall of generated images by nearest neighbours (Kynkaanniemi et al. 2019)."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from diffusion_jax.metrics.features import Rows
from diffusion_jax.metrics.mmd import squared_distances

_BLOCK = 2048


class PrecisionRecall(NamedTuple):
    """Shares from 0 to 1."""

    precision: float
    """Of generated images that lie among the real ones: fidelity."""
    recall: float
    """Of real images that lie among the generated ones: variety."""


def precision_recall(real: Rows, generated: Rows, *, k: int = 3) -> PrecisionRecall:
    """An image lies among others if it is within the k-th neighbour's distance of any of them.

    Blocks of distances are made and dropped, so that memory is 2048 rows', not all pairs'.
    ValueError unless both sides have more than k images.
    """
    if min(len(real), len(generated)) <= k:
        raise ValueError(
            f"the {k} nearest neighbours need more than {k} images on both sides: there are "
            f"{len(real)} and {len(generated)}"
        )
    centre = real.mean(0, dtype=np.float64)  # Distances lose fewer digits about it.
    real, generated = real - centre, generated - centre
    among = lambda x, y: float(_within(x, y, _radii(y, k)).mean())
    return PrecisionRecall(among(generated, real), among(real, generated))


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


def _within(
    x: Float[np.ndarray, "N D"], y: Float[np.ndarray, "M D"], radii: Float[np.ndarray, "M"]
) -> Bool[np.ndarray, "N"]:
    starts = range(0, len(x), _BLOCK)
    return np.concatenate([(squared_distances(x[i : i + _BLOCK], y) <= radii).any(1)
                           for i in starts])  # fmt: skip
