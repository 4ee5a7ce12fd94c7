"""The Task: the functions of a model that the training loop, sampling and evaluation call.

`model.make_task` makes it from what a system (a package with models to train) supplies.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key, PRNGKeyArray, UInt8

from diffusion_jax.devices.sharding import ShardingRules
from diffusion_jax.diffusion.precond import Images, Sigma
from diffusion_jax.diffusion.samplers import InputsFunction

Params = Any
Frozen = Any
Batch = dict[str, Array]
Metrics = dict[str, Array]
# The arrays of a batch that describe the texts, as an encoder's `tokenize` returns them, and the
# array "low_res" for super-resolution. Each has one row per image.
Texts = Mapping[str, np.ndarray]
LossFn = Callable[[Params, Frozen, Batch, Key[Array, "B"]], tuple[Float[Array, ""], Metrics]]
Losses = Float[Array, "B"]
Guidance = float | Float[Array, "B"]
Sample = Callable[[Params, Frozen, Batch, Key[Array, "B"], Guidance | None], Images]
LABELS = ("sigma", "loss")  # Losses label their per-image sigma and loss with checkpoint_name.
LEVELS = (0.1, 0.3, 1.0, 3.0)  # Edges of the five sigma ranges in which losses are reported.


class Measure(NamedTuple):
    """Functions that measure the held-out loss of single images at given noise levels."""

    levels: Callable[[int], Float[np.ndarray, "n"]]
    """n -> n quantiles of the distribution of sigma in training."""
    errors: Callable[[Params, Frozen, Batch, Key[Array, "B"], Sigma], tuple[Losses, Losses]]
    """(params, frozen, batch, one key per image, one level per image) -> the unweighted loss and
    the v-loss of each image, as Objective.errors defines them. No text is dropped."""


class Task(NamedTuple):
    """A model as pure functions, with the sharding of its parameters."""

    init: Callable[[PRNGKeyArray], Params]
    """key -> the initial parameters."""
    loss: LossFn
    """(params, frozen, batch, one key per image) -> (the scalar to minimise, metrics).

    All noise of an image comes from its key, so it does not depend on the rest of the batch."""
    sample: Sample
    """(params, frozen, batch of texts, one key per image, guidance) -> images in about [-1, 1].

    An image depends only on its own key, inputs and guidance, not on the rest of the batch, up to
    rounding. If guidance is None, the network is evaluated with the text alone. This equals
    guidance 1 at half the cost, for the kinds of guidance in guidance.PLAIN_AT_1."""
    frozen: Frozen
    """Weights that are not trained. They are sharded, but never donated or saved in a checkpoint.
    """
    rules: ShardingRules
    """Rules that give the sharding of each parameter by its path."""
    measure: Measure | None = None
    """Measures the loss of single images. None: the system has no held-out loss."""
    sampler_inputs: InputsFunction | None = None
    """Maps the arguments of `sample` to SamplerInputs, which hold the sampler's arguments.
    `sample` calls this function."""
    constrain: Callable[[Params], Params] = lambda params: params
    """Projects updated parameters, such as weights that must keep length 1. A training step returns
    its result."""
    shown: Callable[[Frozen, Batch], Images | None] = lambda frozen, batch: None
    """Returns the pictures, in [-1, 1], of a training batch without "image", or None."""


def to_range(images: UInt8[ArrayLike, "B H W C"], pixels: str = "symmetric") -> Float[Array, "B H W C"]:
    """Scale pixels from 0 ... 255 to [-1, 1], or to [0, 1] if `pixels` is "unit"."""
    unit = jnp.asarray(images, jnp.float32) / 255
    return unit if pixels == "unit" else 2 * unit - 1
