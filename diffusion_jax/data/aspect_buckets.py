"""Aspect buckets: batches of several shapes, so that little of each picture is cropped away.

A bucket is a shape that pictures are cropped to. Each picture belongs to the bucket whose aspect
ratio is nearest to its own, and all pictures of a batch belong to one bucket (Podell et al. 2023,
"SDXL", section 2.3; the idea is NovelAI's). The buckets are read from data.aspect_buckets.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float, Int

from diffusion_jax.config.shapes import Shape
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.machine import progress

_CHUNK = 64  # Number of pictures whose headers are read together.
_THREADS = 16  # Disks and object stores have a latency.


class Buckets(NamedTuple):
    """The buckets that have pictures, and the bucket of each picture."""

    shapes: Sequence[Shape]
    bucket: Int[np.ndarray, "N"]
    """The bucket of each picture, as an index of `shapes`."""

    @property
    def counts(self) -> list[int]:
        """Number of pictures in each bucket."""
        return np.bincount(self.bucket, minlength=len(self.shapes)).tolist()

    def members(self) -> list[Int[np.ndarray, "n"]]:
        """Return the indices of the pictures in each bucket."""
        return [np.flatnonzero(self.bucket == number) for number in range(len(self.shapes))]


def sort(pictures: Pictures, buckets: Sequence[Shape]) -> Buckets:
    """Read the size of every picture, and assign the pictures to buckets.

    Buckets without pictures are left out. Unusable pictures will be replaced by pictures of the
    same bucket.
    """
    sizes = read_sizes(pictures)
    bucket = nearest(sizes, buckets)
    used, bucket = np.unique(bucket, return_inverse=True)
    assigned = Buckets([tuple(buckets[i]) for i in used.tolist()], bucket)
    pictures.keep_together(bucket)
    logging.info("%s", described(assigned, sizes))
    return assigned


def read_sizes(pictures: Pictures) -> Int[np.ndarray, "N 2"]:
    """Return height and width of all pictures, from the headers of their files."""
    starts = range(0, len(pictures), _CHUNK)
    chunks = (np.arange(i, min(i + _CHUNK, len(pictures))) for i in starts)
    with ThreadPoolExecutor(_THREADS) as threads:
        sizes = threads.map(pictures.sizes, chunks)
        sizes = progress.reported(sizes, len(pictures), "pictures measured", size=len)
        return np.concatenate([np.zeros((0, 2), np.int64), *sizes])


def nearest(sizes: Int[np.ndarray, "N 2"], buckets: Sequence[Shape]) -> Int[np.ndarray, "N"]:
    """Return the bucket of the nearest aspect ratio for each picture, as an index of `buckets`.

    Distances are measured between the logarithms of the ratios. Damaged pictures, of size (0, 0),
    count as squares.
    """
    distances = np.abs(_log_aspect(sizes)[:, None] - _log_aspect(np.array(buckets)))
    return distances.argmin(1)


def cropped_away(
    sizes: Int[np.ndarray, "N 2"], shapes: Int[np.ndarray, "N 2"]
) -> Float[np.ndarray, "N"]:
    """Return the share of each picture's area that a crop with the aspect of `shapes` removes."""
    return 1 - np.exp(-np.abs(_log_aspect(sizes) - _log_aspect(shapes)))


def described(buckets: Buckets, sizes: Int[np.ndarray, "N 2"]) -> str:
    """Return a line for the log about the buckets.

    It lists the share of pictures in each bucket, and the share of the pictures' area that cropping
    removes, both with these buckets and with squares.
    """
    shares = [count / max(len(sizes), 1) for count in buckets.counts]
    shapes = ", ".join(
        f"{height}x{width} ({share:.0%})"
        for (height, width), share in zip(buckets.shapes, shares, strict=True)
    )
    away = cropped_away(sizes, np.array(buckets.shapes)[buckets.bucket]).mean()
    square = cropped_away(sizes, np.ones_like(sizes)).mean()
    return (
        f"pictures by height x width: {shapes}; cropping removes {away:.1%} of their area "
        f"({square:.1%} with squares)"
    )


def _log_aspect(sizes: Int[np.ndarray, "N 2"]) -> Float[np.ndarray, "N"]:
    height, width = np.maximum(sizes, 1).T
    return np.log(width / height)
