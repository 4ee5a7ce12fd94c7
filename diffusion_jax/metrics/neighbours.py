"""Compute nearest-neighbour metrics for the fidelity and variety of generated images.

Precision and recall are defined by Kynkaanniemi et al. (2019), density and coverage by Naeem et al.
(2020). Each image has a k-NN sphere in feature space. The sphere is centred at the image, and its
radius is the distance to the image's k-th nearest neighbour in the same set. For precision and
recall, k is 3. For density and coverage, k is 5. All four scores share the same distances. One
device computes these distances in float32, for 2048 images at a time to save memory.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from diffusion_jax.metrics import bootstrap
from diffusion_jax.metrics.bootstrap import Score
from diffusion_jax.metrics.features import FeatureRows, check_finite

_BLOCK = 2048
_FEW, _MANY = 3, 5  # k of precision and recall, and of density and coverage.


class SphereMembership(NamedTuple):
    """The result of comparing two sets: which images are in k-NN spheres of the other set."""

    n: tuple[int, int]
    """Number of real images, and number of generated images."""
    precise: Bool[np.ndarray, "N"]
    """For each generated image, whether it is in any real image's sphere with k = 3."""
    recalled: Bool[np.ndarray, "M"]
    """For each real image, whether it is in any generated image's sphere with k = 3."""
    spheres: Int[np.ndarray, "N"]
    """For each generated image, the number of real images' spheres with k = 5 that contain it."""
    covered: Bool[np.ndarray, "M"]
    """For each real image, whether its sphere with k = 5 contains a generated image."""


class RealFeatures:
    """Features of real images, prepared for comparison with any number of generated sets.

    The radii of the real images' k-NN spheres are computed only once.
    """

    def __init__(self, rows: FeatureRows):
        """Compute the radii of the k-NN spheres around `rows`, the features [M, D].

        Raises ValueError for rows with NaN or infinity, as `compared` does.
        """
        check_finite(rows)
        self._centre = rows.mean(0, dtype=np.float64)
        self._rows = self._centred(rows)
        self._few, self._many = _radii(self._rows)
        self._last: tuple[FeatureRows, SphereMembership] | None = None

    def compared(self, generated: FeatureRows) -> SphereMembership:
        """Compare the real features with those of generated images [N, D].

        The latest result is cached, because four metrics call this method with the same array.
        """
        if self._last is None or self._last[0] is not generated:
            check_finite(generated)
            self._last = generated, self._compare(self._centred(generated))
        return self._last[1]

    def _compare(self, generated: Float[Array, "N D"]) -> SphereMembership:
        radii, _ = _radii(generated)
        each, recalled, covered = ([], np.zeros(len(self._rows), bool), np.zeros(len(self._rows), bool))
        for part in _parts(generated):
            *of_generated, contained, containing = _inside(
                generated[part], radii[part], self._rows, self._few, self._many
            )
            each.append(np.array(of_generated))
            recalled |= np.asarray(contained)
            covered |= np.asarray(containing)
        few, many = np.concatenate(each, axis=1)
        return SphereMembership((len(self._rows), len(generated)), few > 0, recalled, many, covered)

    def _centred(self, rows: FeatureRows) -> Float[Array, "N D"]:
        """Subtract the mean of the real features, which makes float32 distances more precise."""
        return jnp.asarray((rows - self._centre).astype(np.float32))


def precision(generated: FeatureRows, real: RealFeatures) -> Score:
    """Return precision: the share of generated images that are in any real image's k-NN sphere.

    Precision measures fidelity. It is between 0 and 1. k is 3.

    Raises:
        ValueError: a set has fewer than 4 images, or features with NaN or infinity.
    """
    return _share(_enough(real.compared(generated), _FEW).precise)


def recall(generated: FeatureRows, real: RealFeatures) -> Score:
    """Return recall: the share of real images that are in any generated image's k-NN sphere.

    Recall measures variety. It is between 0 and 1. k is 3. The confidence interval resamples the
    real images.

    Raises:
        ValueError: a set has fewer than 4 images, or features with NaN or infinity.
    """
    return _share(_enough(real.compared(generated), _FEW).recalled)


def density(generated: FeatureRows, real: RealFeatures) -> Score:
    """Return density: the number of real k-NN spheres that contain a generated image, divided by k.

    The score is the mean of this number over the generated images. k is 5. Density measures
    fidelity and is robust to outliers among the real images. It is at least 0, and about 1 if both
    sets have the same distribution.

    Raises:
        ValueError: a set has fewer than 6 images, or features with NaN or infinity.
    """
    return bootstrap.mean(_enough(real.compared(generated), _MANY).spheres / _MANY)


def coverage(generated: FeatureRows, real: RealFeatures) -> Score:
    """Return coverage: the share of real images whose k-NN sphere contains a generated image.

    Coverage measures variety. It is between 0 and 1. k is 5. The confidence interval resamples the
    real images.

    Raises:
        ValueError: a set has fewer than 6 images, or features with NaN or infinity.
    """
    return _share(_enough(real.compared(generated), _MANY).covered)


def nearest(rows: FeatureRows, among: FeatureRows) -> tuple[Float[np.ndarray, "N"], Int[np.ndarray, "N"]]:
    """Find the nearest row of `among` for each row of `rows`.

    Both arrays hold features, one row per image. Return the Euclidean distances [N], and the
    indices [N] of the nearest rows in `among`. Raises ValueError for rows with NaN or infinity.
    """
    check_finite(rows, among)
    centre = among.mean(0, dtype=np.float64)
    centred = lambda part: jnp.asarray((part - centre).astype(np.float32))
    blocks = [(part.start, centred(among[part])) for part in _parts(among)]
    distances, indices = [], []
    for part in _parts(rows):
        found = [_nearest_of(centred(rows[part]), block) for _, block in blocks]
        squares = np.stack([np.asarray(square) for square, _ in found])  # [blocks, B]
        places = np.stack([start + np.asarray(i) for (start, _), (_, i) in zip(blocks, found, strict=True)])
        best = squares.argmin(0)[None]
        distances.append(np.sqrt(np.take_along_axis(squares, best, 0)[0]))
        indices.append(np.take_along_axis(places, best, 0)[0])
    return np.concatenate(distances), np.concatenate(indices)


@jax.jit
def _nearest_of(rows: Float[Array, "B D"], among: Float[Array, "M D"]) -> tuple[Float[Array, "B"], Int[Array, "B"]]:
    squares = _squares(rows, among)
    return squares.min(1), squares.argmin(1)


def _share(true: Bool[np.ndarray, "N"]) -> Score:
    return bootstrap.mean(true.astype(np.float64))


def _enough(compared: SphereMembership, k: int) -> SphereMembership:
    if min(compared.n) <= k:
        raise ValueError(
            f"a score from the {k} nearest neighbours needs more than {k} images in each set, but "
            f"there are {compared.n[0]} real and {compared.n[1]} generated images: add images"
        )
    return compared


def _parts(rows: Float[Array, "N D"] | FeatureRows) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, len(rows), _BLOCK))


def _radii(rows: Float[Array, "N D"]) -> Float[Array, "2 N"]:
    """Return the squared distances [2, N] between each row and its third and fifth neighbour.

    Neighbours are the other rows, sorted by distance. If there is no third or fifth neighbour, the
    distance is infinite.
    """
    return jnp.concatenate([_radii_of(rows[part], rows, part.start) for part in _parts(rows)], 1)


@jax.jit
def _radii_of(part: Float[Array, "B D"], rows: Float[Array, "N D"], start: Int[Array, ""]) -> Float[Array, "2 B"]:
    """Compute `_radii` for one block of rows. The block `part` begins at row `start`."""
    index = jnp.arange(len(part))
    # A row is not its own neighbour.
    squares = _squares(part, rows).at[index, start + index].set(jnp.inf)
    missing = max(0, _MANY - len(rows))
    squares = jnp.pad(squares, ((0, 0), (0, missing)), constant_values=jnp.inf)
    nearest = -jax.lax.top_k(-squares, _MANY)[0]
    return nearest[:, jnp.array([_FEW - 1, _MANY - 1])].T


@jax.jit
def _inside(
    generated: Float[Array, "B D"],
    radii: Float[Array, "B"],
    real: Float[Array, "M D"],
    few: Float[Array, "M"],
    many: Float[Array, "M"],
) -> tuple[Int[Array, "B"], Int[Array, "B"], Bool[Array, "M"], Bool[Array, "M"]]:
    """Compare a block of generated images with all real images.

    `radii` holds the squared radii of the generated images' spheres (k = 3). `few` and `many` hold
    those of the real images' spheres (k = 3 and k = 5). Return four arrays: for each generated
    image, the number of real spheres with k = 3, and with k = 5, that contain it; for each real
    image, whether it is in any sphere of the generated images, and whether its own sphere with
    k = 5 contains any generated image.
    """
    squares = _squares(generated, real)
    in_few, in_many = squares <= few, squares <= many
    in_generated = squares <= radii[:, None]
    return in_few.sum(1), in_many.sum(1), in_generated.any(0), in_many.any(0)


def _squares(x: Float[Array, "N D"], y: Float[Array, "M D"]) -> Float[Array, "N M"]:
    products = jnp.matmul(x, y.T, precision=jax.lax.Precision.HIGHEST)
    return jnp.maximum(jnp.square(x).sum(1)[:, None] + jnp.square(y).sum(1) - 2 * products, 0)
