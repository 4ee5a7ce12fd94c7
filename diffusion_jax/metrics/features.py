"""Collect the features of many images on the host, or only the sums of these features.

The class Sums holds these sums, in float64, from which the mean and covariance follow. Sums are
computed over blocks of a fixed number of images. They are therefore bit-identical for all batch
sizes. The Sums of several streams can be merged.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

_BLOCK = 1024
FeatureRows = Float[np.ndarray, "_N _D"]


class Gaussian(NamedTuple):
    """The mean and covariance of `n` feature vectors. `n` is None if the number is unknown."""

    mean: Float[np.ndarray, "D"]
    cov: Float[np.ndarray, "D D"]
    """The sample covariance, with divisor n - 1."""
    n: int | None


class Sums(NamedTuple):
    """The number, mean and scatter of a set of feature vectors. They determine the covariance.

    The function `merged` combines the Sums of two sets.
    """

    n: int
    """Number of rows."""
    mean: Float[np.ndarray, "D"]
    scatter: Float[np.ndarray, "D D"]
    """Sum over rows of (row - mean)(row - mean)'."""

    def gaussian(self) -> Gaussian:
        """Return the mean and covariance. Raises ValueError for fewer than two rows."""
        if self.n < 2:
            raise ValueError(f"a covariance needs at least 2 images, but there are {self.n}")
        return Gaussian(self.mean, self.scatter / (self.n - 1), self.n)


def no_sums(width: int) -> Sums:
    """Return the Sums of an empty set of features, with `width` features per row."""
    return Sums(0, np.zeros(width), np.zeros((width, width)))


def merged(one: Sums, other: Sums) -> Sums:
    """Return the Sums of the union of two sets.

    If several sets are merged, their order affects the last digits. The update of Chan, Golub &
    LeVeque (1979) avoids differences of sums of squares, which lose digits if the mean is large
    compared with the spread.
    """
    if not other.n:
        return one
    total = one.n + other.n
    shift = other.mean - one.mean
    between = (one.n * other.n / total) * np.outer(shift, shift)
    scatter = one.scatter + (other.scatter + between)
    return Sums(total, one.mean + shift * (other.n / total), scatter)


class Stream:
    """An accumulator of feature batches. It skips and counts rows with NaN or infinity."""

    def __init__(self, width: int, *, keep: bool = True):
        """Start without rows. Each row will have `width` features.

        With keep=False, store only sums, which take constant memory.
        """
        self._width, self._keep = width, keep
        self._waiting: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._sums = no_sums(width)
        self.n = 0
        """Number of finite rows added."""
        self.not_finite = 0
        """Number of rows skipped because they hold NaN or infinity."""

    def add(self, rows: FeatureRows) -> None:
        """Add the features of the next images, one row per image.

        Raises ValueError if the number of features differs from the stream's `width`.
        """
        if rows.ndim != 2 or rows.shape[1] != self._width:
            raise ValueError(f"features have shape {rows.shape}, not [N, {self._width}]")
        mask = finite(rows)
        self.not_finite += int((~mask).sum())
        rows = rows[mask]
        self.n += len(rows)
        if self._keep:
            self._rows.append(rows)
            return
        self._waiting.append(rows)
        while sum(map(len, self._waiting)) >= _BLOCK:
            waiting = np.concatenate(self._waiting)
            self._sums = merged(self._sums, _sums_of(waiting[:_BLOCK]))
            self._waiting = [waiting[_BLOCK:]]

    def features(self) -> FeatureRows:
        """Return all finite rows [n, D]. Raises ValueError if the stream has keep=False."""
        if not self._keep:
            raise ValueError("the stream did not store its features: create it with keep=True instead of keep=False")
        return np.concatenate(self._rows or [np.zeros((0, self._width), np.float32)])

    def sums(self) -> Sums:
        """Return the Sums of all finite rows added so far."""
        if self._keep:
            stream = Stream(self._width, keep=False)
            for rows in self._rows:
                stream.add(rows)
            return stream.sums()
        if self._waiting:
            self._sums = merged(self._sums, _sums_of(np.concatenate(self._waiting)))
            self._waiting = []
        return self._sums

    def gaussian(self) -> Gaussian:
        """Return the mean and covariance of all finite rows added so far.

        Raises ValueError for fewer than two such rows.
        """
        try:
            return self.sums().gaussian()
        except ValueError as error:
            not_finite = f", and {self.not_finite} were not finite" if self.not_finite else ""
            raise ValueError(f"{error}{not_finite}") from error


def finite(rows: FeatureRows) -> Bool[np.ndarray, "N"]:
    """Return a mask [N] that is True for rows without NaN or infinity."""
    return np.asarray(np.isfinite(rows).all(1))


def check_finite(*sets: FeatureRows) -> None:
    """Raise ValueError if a set of features has rows with NaN or infinity."""
    for rows in sets:
        if bad := int((~finite(rows)).sum()):
            raise ValueError(f"{bad} of {len(rows)} rows of features hold NaN or infinity")


def gaussian(features: FeatureRows) -> Gaussian:
    """Return the mean and covariance of features.

    Raises ValueError for fewer than two rows, or for rows with NaN or infinity.
    """
    check_finite(features)
    stream = Stream(features.shape[1], keep=False)
    stream.add(features)
    return stream.gaussian()


def _sums_of(rows: FeatureRows) -> Sums:
    x = rows.astype(np.float64)
    mean = x.mean(0) if len(x) else np.zeros(x.shape[1])
    x -= mean
    return Sums(len(x), mean, x.T @ x)
