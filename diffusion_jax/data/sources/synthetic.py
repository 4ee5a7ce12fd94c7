"""One random batch, again and again: input that costs nothing, for benchmarks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from diffusion_jax.config.settings import Data
from diffusion_jax.data.pictures import Pictures, Shapes


def open_source(_: Data, shapes: Shapes) -> Pictures:
    """Random pictures of the shapes that a task takes."""
    return Synthetic(shapes.size, shapes.embeddings)


class Synthetic(Pictures):
    """The same random pictures and text for any indices."""

    def __init__(self, size: int, embeddings: tuple[int, int] | None = None):
        """Texts are a caption, or arrays of the shape `embeddings` (tokens, width)."""
        self._random = np.random.default_rng(0)
        self._images = np.zeros((0, size, size, 3), np.uint8)
        self._text = "a picture of random noise"
        if embeddings is not None:
            self._text = self._random.standard_normal(embeddings, np.float32)

    def __len__(self) -> int:
        """A number that no run comes to the end of."""
        return 2**31 - 1

    def read(
        self, indices: Int[np.ndarray, "B"], places: Float[np.ndarray, "B 2"] | None = None
    ) -> tuple[UInt8[np.ndarray, "B H W 3"], Sequence[Any]]:
        """The same pictures for any indices and places."""
        images = self._images
        if len(images) != len(indices):
            shape = (len(indices), *images.shape[1:])
            images = self._images = self._random.integers(0, 256, shape, np.uint8)
        return images, [self._text] * len(indices)
