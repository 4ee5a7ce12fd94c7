"""The state of a training run, and one optimisation step."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, ArrayLike, Float, Int, Key, PRNGKeyArray

from diffusion_jax.nn import ops
from diffusion_jax.task import Batch, Frozen, LossFn, Metrics, Params
from diffusion_jax.train import optimizer
from diffusion_jax.train.moving_average import (
    DecayAt,
    check_decays,
    constant_decay,
    ema_name,
    update_exponential,
    update_power_function,
)
from diffusion_jax.train.optimizer import keep_finite
from diffusion_jax.weights.power_averages import exponent, order, power_name


class TrainState(NamedTuple):
    """The training state: everything that a step changes and a checkpoint stores."""

    step: Int[Array, ""]  # Steps done, including skipped ones.
    params: Params
    ema: dict[str, Params]  # Averages of params, keyed by ema_name(decay) or power_name(width).
    opt_state: optax.OptState
    skipped: Int[Array, ""]  # Steps whose loss or gradient was not finite.


def averaged(state: TrainState) -> Params:
    """Return the average that images are drawn with, or the parameters if there is no average.

    Images are drawn with the exponential average that has the largest decay. If there are only
    power-function averages, they are drawn with the one that has the largest width.
    """
    return state.ema[max(state.ema, key=order)] if state.ema else state.params


def init_state(
    params: Params, tx: optax.GradientTransformation, ema_decays: Sequence[float], ema_widths: Sequence[float] = ()
) -> TrainState:
    """Return the state at step 0, in which every average equals `params`.

    Raises ValueError if a decay is outside [0, 1).
    """
    check_decays(ema_decays)
    # The averages are copies: the step donates its input, and no two leaves may share a buffer.
    names = [*map(ema_name, ema_decays), *map(power_name, ema_widths)]
    ema = {name: jax.tree.map(jnp.copy, params) for name in names}
    step, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return TrainState(step, params, ema, tx.init(params), skipped)


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformationExtraArgs,
    ema_decays: Sequence[float],
    ema_widths: Sequence[float] = (),
    *,
    passes: int = 1,
    clip: float = 1.0,
    decay_at: DecayAt = constant_decay,
    averages_from: int = 0,
    constrain: Callable[[Params], Params] = lambda params: params,
) -> Callable[[TrainState, Frozen, Batch, PRNGKeyArray], tuple[TrainState, Metrics]]:
    """Return train_step(state, frozen, batch, key) -> (state, metrics), ready for jax.jit.

    `key` is the run's key. `image_keys` makes a key for each image from it, so a resumed run
    draws the same noise, however the batch is divided. `metrics` holds loss, grad_norm (before
    clipping), lr, skipped (the number of skipped steps so far), param_norm and the metrics of
    `loss_fn`. The loss and the metrics of `loss_fn` are means over the micro batches.

    If the loss or the gradient norm is not finite, the step is skipped. Then only `step`, `skipped`
    and the averages of `ema_widths` change. These averages count the same parameters once more.

    The compiled step may donate `state`, but never `frozen`.

    Args:
        loss_fn: (params, frozen, batch, one key per image) -> (loss, metrics).
        tx: The optimizer, a result of `optimizer.make_optimizer`.
        ema_decays: The decays of the exponential averages.
        ema_widths: The relative widths of the power-function averages (Karras et al. 2024).
        passes: The number of micro batches. It must divide the batch size.
        clip: The largest global norm of the mean gradient; inf: no clipping.
        decay_at: (a decay in `ema_decays`, state.step - averages_from) -> the decay to use at this
            step.
        averages_from: The step at which the averages began.
        constrain: Projects updated parameters; the step returns its result.
    """

    gradient = _mean_gradient(loss_fn, passes)

    def train_step(state: TrainState, frozen: Frozen, batch: Batch, key: PRNGKeyArray):
        keys = image_keys(key, state.step, len(jax.tree.leaves(batch)[0]))
        (loss, extra), grads = gradient(state.params, frozen, batch, keys)
        grads = _laid_out(grads)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        with jax.named_scope("update"):
            updates, opt_state = tx.update(_clip(grads, norm, clip), state.opt_state, state.params, finite=finite)
            params = constrain(optax.apply_updates(state.params, updates))
            params = keep_finite(finite, params, state.params)
        with jax.named_scope("averages"):
            age = state.step - averages_from if averages_from else state.step
            ema = {
                ema_name(d): update_exponential(state.ema[ema_name(d)], params, decay_at(d, age)) for d in ema_decays
            }
            ema = keep_finite(finite, ema, {name: state.ema[name] for name in ema})
            for name, width in zip(map(power_name, ema_widths), ema_widths, strict=True):
                ema[name] = update_power_function(state.ema[name], params, exponent(width), age)
        skipped = state.skipped + jnp.where(finite, 0, 1)

        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "lr": optimizer.learning_rate(opt_state),
            "skipped": skipped,
            "param_norm": optax.tree.norm(params),
        }
        state = TrainState(state.step + 1, params, ema, opt_state, skipped)
        return state, extra | metrics

    return train_step


def _laid_out(grads: Params) -> Params:
    """On one GPU, keep gradients in the parameters' order of axes in memory.

    Otherwise, XLA updates the whole state in the order in which cuDNN returns the gradients, and
    copies it back: 1.0 GB per step of sr256_600m with one block per level. With several devices and
    a sharded state, this would gather half of the weights a second time.
    """
    if ops.platform() != "gpu" or jax.sharding.get_abstract_mesh().size > 1:
        return grads
    in_order = lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return jax.tree.map(in_order, grads)


def _mean_gradient(loss_fn: LossFn, passes: int):
    """Return a function (params, frozen, batch, keys) -> ((loss, metrics), gradients).

    It splits the batch into `passes` micro batches. All results are means over the micro
    batches.
    """
    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def mean_gradient(params, frozen, batch, keys):
        if passes == 1:  # Even a scan over one element is a loop, which is slow: see below.
            return gradient(params, frozen, batch, keys)

        def add(total, inputs):
            values, grads = gradient(params, frozen, *inputs)
            return jax.tree.map(jnp.add, total, grads), values

        zeros = jax.tree.map(jnp.zeros_like, params)
        # XLA's CPU backend runs the gradient of a convolution inside a loop some 30 times slower.
        unroll = passes if ops.platform() == "cpu" else 1
        total, values = jax.lax.scan(add, zeros, split((batch, keys), passes), unroll=unroll)
        grads = jax.tree.map(lambda g: g / passes, total)
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), values), grads

    return mean_gradient


def image_keys(key: PRNGKeyArray, step: ArrayLike, count: int) -> Key[Array, "{count}"]:
    """Return the keys of the images in the batch of `count` images that a training step takes.

    `key` is the run's key, and `step` the value of state.step before the training step.
    """
    key = jax.random.fold_in(key, step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))


def split(batch: Any, passes: int) -> Any:
    """Split the arrays [B, ...] of a batch into [a, B / a, ...] with a = `passes`.

    Micro batch i holds rows i, i + a, i + 2 a, ... So each device already holds its part of every
    micro batch. Raises ValueError if a does not divide B.
    """

    def rows(x):
        if len(x) % passes:
            raise ValueError(
                f"a batch of {len(x)} rows cannot be split into {passes} equal micro batches: "
                f"choose a batch size that is a multiple of {passes}"
            )
        x = x.reshape(len(x) // passes, passes, *x.shape[1:])
        return jnp.moveaxis(x, 1, 0)

    return jax.tree.map(rows, batch)


def _clip(grads: Params, norm: Float[Array, ""], clip: float) -> Params:
    """Scale gradients of the norm `norm` by min(1, clip / (norm + 1e-6)), as Megatron does."""
    scale = jnp.minimum(1.0, clip / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale, grads)
