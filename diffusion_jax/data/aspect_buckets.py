"""Assigns pictures to aspect buckets, so that cropping removes little of each picture.

A bucket is a shape that pictures are cropped to. Each picture belongs to the bucket with the
nearest aspect ratio, and all pictures of a batch belong to one bucket (Podell et al. 2023, "SDXL",
section 2.3; the idea is NovelAI's). The config field data.aspect_buckets lists the buckets.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float, Int

from diffusion_jax.config.shapes import Shape
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.logs import progress

_CHUNK = 64  # Number of pictures whose headers are read together.
_THREADS = 16  # Reading headers is limited by the latency of disks and object stores.


class Buckets(NamedTuple):
    """The non-empty buckets of a data set of N pictures, and the bucket of each picture."""

    shapes: Sequence[Shape]
    """Height and width of each bucket in pixels."""
    bucket: Int[np.ndarray, "N"]
    """The bucket of each picture, as an index into `shapes`."""

    @property
    def counts(self) -> list[int]:
        """Number of pictures in each bucket."""
        return np.bincount(self.bucket, minlength=len(self.shapes)).tolist()

    def members(self) -> list[Int[np.ndarray, "n"]]:
        """Return the indices of the pictures in each bucket."""
        return [np.flatnonzero(self.bucket == number) for number in range(len(self.shapes))]


def sort(pictures: Pictures, buckets: Sequence[Shape]) -> Buckets:
    """Assign each picture to the bucket with the nearest aspect ratio, and return the buckets.

    This reads the header of every picture. `buckets` lists the height and width of each bucket in
    pixels; empty buckets are left out of the result. Afterwards, `pictures` replaces an unusable
    picture only by pictures of the same bucket.
    """
    sizes = read_sizes(pictures)
    bucket = nearest(sizes, buckets)
    used, bucket = np.unique(bucket, return_inverse=True)
    assigned = Buckets([tuple(buckets[i]) for i in used.tolist()], bucket)
    pictures.substitute_within(bucket)
    logging.info("%s", described(assigned, sizes))
    return assigned


def read_sizes(pictures: Pictures) -> Int[np.ndarray, "N 2"]:
    """Return height and width of each picture in pixels, read from the headers of the files.

    The size of a damaged picture is (0, 0).
    """
    starts = range(0, len(pictures), _CHUNK)
    chunks = (np.arange(i, min(i + _CHUNK, len(pictures))) for i in starts)
    with ThreadPoolExecutor(_THREADS) as threads:
        sizes = threads.map(pictures.sizes, chunks)
        sizes = progress.reported(sizes, len(pictures), "pictures measured", size=len)
        return np.concatenate([np.zeros((0, 2), np.int64), *sizes])


def nearest(sizes: Int[np.ndarray, "N 2"], buckets: Sequence[Shape]) -> Int[np.ndarray, "N"]:
    """Return, for each picture, the index of the bucket with the nearest aspect ratio.

    The distance between two ratios is the difference of their logarithms. Damaged pictures, whose
    size is (0, 0), count as squares.

    Args:
        sizes: height and width of each picture.
        buckets: height and width of each bucket.
    """
    distances = np.abs(_log_aspect(sizes)[:, None] - _log_aspect(np.array(buckets)))
    return distances.argmin(1)


def cropped_away(sizes: Int[np.ndarray, "N 2"], shapes: Int[np.ndarray, "N 2"]) -> Float[np.ndarray, "N"]:
    """Return the share of each picture's area that cropping removes, from 0 to 1.

    Args:
        sizes: height and width of each picture.
        shapes: height and width of each picture's crop. Only the ratio of the two matters.
    """
    return 1 - np.exp(-np.abs(_log_aspect(sizes) - _log_aspect(shapes)))


def described(buckets: Buckets, sizes: Int[np.ndarray, "N 2"]) -> str:
    """Return a log line with the share of pictures in each bucket.

    The line also shows which share of a picture's area cropping removes on average, with these
    buckets and with square crops. `sizes` holds the height and width of each picture.
    """
    shares = [count / max(len(sizes), 1) for count in buckets.counts]
    shapes = ", ".join(
        f"{height}x{width} ({share:.0%})" for (height, width), share in zip(buckets.shapes, shares, strict=True)
    )
    away = cropped_away(sizes, np.array(buckets.shapes)[buckets.bucket]).mean()
    square = cropped_away(sizes, np.ones_like(sizes)).mean()
    return (
        f"pictures by height x width: {shapes}; cropping removes {away:.1%} of their area (square crops: {square:.1%})"
    )


def _log_aspect(sizes: Int[np.ndarray, "N 2"]) -> Float[np.ndarray, "N"]:
    height, width = np.maximum(sizes, 1).T
    return np.log(width / height)
