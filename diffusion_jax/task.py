"""Task: all that the loop, the sampler and the evaluation know of a system.

Below it is what the losses of all systems do alike.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, Bool, Float, Key, PRNGKeyArray, UInt8

from diffusion_jax.diffusion.precond import Images, Sigma
from diffusion_jax.diffusion.samplers import Begin
from diffusion_jax.machine.sharding import Rules

Params = Any
Frozen = Any
Batch = dict[str, Array]
Metrics = dict[str, Array]
# What an encoder's `tokenize` returns, and "low_res" of super-resolution models: a row an image.
Texts = Mapping[str, np.ndarray]
LossFn = Callable[[Params, Frozen, Batch, PRNGKeyArray], tuple[Float[Array, ""], Metrics]]
Guidance = float | Float[Array, "B"]
Sample = Callable[[Params, Frozen, Batch, Key[Array, "B"], Guidance | None], Images]
LABELS = ("sigma", "loss")  # Names of each sample's two numbers in the program of a loss.
LEVELS = (0.1, 0.3, 1.0, 3.0)  # Edges of the noise levels that losses are reported by.


class Measure(NamedTuple):
    """The loss of each image of a batch at a noise level of its own, its noise from its own key."""

    levels: Callable[[int], Float[np.ndarray, "n"]]
    """Quantiles of training's noise levels."""
    errors: Callable[[Params, Frozen, Batch, Key[Array, "B"], Sigma], tuple[Sigma, Sigma]]
    """(params, frozen, batch, a key an image, a level an image) to the loss of each, before any
    weighting, and to its v-loss, whatever is predicted: see Objective.errors. No text is dropped.
    """


class Task(NamedTuple):
    """A system as pure functions, and where its parameters live."""

    init: Callable[[PRNGKeyArray], Params]
    """The initial parameters."""
    loss: LossFn
    """(params, frozen, batch, key) to a scalar and metrics."""
    sample: Sample
    """(params, frozen, batch of texts, a key an image, guidance) to images, about [-1, 1].

    An image depends on its own key, text and guidance alone, not on its batch. None skips the
    unconditional half of the work, which guidance 1 needs not.
    """
    frozen: Frozen
    """Weights that are not trained: sharded, never donated, in no checkpoint."""
    rules: Rules
    """Where each parameter lives on the mesh."""
    measure: Measure | None = None
    """The loss of single images, for a held-out loss; None of a system that has none."""
    begin: Begin | None = None
    """Where `sample`, with the same arguments, starts."""


def to_range(
    images: UInt8[ArrayLike, "B H W C"], pixels: str = "symmetric"
) -> Float[Array, "B H W C"]:
    """0 ... 255 to [-1, 1], or to [0, 1] where `pixels` is "unit"."""
    unit = jnp.asarray(images, jnp.float32) / 255
    return unit if pixels == "unit" else 2 * unit - 1


def normal_like(key: PRNGKeyArray, x: Images) -> Images:
    """Standard normal, drawn flat: a 4-D draw of the same numbers compiles slower on CPUs."""
    return jax.random.normal(key, (len(x), x[0].size)).reshape(x.shape)


def kept_texts(key: PRNGKeyArray, num_texts: int, drop_prob: float) -> Bool[Array, "B"]:
    """Which texts a training step keeps: each is dropped with this probability (for guidance)."""
    return jax.random.bernoulli(key, 1 - drop_prob, (num_texts,))


def loss_by_noise_level(loss: Float[Array, "B"], sigma: Sigma) -> Metrics:
    """Sums and counts of a batch's losses within each of five ranges of sigma."""
    sigma, loss = checkpoint_name(sigma, LABELS[0]), checkpoint_name(loss, LABELS[1])
    level = jnp.searchsorted(jnp.array(LEVELS), sigma)  # [B]
    inside = level == jnp.arange(len(LEVELS) + 1)[:, None]  # [levels, B]
    # Not inside * loss, in which a loss that is not finite would spoil every level.
    level_loss = jnp.where(inside, loss, 0).sum(1)
    return {"level_loss": level_loss, "level_count": inside.sum(1).astype(loss.dtype)}
