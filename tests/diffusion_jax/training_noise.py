"""The random numbers of each image in a training step, to compare losses with the papers."""

import jax

SIGMA, HAS_TEXT, OFFSET, SECOND_SIGMA, TARGET = range(1, 6)


def keys_of(count, seed=3):
    """Return one key per image of a batch."""
    return jax.random.split(jax.random.key(seed), count)


def draw(keys, number, function):
    """Call `function` with the key of draw `number` of each image. Draw 0 is the noise itself."""
    return jax.vmap(lambda key: function(jax.random.fold_in(key, number)))(keys)


def normal(keys, number, *shape):
    """Return standard normal numbers of this shape for each image."""
    return draw(keys, number, lambda key: jax.random.normal(key, shape))


def has_text(keys, drop_prob):
    """Return which images keep their text, a boolean per image."""
    return draw(keys, HAS_TEXT, lambda key: jax.random.bernoulli(key, 1 - drop_prob))
