"""Keys of micro batches: their draws are rows of the whole batch's, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.train import parts


def draws(key, rows):
    """Draws as in losses: normal, Bernoulli, integers, from split and folded keys; and a scalar."""
    normal, drop, step, one = jax.random.split(key, 4)
    return (
        jax.random.bits(normal, (rows, 5)),
        jax.random.bernoulli(drop, 0.3, (rows,)),
        jax.random.randint(jax.random.fold_in(step, 9), (rows,), 0, 1000),
        jax.random.bits(one, (rows, 2, 3), jnp.uint8),
        jax.random.bits(one),
    )


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_a_part_draws_its_rows_of_the_whole(implementation):
    key = jax.random.key(3, impl=implementation)
    *whole, scalar = jax.jit(draws, static_argnums=1)(key, 12)
    part = jax.jit(lambda index: draws(parts.key_of(key, index, 3), 4))
    for index in range(3):
        *rows, same = part(jnp.int32(index))
        for expected, actual in zip(whole, rows, strict=True):
            np.testing.assert_array_equal(actual, expected[index::3])
        assert same == scalar


def test_an_array_of_keys_draws_as_each_of_them():
    key = parts.key_of(jax.random.key(3), jnp.int32(1), 2)
    keys = jax.random.split(key, 3)
    together = jax.vmap(lambda key: jax.random.bits(key, (4,)))(keys)
    for one, row in zip(keys, together, strict=True):
        np.testing.assert_array_equal(jax.random.bits(one, (4,)), row)
