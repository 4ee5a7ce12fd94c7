"""Features of many images: collected or summed up in a stream, the same however they were batched.

Float64 on the host. Sums go by blocks of a fixed number of rows, so that neither the batch size,
nor the number of devices or processes that made the rows, changes a digit of them. Those of several
streams are merged into those of all their rows.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

_BLOCK = 1024
Rows = Float[np.ndarray, "_N _D"]


class Gaussian(NamedTuple):
    """The first two moments of features; `n` is None where a file does not say it."""

    mean: Float[np.ndarray, "D"]
    cov: Float[np.ndarray, "D D"]
    """Divided by n - 1."""
    n: int | None


class Sums(NamedTuple):
    """What the moments of features are made of, and merged from."""

    n: int
    """Rows."""
    mean: Float[np.ndarray, "D"]
    scatter: Float[np.ndarray, "D D"]
    """The sum of the outer products of all rows less their mean."""

    def gaussian(self) -> Gaussian:
        """The moments; ValueError below two rows."""
        if self.n < 2:
            raise ValueError(f"a covariance needs 2 images or more: there are {self.n}")
        return Gaussian(self.mean, self.scatter / (self.n - 1), self.n)


def no_sums(width: int) -> Sums:
    """Those of no rows."""
    return Sums(0, np.zeros(width), np.zeros((width, width)))


def merged(one: Sums, other: Sums) -> Sums:
    """The sums of both, in which the order of many shows in the last digits.

    Chan, Golub & LeVeque 1979: no sum of squares that are far larger than their spread.
    """
    if not other.n:
        return one
    total = one.n + other.n
    shift = other.mean - one.mean
    between = (one.n * other.n / total) * np.outer(shift, shift)
    scatter = one.scatter + (other.scatter + between)
    return Sums(total, one.mean + shift * (other.n / total), scatter)


class Stream:
    """Takes features batch by batch; rows that are not finite are left out and counted."""

    def __init__(self, width: int, *, keep: bool = True):
        """`keep` False holds the moments alone, in memory that does not grow with the images."""
        self._width, self._keep = width, keep
        self._waiting: list[np.ndarray] = []
        self._kept: list[np.ndarray] = []
        self._sums = no_sums(width)
        self.n = 0
        """Rows taken."""
        self.not_finite = 0
        """Rows left out: of images with NaN, or beyond what float32 holds."""

    def add(self, rows: Rows) -> None:
        """The next features, in the order of their images."""
        if rows.ndim != 2 or rows.shape[1] != self._width:
            raise ValueError(f"features of shape {rows.shape} are not [N, {self._width}]")
        fine = finite(rows)
        self.not_finite += int((~fine).sum())
        rows = rows[fine]
        self.n += len(rows)
        if self._keep:
            self._kept.append(rows)
            return
        self._waiting.append(rows)
        while sum(map(len, self._waiting)) >= _BLOCK:
            waiting = np.concatenate(self._waiting)
            self._sums = merged(self._sums, _sums_of(waiting[:_BLOCK]))
            self._waiting = [waiting[_BLOCK:]]

    def features(self) -> Rows:
        """All rows [n, D]; ValueError unless they are kept."""
        if not self._keep:
            raise ValueError("this stream was made with keep=False: it has the moments alone")
        return np.concatenate(self._kept or [np.zeros((0, self._width), np.float32)])

    def sums(self) -> Sums:
        """The sums of all rows so far."""
        if self._keep:
            whole = Stream(self._width, keep=False)
            for rows in self._kept:
                whole.add(rows)
            return whole.sums()
        if self._waiting:
            self._sums = merged(self._sums, _sums_of(np.concatenate(self._waiting)))
            self._waiting = []
        return self._sums

    def gaussian(self) -> Gaussian:
        """The moments of all rows so far; ValueError below two rows."""
        try:
            return self.sums().gaussian()
        except ValueError as error:
            left = f", and {self.not_finite} were not finite" if self.not_finite else ""
            raise ValueError(f"{error}{left}") from error


def finite(rows: Rows) -> Bool[np.ndarray, "N"]:
    """A mask of the rows whose values are all finite."""
    return np.asarray(np.isfinite(rows).all(1))


def gaussian(features: Rows) -> Gaussian:
    """The moments of features; ValueError below two rows."""
    stream = Stream(features.shape[1], keep=False)
    stream.add(features)
    return stream.gaussian()


def _sums_of(rows: Rows) -> Sums:
    x = rows.astype(np.float64)
    mean = x.mean(0) if len(x) else np.zeros(x.shape[1])
    x -= mean
    return Sums(len(x), mean, x.T @ x)
