"""Fidelity and variety of generated images by nearest neighbours.

Precision and recall are of Kynkaanniemi et al. 2019, density and coverage of Naeem et al. 2020. The
ball of an image reaches to its k-th neighbour among those of its side; an image lies among others
if it is in the ball of any of them. Blocks of distances are made and dropped, so that memory is
2048 rows', not all pairs'.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

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
    return _share(_balls(generated, real, k) > 0)


def recall(generated: Rows, real: Rows, *, k: int = 3) -> Score:
    """Variety: the share of real images that lie among the generated ones; else as `precision`.

    Its interval is that over the real images.
    """
    generated, real = _about_the_real(generated, real, k)
    return _share(_balls(real, generated, k) > 0)


def density(generated: Rows, real: Rows, *, k: int = 5) -> Score:
    """Fidelity that one outlier among the real images does not raise: from 0, 1 for their like.

    The mean number of real images' balls that a generated one lies in, by k; else as `precision`.
    """
    generated, real = _about_the_real(generated, real, k)
    return bootstrap.mean(_balls(generated, real, k) / k)


def coverage(generated: Rows, real: Rows, *, k: int = 5) -> Score:
    """Variety: the share of real images with a generated one in their ball; else as `recall`."""
    generated, real = _about_the_real(generated, real, k)
    radii = _radii(real, k)
    nearest = [squared_distances(real[i : i + _BLOCK], generated).min(1) for i in _starts(real)]
    return _share(np.concatenate(nearest) <= radii)


def _share(true: Bool[np.ndarray, "N"]) -> Score:
    return bootstrap.mean(true.astype(np.float64))


def _about_the_real(generated: Rows, real: Rows, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Both less the mean of the real ones, about which distances lose fewer digits."""
    if min(len(real), len(generated)) <= k:
        raise ValueError(
            f"the {k} nearest neighbours need more than {k} images on both sides: there are "
            f"{len(real)} and {len(generated)}"
        )
    centre = real.mean(0, dtype=np.float64)
    return generated - centre, real - centre


def _balls(
    x: Float[np.ndarray, "N D"], y: Float[np.ndarray, "M D"], k: int
) -> Int[np.ndarray, "N"]:
    """The number of rows of y in whose ball each row of x lies."""
    radii = _radii(y, k)
    within = [(squared_distances(x[i : i + _BLOCK], y) <= radii).sum(1) for i in _starts(x)]
    return np.concatenate(within)


def _starts(x: Float[np.ndarray, "N D"]) -> range:
    return range(0, len(x), _BLOCK)


def _radii(x: Float[np.ndarray, "N D"], k: int) -> Float[np.ndarray, "N"]:
    """The squared distance of each row to its k-th neighbour."""
    radii = np.empty(len(x))
    for start in _starts(x):
        part = slice(start, start + _BLOCK)
        squares = squared_distances(x[part], x)
        rows = np.arange(len(squares))
        squares[rows, start + rows] = np.inf  # No row is its own neighbour.
        radii[part] = np.partition(squares, k - 1, axis=1)[:, k - 1]
    return radii
