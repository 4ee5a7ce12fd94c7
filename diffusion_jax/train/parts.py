"""Random keys that give a micro batch the same noise as its rows get in the whole batch.

A loss draws noise in arrays [B, ...], one row per sample. With `key_of`, a sample gets the same
noise whether its batch is processed at once or in micro batches. So the noise of a run does not
depend on the mesh or on the size of the micro batches.
"""

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random as extend
from jaxtyping import Array, ArrayLike, Int, Key, PRNGKeyArray


def key_of(key: PRNGKeyArray, part: Int[ArrayLike, ""], parts: int) -> PRNGKeyArray:
    """Return the key of a micro batch that holds the rows part, part + parts, ... of a batch.

    An array [b, ...] drawn from this key equals these rows of the array [parts * b, ...] drawn from
    `key`. This also holds for keys that are split from this key. A scalar drawn from this key
    equals the scalar drawn from `key`.
    """
    data = jnp.append(jax.random.key_data(key), jnp.asarray(part, jnp.uint32))
    return jax.random.wrap_key_data(data, impl=_implementation(parts, jax.random.key_impl(key)))


@functools.cache
def _implementation(parts: int, whole: Hashable) -> Any:
    """Return a variant of the random generator `whole` for `parts` micro batches.

    Its keys also hold the index of a micro batch.
    """
    size = jax.random.key_data(jax.random.key(0, impl=whole)).size

    def key(data: Array) -> PRNGKeyArray:
        return jax.random.wrap_key_data(data[:size], impl=whole)

    def with_part(keys: Key[Array, "..."], data: Array) -> Array:
        part = jnp.broadcast_to(data[size:], (*keys.shape, 1))
        return jnp.concatenate([jax.random.key_data(keys), part], axis=-1)

    def random_bits(data: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
        dtype = jnp.dtype(f"uint{bit_width}")
        if not shape:
            return jax.random.bits(key(data), shape, dtype)
        rows, *row_shape = shape
        numbers = jax.random.bits(key(data), (rows * parts, *row_shape), dtype)
        # Take rows i * parts + part of the whole. Each number depends only on its position, so
        # the compiler computes only these rows.
        numbers = numbers.reshape(rows, parts, *row_shape)
        return jax.lax.dynamic_index_in_dim(numbers, data[size], axis=1, keepdims=False)

    return extend.define_prng_impl(
        key_shape=(size + 1,),
        seed=lambda seed: jnp.append(
            jax.random.key_data(jax.random.key(seed, impl=whole)), jnp.uint32(0)
        ),
        split=lambda data, shape: with_part(jax.random.split(key(data), shape), data),
        random_bits=random_bits,
        fold_in=lambda data, number: with_part(jax.random.fold_in(key(data), number), data),
        name=f"{whole}_in_{parts}_parts",
        tag=f"p{parts}",
    )
