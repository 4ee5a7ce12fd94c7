"""An array that is left in its file, of which each device reads the part that it holds."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


class Stored:
    """An array that stays in its file: `stored[index]` reads this part of it, as `dtype`."""

    def __init__(self, view: np.ndarray, dtype: DTypeLike) -> None:
        """`view` is an array mapped into memory, transposed and sliced as need be."""
        self._view, self.dtype = view, jnp.dtype(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self._view.shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._view.size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of it."""
        return self[...] if dtype is None else self[...].astype(dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        """A copy in memory, so that no device ever shares it with the file."""
        # asarray: a scalar's index gives no array.
        return np.asarray(self._view[index]).astype(self.dtype, order="C", copy=True)
