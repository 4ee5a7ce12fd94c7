"""Provide the same random batch at every step, so that benchmarks do not measure data loading."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from diffusion_jax.config.settings import Data
from diffusion_jax.data.pictures import Pictures, TaskShapes


def open_source(_: Data, shapes: TaskShapes) -> Pictures:
    """Return a data set of random pictures that all have the same text.

    `shapes` gives the size of the pictures and, if the text is stored as embeddings, the shape of
    these embeddings.
    """
    return Synthetic(shapes.size, shapes.embeddings)


class Synthetic(Pictures):
    """A data set that returns the same random pictures for any indices, all with the same text."""

    def __init__(self, size: int, embeddings: tuple[int, int] | None = None):
        """Set the shapes of pictures and texts.

        Args:
            size: height and width of the pictures in pixels.
            embeddings: (tokens, width) if the text is random embeddings; None for a caption.
        """
        self._images = np.zeros((0, size, size, 3), np.uint8)
        self._text = "a picture of random noise"
        if embeddings is not None:
            self._text = np.random.default_rng(0).standard_normal(embeddings, np.float32)

    def __len__(self) -> int:
        """Return a length that exceeds the number of samples of any run."""
        return 2**31 - 1

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[UInt8[np.ndarray, "B H W 3"], Sequence[Any]]:
        """Return B random pictures and B equal texts, which do not depend on indices and places."""
        images = self._images
        if len(images) != len(indices):
            shape = (len(indices), *images.shape[1:])
            images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
            self._images = images
        return images, [self._text] * len(indices)
