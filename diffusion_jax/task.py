"""The Task: the functions of a model that the training loop, sampling and evaluation call.

Each system (a package with models to train) builds its own Task. The functions at the end of the
file are shared by the losses of all systems.
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
from diffusion_jax.nn import ops

Params = Any
Frozen = Any
Batch = dict[str, Array]
Metrics = dict[str, Array]
# The arrays of a batch that describe the texts, as an encoder's `tokenize` returns them, and the
# array "low_res" for super-resolution. Each has one row per image.
Texts = Mapping[str, np.ndarray]
LossFn = Callable[[Params, Frozen, Batch, PRNGKeyArray], tuple[Float[Array, ""], Metrics]]
Guidance = float | Float[Array, "B"]
Sample = Callable[[Params, Frozen, Batch, Key[Array, "B"], Guidance | None], Images]
LABELS = ("sigma", "loss")  # Losses label their per-image sigma and loss with checkpoint_name.
LEVELS = (0.1, 0.3, 1.0, 3.0)  # Edges of the five sigma ranges in which losses are reported.


class Measure(NamedTuple):
    """Functions that measure the held-out loss of single images at given noise levels."""

    levels: Callable[[int], Float[np.ndarray, "n"]]
    """n -> n quantiles of the distribution of sigma in training."""
    errors: Callable[[Params, Frozen, Batch, Key[Array, "B"], Sigma], tuple[Sigma, Sigma]]
    """(params, frozen, batch, one key per image, one level per image) -> the unweighted loss and
    the v-loss of each image (see Objective.errors). No text is dropped."""


class Task(NamedTuple):
    """A model as pure functions, with the sharding of its parameters."""

    init: Callable[[PRNGKeyArray], Params]
    """key -> the initial parameters."""
    loss: LossFn
    """(params, frozen, batch, key) -> (the scalar to minimise, metrics)."""
    sample: Sample
    """(params, frozen, batch of texts, one key per image, guidance) -> images in about [-1, 1].

    An image depends only on its own key, text and guidance, not on the rest of the batch. If
    guidance is None, the network is evaluated with the text alone. This equals guidance 1 at half
    the cost, for the kinds of guidance in guidance.PLAIN_AT_1."""
    frozen: Frozen
    """Weights that are not trained. They are sharded, but never donated or saved in a checkpoint.
    """
    rules: Rules
    """Rules that give the sharding of each parameter by its path."""
    measure: Measure | None = None
    """Measures the loss of single images. None: the system has no held-out loss."""
    begin: Begin | None = None
    """Maps the arguments of `sample` to a samplers.Start, which holds the sampler's arguments.
    `sample` calls this function."""


def to_range(
    images: UInt8[ArrayLike, "B H W C"], pixels: str = "symmetric"
) -> Float[Array, "B H W C"]:
    """Scale pixels from 0 ... 255 to [-1, 1], or to [0, 1] if `pixels` is "unit"."""
    unit = jnp.asarray(images, jnp.float32) / 255
    return unit if pixels == "unit" else 2 * unit - 1


def normal_like(key: PRNGKeyArray, x: Images) -> Images:
    """Draw standard normal noise of the shape of x.

    The noise is drawn as an array with two axes, because four axes compile slower on CPUs.
    """
    return jax.random.normal(key, (len(x), x[0].size)).reshape(x.shape)


def kept_texts(key: PRNGKeyArray, num_texts: int, drop_prob: float) -> Bool[Array, "B"]:
    """Draw a mask of texts: False (drop this text) with probability `drop_prob`, else True."""
    return jax.random.bernoulli(key, 1 - drop_prob, (num_texts,))


def with_span(text: Float[Array, "B L D"], mask: Any, h: Sigma | None) -> tuple[Array, Any]:
    """Append a token that encodes MeanFlow's span h to the texts and their mask.

    Args:
        text: The text embeddings.
        mask: Which tokens are valid, bool [B, L]; None if all are valid.
        h: The span of each image, in [0, 1]. It is the length of the time interval over which the
            network predicts the mean velocity (diffusion/meanflow.py). None appends nothing.

    Returns:
        The embeddings [B, L + 1, D] and the mask [B, L + 1], which is None if `mask` is None.
    """
    if h is None:
        return text, mask
    token = ops.sinusoid(1000 * h, text.shape[-1])[:, None].astype(text.dtype)  # [B, 1, D]
    if mask is not None:
        mask = jnp.pad(mask, ((0, 0), (0, 1)), constant_values=True)
    return jnp.concatenate([text, token], axis=1), mask


def loss_by_noise_level(loss: Float[Array, "B"], sigma: Sigma) -> Metrics:
    """Return the sum ("level_loss") and number ("level_count") of the losses in each sigma range.

    LEVELS holds the edges of the five ranges. Both arrays have shape [5].
    """
    sigma, loss = checkpoint_name(sigma, LABELS[0]), checkpoint_name(loss, LABELS[1])
    level = jnp.searchsorted(jnp.array(LEVELS), sigma)  # [B]
    inside = level == jnp.arange(len(LEVELS) + 1)[:, None]  # [levels, B]
    # Not inside * loss: a non-finite loss would spoil the sums of all ranges.
    level_loss = jnp.where(inside, loss, 0).sum(1)
    return {"level_loss": level_loss, "level_count": inside.sum(1).astype(loss.dtype)}
