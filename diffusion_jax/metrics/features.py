"""Features of many images: collected or summed up in a stream, the same however they were batched.

Float64 on the host. Sums go by blocks of a fixed number of rows, so that neither the batch size,
nor the number of devices or processes that made the rows, changes a digit of them.
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


class Stream:
    """Takes features batch by batch; rows that are not finite are left out and counted."""

    def __init__(self, width: int, *, keep: bool = True):
        """`keep` False holds the moments alone, in memory that does not grow with the images."""
        self._width, self._keep = width, keep
        self._waiting: list[np.ndarray] = []
        self._kept: list[np.ndarray] = []
        self._mean, self._scatter = np.zeros(width), np.zeros((width, width))
        self._summed = 0
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
            self._sum(waiting[:_BLOCK])
            self._waiting = [waiting[_BLOCK:]]

    def features(self) -> Rows:
        """All rows [n, D]; ValueError unless they are kept."""
        if not self._keep:
            raise ValueError("this stream was made with keep=False: it has the moments alone")
        return np.concatenate(self._kept or [np.zeros((0, self._width), np.float32)])

    def gaussian(self) -> Gaussian:
        """The moments of all rows so far; ValueError below two rows."""
        if self.n < 2:
            left = f", and {self.not_finite} were not finite" if self.not_finite else ""
            raise ValueError(f"a covariance needs 2 images or more: there are {self.n}{left}")
        if self._keep:
            whole = Stream(self._width, keep=False)
            for rows in self._kept:
                whole.add(rows)
            return whole.gaussian()
        if self._waiting:
            self._sum(np.concatenate(self._waiting))
            self._waiting = []
        return Gaussian(self._mean.copy(), self._scatter / (self.n - 1), self.n)

    def _sum(self, rows: np.ndarray) -> None:
        """Chan, Golub & LeVeque 1979: no sum of squares that are far larger than their spread."""
        if not len(rows):
            return
        total = self._summed + len(rows)
        x = rows.astype(np.float64)
        mean = x.mean(0)
        x -= mean
        shift = mean - self._mean
        weight = self._summed * len(rows) / total
        self._scatter += x.T @ x + weight * np.outer(shift, shift)
        self._mean += shift * (len(rows) / total)
        self._summed = total


def finite(rows: Rows) -> Bool[np.ndarray, "N"]:
    """A mask of the rows whose values are all finite."""
    return np.asarray(np.isfinite(rows).all(1))


def gaussian(features: Rows) -> Gaussian:
    """The moments of features; ValueError below two rows."""
    stream = Stream(features.shape[1], keep=False)
    stream.add(features)
    return stream.gaussian()
