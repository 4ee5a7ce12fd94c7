"""Fields as inputs of a network: named numbers of each picture, such as an aesthetic score.

In a condition, a field is an array [B, 2] under Field.key. Its row is (x, 1) for a number that is
scaled to x in [0, 1], and (0, 0) for an unknown or dropped number.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from diffusion_jax.config.picture_fields import PREFIX, Field, arrays
from diffusion_jax.nn import ops
from diffusion_jax.nn.layers import dense

Condition = Mapping[str, Array]
_CHANNELS = 64  # Number of sinusoids of a number.


def condition(
    fields: Sequence[Field], batch: Mapping[str, Any], values: Mapping[str, float] = {}
) -> dict[str, Float[Array, "B 2"]]:
    """Return the fields of a batch as inputs of the network, keyed by Field.key.

    The batch holds the numbers as float [B] under Field.key, with NaN for an unknown number. If
    the batch lacks a field, its number is taken from `values`. If `values` lacks it too, it is
    unknown.
    """
    inputs, rows = {}, len(next(iter(batch.values()), ()))
    defaults = arrays(fields, values, rows)
    for field in fields:
        number = jnp.asarray(batch.get(field.key, defaults[field.key]))  # [B]
        known = jnp.isfinite(number)
        scaled = (jnp.where(known, number, field.low) - field.low) / (field.high - field.low)
        inputs[field.key] = jnp.stack([scaled, known.astype(scaled.dtype)], axis=1)  # [B, 2]
    return inputs


def example(fields: Sequence[Field]) -> dict[str, Float[Array, "1 2"]]:
    """Return the fields of one image, all unknown, to initialise a network."""
    return {field.key: jnp.zeros((1, 2)) for field in fields}


def unknown(inputs: Condition) -> Condition:
    """Return the fields among the inputs of a network as if they were unknown."""
    return {name: jnp.zeros_like(x) for name, x in inputs.items() if name.startswith(PREFIX)}


def dropped(inputs: Condition, keys: Key[Array, "B"], drop_prob: float) -> Condition:
    """Drop each field among the inputs of a network with a probability, independently."""
    kept = dict(inputs)
    for number, name in enumerate(unknown(inputs)):
        keep = lambda key, number=number: jax.random.bernoulli(jax.random.fold_in(key, number), 1 - drop_prob)
        kept[name] = inputs[name] * jax.vmap(keep)(keys)[:, None]
    return kept


def with_fields(emb: Float[Array, "B E"], fields: Condition) -> Float[Array, "B E"]:
    """Add the embeddings of all fields to the embedding of the time.

    Call this function in the `__call__` of a network, so that the parameters belong to it.

    Args:
        emb: The embedding of the time.
        fields: The arguments of the network that it does not name itself.

    Raises:
        TypeError: An argument is not a field.
    """
    for name, field in fields.items():
        if not name.startswith(PREFIX):
            raise TypeError(f"the network has no argument {name!r}")
        emb = emb + FieldEmbed(emb.shape[-1], emb.dtype, name=name)(field)
    return emb


class FieldEmbed(nn.Module):
    """Embedding of a number: sinusoids, or a learned vector if it is unknown, then two layers.

    The last layer starts at zero, so that a new field does not change a trained network.
    """

    width: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, field: Float[Array, "B 2"]):
        """Return the vector to add to the embedding of the time, [B, width]."""
        learned = self.param("unknown_embedding", nn.initializers.normal(1.0), (_CHANNELS,))
        known = field[:, 1:]  # [B, 1]
        h = known * ops.sinusoid(1000 * field[:, 0], _CHANNELS) + (1 - known) * learned
        h = nn.silu(dense(h.astype(self.dtype), self.width, "dense1", dtype=self.dtype))
        return dense(h, self.width, "dense2", zero=True, dtype=self.dtype)  # [B, width]
