"""The optimizers, first of all AdamW as in NeMo, and learning-rate schedules."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int
from optax import contrib

from diffusion_jax.config import ranges
from diffusion_jax.config.named import Table, one_of
from diffusion_jax.config.ranges import DTYPES, Count, Decay, Positive
from diffusion_jax.config.settings import Optimizer
from diffusion_jax.devices import sharding

Schedule = Callable[[ArrayLike], Float[Array, ""]]
Factors = Sequence[tuple[str, float]]
"""Pairs of a regular expression and the factor of the parameters whose paths it matches."""
MomentDtype = Annotated[str, DTYPES[:2]]
T = TypeVar("T")
_FACTORS = ("lr_factors", "decay_factors")  # Fields of the config group.
_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # Coefficients by Jordan et al. 2024.
_OUTER = ("init_conv", "out_conv", "patch_in")  # The first and last layers of the networks.


class ScheduleState(NamedTuple):
    """The number of updates so far, and the learning rate of the last update, initially 0."""

    updates: Int[Array, ""]
    learning_rate: Float[Array, ""]


def warmup_constant(lr: float, warmup: int) -> Schedule:
    """Return a schedule: lr (step + 1) / (warmup + 1) until step `warmup`, then lr.

    This is NeMo's WarmupPolicy.
    """

    def schedule(step):
        return lr * jnp.minimum((jnp.asarray(step, jnp.float32) + 1) / (warmup + 1), 1.0)

    return schedule


def warmup_ldm(lr: float, warmup: int) -> Schedule:
    """Return a schedule: lr (1e-6 + (1 - 1e-6) step / warmup) until step `warmup`, then lr.

    LDM and MLPerf use this schedule.
    """

    def schedule(step):
        share = jnp.asarray(step, jnp.float32) / max(1, warmup)
        return lr * jnp.where(step < warmup, 1e-6 + (1 - 1e-6) * share, 1.0)

    return schedule


def warmup_cosine(lr: float, warmup: int, steps: int) -> Schedule:
    """Return a schedule: `warmup_constant` to step `warmup`, then half a cosine to 0 at `steps`.

    Raises ValueError unless `steps` is larger than `warmup`.
    """
    if steps <= warmup:
        raise ValueError(
            f"a cosine schedule of {steps} steps has no room after {warmup} steps of warm-up: "
            "raise steps or lower optimizer.warmup"
        )
    warm = warmup_constant(lr, warmup)

    def schedule(step):
        past = jnp.clip((jnp.asarray(step, jnp.float32) - warmup) / (steps - warmup), 0.0, 1.0)
        return warm(step) * 0.5 * (1 + jnp.cos(jnp.pi * past))

    return schedule


def warmup_stable_decay(lr: float, warmup: int, steps: int) -> Schedule:
    """Return a schedule: `warmup_constant`, with a fall to 0 over the last fifth of `steps`.

    After a share s of the last fifth, the rate is lr (1 - sqrt(s)) (Hägele et al. 2024, arXiv
    2405.18392). To train for longer, continue from a checkpoint before the fall. Raises ValueError
    if the fall begins before the warm-up ends.
    """
    start = steps - steps // 5
    if start <= warmup:
        raise ValueError(
            f"a wsd schedule of {steps} steps falls from step {start}, before its warm-up "
            f"of {warmup} steps ends: raise steps or lower optimizer.warmup"
        )
    warm = warmup_constant(lr, warmup)

    def schedule(step):
        past = jnp.clip((jnp.asarray(step, jnp.float32) - start) / (steps - start), 0.0, 1.0)
        return warm(step) * (1 - jnp.sqrt(past))

    return schedule


def inverse_sqrt(lr: float, warmup: int, decay_from: int) -> Schedule:
    """Return a schedule: `warmup_constant`, divided by sqrt(max(step / decay_from, 1)).

    EDM2 uses this schedule (Karras et al. 2024, "Analyzing and Improving the Training Dynamics of
    Diffusion Models").
    """
    warm = warmup_constant(lr, warmup)

    def schedule(step):
        return warm(step) * jax.lax.rsqrt(jnp.maximum(jnp.asarray(step) / decay_from, 1.0))

    return schedule


SCHEDULES: Mapping[str, Callable[[Optimizer, int], Schedule]] = {
    "constant": lambda s, steps: warmup_constant(s.lr, s.warmup),
    "ldm": lambda s, steps: warmup_ldm(s.lr, s.warmup),
    "cosine": lambda s, steps: warmup_cosine(s.lr, s.warmup, steps),
    "wsd": lambda s, steps: warmup_stable_decay(s.lr, s.warmup, steps),
    "inverse_sqrt": lambda s, steps: inverse_sqrt(s.lr, s.warmup, s.decay_from),
}


def make_schedule(settings: Optimizer, steps: int) -> Schedule:
    """Return the learning rate schedule of a config, for a run that ends at step `steps`.

    `settings.schedule` is a key of SCHEDULES. The schedule covers the steps from `settings.restart`
    to `steps`. Raises ValueError if these are too few for this schedule.
    """
    first = settings.restart
    if first >= steps:
        raise ValueError(
            f"optimizer.restart is {first}, but the run ends at step {steps}: raise steps, or set optimizer.restart=0"
        )
    schedule = SCHEDULES[settings.schedule](settings, steps - first)
    return (lambda step: schedule(jnp.maximum(step - first, 0))) if first else schedule


def make_optimizer(settings: Optimizer, steps: int) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a config, for a run of `steps` steps.

    Raises ValueError if the optimizer or a parameter of it is unknown, or if `steps` is too small
    for the schedule.
    """
    direction = OPTIMIZERS.bound("optimizer.name", settings.name, settings)()
    factors = [_read_factors(name, getattr(settings, name)) for name in _FACTORS]
    schedule = make_schedule(settings, steps)
    return with_schedule(direction, schedule, settings.weight_decay, *factors)


def check(settings: Optimizer, steps: int) -> None:
    """Check the config's optimizer settings, for a run of `steps` steps.

    Raises ValueError if the optimizer or the schedule is unknown, a parameter of the optimizer is
    out of range, or `steps` is too small for the schedule.
    """
    ranges.check_value("optimizer.name", settings.name, Annotated[str, OPTIMIZERS])
    one_of("optimizer.schedule", settings.schedule, SCHEDULES)
    make_optimizer(settings, steps)


def num_passes(settings: Optimizer, batch_size: int, mesh: Mesh | AbstractMesh) -> int:
    """Return the number of passes of a step, each over one micro batch of every device.

    Raises ValueError if the batch cannot be divided into equal micro batches over the devices.
    """
    sharding.check_batch(batch_size, settings.micro_batch, mesh)
    rows = settings.micro_batch * sharding.batch_ways(mesh)
    return batch_size // rows if rows else 1


def check_dtype(name: str, network: Any) -> None:
    """Raise ValueError if `network`, the config group `name`, would train in float16.

    Small gradients are 0 in float16, because training does not scale the loss.
    """
    if network.dtype == jnp.float16:
        raise ValueError(
            f"{name}.dtype is float16, in which small gradients become 0: train with "
            f"--config.{name}.dtype=bfloat16 or float32, and use float16 only to draw"
        )


def snapshot_every(settings: Optimizer, steps: int) -> int:
    """Return the number of steps between two snapshots of the power-function averages.

    Return 0 if the run has no such averages.
    """
    return (settings.snapshot_every or -(-steps // 32)) if settings.ema_widths else 0


def adamw(
    schedule: Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    moment_dtype: str = "float32",
) -> optax.GradientTransformationExtraArgs:
    """Return Adam with decoupled weight decay (Loshchilov & Hutter 2019) on every parameter.

    Biases decay too, as in NeMo's Imagen. The first moment is stored in `moment_dtype`.
    """
    direction = adam(b1=b1, b2=b2, eps=eps, moment_dtype=moment_dtype)
    return with_schedule(direction, schedule, weight_decay)


def with_schedule(
    direction: optax.GradientTransformation,
    schedule: Schedule,
    weight_decay: float,
    lr_factors: Factors = (),
    decay_factors: Factors = (),
) -> optax.GradientTransformationExtraArgs:
    """Add weight decay and a learning rate to the directions of updates.

    The optimizer's state holds the learning rate of the last update, which the function
    `learning_rate` reads. The optimizer's `update` takes a bool `finite`, True by default. If it is
    False, the state does not change, and the caller must not apply the updates.
    """
    decayed = optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda u, p, factor: u + weight_decay * factor * p,
            updates,
            params,
            _factors("decay_factors", decay_factors, params),
        )
    )
    return optax.chain(direction, decayed, _scale_by_schedule(schedule, lr_factors))


def adam(
    *, b1: Decay = 0.9, b2: Decay = 0.999, eps: Positive = 1e-8, moment_dtype: MomentDtype = "float32"
) -> optax.GradientTransformation:
    """Adam (Kingma & Ba 2015), as AdamW with `weight_decay`."""
    # As optax.scale_by_adam, but the state is updated only if `finite` is True.
    adam = optax.scale_by_adam(b1, b2, eps, mu_dtype=moment_dtype)

    def update(updates, state, params=None, *, finite=True, **_):
        del params
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        count = optax.safe_increment(state.count)
        mu, nu = keep_finite(finite, (mu, nu), (state.mu, state.nu))
        means = optax.tree.bias_correction(mu, b1, count)
        squares = optax.tree.bias_correction(nu, b2, count)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), means, squares)
        count, mu = keep_finite(finite, count, state.count), optax.tree.cast_like(mu, state.mu)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(adam.init, update)


def lion(*, b1: Decay = 0.9, b2: Decay = 0.99, moment_dtype: MomentDtype = "float32") -> optax.GradientTransformation:
    """Lion (Chen et al. 2023): the sign of a mean gradient. Divide the learning rate by 3 to 10."""
    return _if_finite(optax.scale_by_lion(b1, b2, mu_dtype=moment_dtype))


def sgd(*, momentum: Decay = 0.9) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum."""
    return _if_finite(optax.trace(momentum))


def adafactor() -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018) without momentum. Its state is smaller than Adam's."""
    return _if_finite(optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)))


def muon(
    *,
    beta: Decay = 0.95,
    ns_steps: Count = 5,
    rms: Positive = 0.2,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: Positive = 1e-8,
    moment_dtype: MomentDtype = "float32",
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024): orthogonalised momentum for kernels, and Adam for the rest.

    A kernel [..., out] is orthogonalised as a matrix [prod(...), out]. Adam updates biases, norms,
    embeddings, and the first and last layers (_OUTER). Updates of kernels have about the root mean
    square `rms`, as Adam's have (Liu et al. 2025), so both use the same learning rate.
    """
    kernels = lambda tree: jax.tree.map_with_path(lambda path, x: "muon" if _is_inner_kernel(path, x) else "adam", tree)
    matrices = lambda tree: jax.tree.map(
        lambda x: contrib.MuonDimensionNumbers(tuple(range(x.ndim - 1)), x.ndim - 1), tree
    )
    # An orthogonal matrix [m, n] has the root mean square 1 / sqrt(max(m, n)).
    scaled = lambda x: rms * max(x.size // x.shape[-1], x.shape[-1]) ** 0.5 * x
    momentum = contrib.scale_by_muon(
        _NEWTON_SCHULZ, ns_steps, beta, mu_dtype=moment_dtype, weight_dimension_numbers=matrices
    )

    # Muon's coefficients are constants: keep them out of the checkpoint.
    def init(params: Any) -> Any:
        state: Any = momentum.init(params)
        return state._replace(ns_coeffs=())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        full = state._replace(ns_coeffs=jnp.array(_NEWTON_SCHULZ))
        updates, new = momentum.update(updates, full, params)
        return jax.tree.map(scaled, updates), new._replace(ns_coeffs=())  # pyright: ignore

    orthogonal = optax.GradientTransformation(init, update)
    others = optax.scale_by_adam(b1, b2, eps, mu_dtype=moment_dtype)
    return _if_finite(optax.partition({"muon": orthogonal, "adam": others}, kernels))


OPTIMIZERS = Table(adamw=adam, muon=muon, lion=lion, adafactor=adafactor, sgd=sgd)
"""The functions that optimizer.name can name in configs. Each returns the direction of updates, to
which `with_schedule` adds the rest. Parameters such as b1 take the config fields of these names."""


def learning_rate(opt_state: optax.OptState) -> Float[Array, ""]:
    """Read the learning rate of the last update in `opt_state`, the state of an optimizer."""
    return opt_state[-1].learning_rate  # pyright: ignore[reportIndexIssue, reportAttributeAccessIssue]


def at_step(opt_state: optax.OptState, step: int) -> optax.OptState:
    """Return `opt_state`, an optimizer's state, with its learning rate schedule at step `step`."""
    states: Any = opt_state
    return (*states[:-1], states[-1]._replace(updates=jnp.int32(step)))


def keep_finite(finite: ArrayLike, new: T, old: T) -> T:
    """Return the tree `new` if `finite` is True, and the tree `old` otherwise.

    XLA fuses one select per leaf into the loop that computes the leaf. It cannot fuse a lax.cond.
    Compute other trees, such as the EMA, from the returned tree; otherwise XLA's CPU backend adds a
    copy.
    """
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)


def _is_inner_kernel(path: Any, x: Any) -> bool:
    """Return whether a parameter is a kernel of two or more axes that Muon orthogonalises."""
    names = _path(path).split("/")
    is_kernel = names[-1].endswith("kernel") or names[-1] in ("down", "up")  # "up" of a LoRA.
    is_outer = any(name in _OUTER for name in names) or names[-3:-1] == ["params", "out"]
    return x.ndim > 1 and is_kernel and not is_outer


def _if_finite(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return `tx` with one change: the state is updated only if `finite` is True."""

    def update(updates, state, params=None, *, finite=True, **_):
        updates, new = tx.update(updates, state, params)
        return updates, keep_finite(finite, new, state)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _read_factors(name: str, text: str) -> Factors:
    """Read a config field such as "bias$=0,out_conv=0.1". Raises ValueError if it is invalid."""
    factors = []
    for part in text.split(",") if text else ():
        pattern, _, number = part.strip().rpartition("=")
        try:
            factors.append((re.compile(pattern).pattern, float(number)))
            if not pattern or not 0 <= factors[-1][1] < math.inf:
                raise ValueError
        except (ValueError, re.error):
            raise ValueError(
                f"optimizer.{name} is {text!r}: write REGEX=FACTOR, such as bias$=0, with a valid "
                "regular expression and a factor from 0"
            ) from None
    return tuple(factors)


def _factors(name: str, factors: Factors, params: Any) -> Any:
    """Return the factor of each parameter. Raises ValueError if a pattern matches none."""
    paths = jax.tree.map_with_path(lambda path, _: _path(path), params)
    for pattern, _ in factors:
        if not any(re.search(pattern, path) for path in jax.tree.leaves(paths)):
            raise ValueError(
                f"optimizer.{name} has {pattern!r}, which matches no parameter: choose from paths "
                f"such as {', '.join(jax.tree.leaves(paths)[:3])}"
            )
    of = lambda path: [1.0, *(f for pattern, f in factors if re.search(pattern, path))][-1]
    return jax.tree.map(of, paths)


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _scale_by_schedule(schedule: Schedule, factors: Factors) -> optax.GradientTransformationExtraArgs:
    """Return the transformation update -> -lr * update, whose state is a ScheduleState."""

    def init(params):
        del params
        return ScheduleState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))

    def update(updates, state, params=None, *, finite=True, **_):
        del params
        lr = schedule(state.updates)
        scales = _factors("lr_factors", factors, updates)
        updates = jax.tree.map(lambda u, scale: -lr * scale * u, updates, scales)
        return updates, keep_finite(finite, ScheduleState(state.updates + 1, lr), state)

    return optax.GradientTransformationExtraArgs(init, update)
