"""What a training step draws for each image, to compare losses with formulas of the papers."""

import jax

SIGMA, KEPT, OFFSET, SECOND_SIGMA, TARGET = range(1, 6)


def keys_of(count, seed=3):
    """One key for each image of a batch."""
    return jax.random.split(jax.random.key(seed), count)


def draw(keys, number, function):
    """Call `function` with the key of draw `number` of each image. Draw 0 is the noise itself."""
    return jax.vmap(lambda key: function(jax.random.fold_in(key, number)))(keys)


def normal(keys, number, *shape):
    """Standard normal numbers of this shape for each image."""
    return draw(keys, number, lambda key: jax.random.normal(key, shape))


def kept(keys, drop_prob):
    """Which images keep their text."""
    return draw(keys, KEPT, lambda key: jax.random.bernoulli(key, 1 - drop_prob))
