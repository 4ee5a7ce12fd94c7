"""Keys of micro batches that draw what the whole batch would: each micro batch its own rows.

A loss draws its noise in arrays [B, ...], a row a sample. With `key_of` it draws the same numbers
for a sample whether its batch comes in one piece or in several, so that neither the memory of a
device nor the mesh changes what is learned.
"""

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random as extend
from jaxtyping import Array, ArrayLike, Int, Key, PRNGKeyArray


def key_of(key: PRNGKeyArray, part: Int[ArrayLike, ""], parts: int) -> PRNGKeyArray:
    """The key of micro batch `part` of `parts`, which holds rows part, part + parts, ...

    What jax.random draws from it in shape [b, ...] are these rows of what it draws from `key` in
    shape [parts * b, ...]; keys that are split off it do the same. Scalars are those of `key`.
    """
    data = jnp.append(jax.random.key_data(key), jnp.asarray(part, jnp.uint32))
    return jax.random.wrap_key_data(data, impl=_implementation(parts, jax.random.key_impl(key)))


@functools.cache
def _implementation(parts: int, whole: Hashable) -> Any:
    """The generator `whole`, whose keys also hold the number of a part."""
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
        rows, *rest = shape
        drawn = jax.random.bits(key(data), (rows * parts, *rest), dtype)
        # Row i * parts + part of the whole; the compiler draws no others, as these are functions
        # of their place alone.
        drawn = drawn.reshape(rows, parts, *rest)
        return jax.lax.dynamic_index_in_dim(drawn, data[size], axis=1, keepdims=False)

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
