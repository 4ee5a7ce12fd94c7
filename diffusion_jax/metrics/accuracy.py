"""Compute accuracy: the share of images that match their captions, according to a judge.

The array `right` has a row for each image and a column for each part of a caption, such as an
object and its colour. An entry is 1 if the judge recognises this part of the image's caption in the
image, and 0 otherwise.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from diffusion_jax.metrics import bootstrap
from diffusion_jax.metrics.bootstrap import Score


def all_right(right: Float[np.ndarray, "N P"]) -> Score:
    """Return the share of images (0 to 1) that match every part of their caption, as a score."""
    return bootstrap.mean(right.min(axis=1))._replace(decimals=4)


def part_right(part: int) -> Callable[[Float[np.ndarray, "N P"]], Score]:
    """Return a function that maps `right` to the share of images with a 1 in column `part`."""
    return lambda right: Score(float(right[:, part].mean()), decimals=4)
