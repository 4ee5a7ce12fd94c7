"""Turn seeds of 64 bits into random keys, although JAX's integers have 32 bits by default."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, UInt32

MOST = 2**64 - 1
"""The largest seed."""


def halves(seeds: Sequence[int]) -> UInt32[np.ndarray, "N 2"]:
    """Return the high and the low 32 bits of each seed.

    Raises ValueError for a seed that is not from 0 to 2^64 - 1.
    """
    if wrong := [seed for seed in seeds if not 0 <= seed <= MOST]:
        raise ValueError(f"the seed is {wrong[0]}: it must be a whole number from 0 to 2^64 - 1")
    numbers = np.array(seeds, np.uint64)
    return np.stack([numbers >> 32, numbers & 0xFFFFFFFF], axis=-1).astype(np.uint32)


def keys_of(halves: UInt32[Array | np.ndarray, "N 2"]) -> Key[Array, "N"]:
    """Return the random keys of seeds. A seed below 2^32 gives the key jax.random.key(seed)."""
    high, low = halves[:, 0], halves[:, 1]
    below = jax.vmap(jax.random.key)(low)
    return jnp.where(high == 0, below, jax.vmap(jax.random.fold_in)(below, high))
