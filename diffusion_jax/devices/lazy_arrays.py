"""Define arrays that stay in their files, so that a process reads only the parts that it needs."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


class Stored:
    """An array that stays in its file. `stored[index]` reads a part and converts it to `dtype`."""

    def __init__(self, view: np.ndarray, dtype: DTypeLike) -> None:
        """Wrap `view`, a memory-mapped array, which may be transposed or sliced."""
        self._view, self.dtype = view, jnp.dtype(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    @property
    def size(self) -> int:
        return self._view.size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[...] if dtype is None else self[...].astype(dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        # A copy, so that no device shares memory with the file. asarray: indexing a scalar does
        # not return an array.
        return np.asarray(self._view[index]).astype(self.dtype, order="C", copy=True)
