"""Estimate the memory of a training step and the disk space of a run, without compiling."""

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from diffusion_jax.config.settings import SNAPSHOT_DTYPE, Optimizer, Run
from diffusion_jax.devices import flops, sharding, traced_memory
from diffusion_jax.devices.traced_memory import Lifetimes, TracedProgram
from diffusion_jax.task import Task
from diffusion_jax.train.optimizer import make_optimizer, snapshot_every
from diffusion_jax.train.state import TrainState, init_state

USABLE = 0.9
"""The share of a device's memory that arrays can use. The runtime, and gaps between arrays, take
the rest."""
SAMPLES = 1009
"""Batch size of the traced step. It is prime, so a dimension that it divides is a batch dimension.
"""
_COPIES = 1.18  # Factor for layout copies, reversed kernels and gaps, fitted to XLA's CPU compiler.


class Bytes(NamedTuple):
    """The bytes of memory that a training step needs on one device, by purpose."""

    parameters: int
    optimizer: int
    ema: int
    frozen: int
    batch: int
    temporary: int

    @property
    def total(self) -> int:
        return sum(self)


class Traced(NamedTuple):
    """A task and the traced program of its loss and gradient, for estimates at any batch size."""

    task: Task
    state: TrainState
    """A training state whose leaves are shapes."""
    example: Any
    """The arrays of a batch or their shapes. The number of rows does not matter."""
    program: TracedProgram
    flops: float
    """Floating-point operations per training sample, forward and backward."""


class Plan(NamedTuple):
    """The memory of a training step on a mesh."""

    traced: Traced
    passes: int
    """Micro batches of each device in one step."""
    samples: int
    """Samples of each device in one micro batch."""
    need: Bytes
    largest: int
    """Largest micro batch that fits and divides the samples of each device; 0 if none fits."""


def new_state(task: Task, settings: Optimizer, steps: int) -> TrainState:
    """Return the shapes of a training state at step 0. Nothing is computed."""
    tx = make_optimizer(settings, steps)
    create = lambda key: init_state(task.init(key), tx, settings.ema_decays, settings.ema_widths)
    return jax.eval_shape(create, abstract_key())


def trace(task: Task, state: TrainState, example: Any) -> Traced:
    """Trace the loss and gradient of a task, for estimates at any batch size and on any mesh.

    `state` holds the shapes of a training state. `example` is a batch with any number of rows.
    """
    gradient = jax.value_and_grad(task.loss, has_aux=True)
    batch, keys = batch_of(example, SAMPLES), abstract_keys(SAMPLES)
    arguments = (state.params, shapes(task.frozen), batch, keys)
    closed = jax.make_jaxpr(gradient)(*arguments)
    work = flops.count(closed.jaxpr) / SAMPLES
    return Traced(task, state, example, traced_memory.flatten(closed.jaxpr), work)


def plan(traced: Traced, mesh: Mesh | AbstractMesh, batch: int, passes: int, limit: float) -> Plan:
    """Estimate the memory of a training step, and find the largest micro batch that fits.

    Args:
        traced: The traced step.
        mesh: The devices.
        batch: The global batch size, a multiple of `passes` times the devices that share it.
        passes: The number of micro batches of each device in one step.
        limit: The memory in bytes that arrays can use on one device.
    """
    share, need = batch // sharding.batch_ways(mesh), needs(traced, mesh)
    samples = share // passes
    return Plan(traced, passes, samples, need(samples, passes), largest(need, share, limit))


def needs(traced: Traced, mesh: Mesh | AbstractMesh) -> Callable[[int, int], Bytes]:
    """Return a function that estimates the memory of a training step on one device.

    Its arguments are the samples per device in one micro batch, and the number of micro batches.
    """
    state, arrays = traced.state, lifetimes(traced, mesh)
    trees = state.params, state.opt_state, state.ema, shapes(traced.task.frozen)
    weights, moments, ema, frozen = (bytes_on_device(traced.task, t, mesh) for t in trees)
    row = sum(x.dtype.itemsize * math.prod(x.shape[1:]) for x in jax.tree.leaves(traced.example))

    def need(samples: int, passes: int) -> Bytes:
        gradients = weights if passes > 1 else 0  # The sum over the micro batches.
        temporary = peak(arrays, samples) + gradients
        return Bytes(weights, moments, ema, frozen, row * samples * passes, temporary)

    return need


def largest(need: Callable[[int, int], Bytes], share: int, limit: float) -> int:
    """Return the largest micro batch per device that fits into memory, or 0 if none fits.

    `need` is the result of `needs`, and `limit` the memory per device in bytes. The micro batch
    divides `share`, the samples per device in one step.
    """
    if need(share, 1).total <= limit:  # Alone, it needs no memory for the sum of gradients.
        return share
    sizes = [n for n in range(1, share) if share % n == 0]
    total = lambda n: need(n, share // n).total
    return [0, *sizes][bisect.bisect_right(sizes, limit, key=total)]


def drawing(task: Task, params: Any, texts: Any, rows: int) -> int:
    """Estimate the bytes on one device that temporary arrays take while it draws `rows` pictures.

    `params` holds the shapes of the parameters, and `texts` a batch of texts of any size. The
    estimate is the largest of the sampler's loops.
    """
    guidance = jax.ShapeDtypeStruct((SAMPLES,), jnp.float32)
    arguments = (params, shapes(task.frozen), batch_of(texts, SAMPLES), abstract_keys(SAMPLES), guidance)
    closed = jax.make_jaxpr(task.sample)(*arguments)
    return max(
        peak(traced_memory.lifetimes(traced_memory.flatten(body), SAMPLES, frozenset(), {}), rows)
        for body in traced_memory.loops(closed.jaxpr)
    )


class Disk(NamedTuple):
    """The disk space of a run: bytes per checkpoint and snapshot, and how many of each are kept."""

    checkpoint: int
    checkpoints: int
    snapshot: int
    """Bytes of one snapshot of the power-function averages."""
    snapshots: int

    @property
    def total(self) -> int:
        return self.checkpoint * self.checkpoints + self.snapshot * self.snapshots


def disk(run: Run, settings: Optimizer, state: TrainState) -> Disk:
    """Compute the disk space of a finished run. The leaves of `state` may be shapes."""
    leaves = jax.tree.leaves(state)
    checkpoints = run.keep_last + (run.steps // run.keep_every if run.keep_every else 0)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state.params)) * len(settings.ema_widths)
    snapshots = -(-run.steps // snapshot_every(settings, run.steps)) if numbers else 0
    each = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return Disk(each, checkpoints, numbers * jnp.dtype(SNAPSHOT_DTYPE).itemsize, snapshots)


def peak(arrays: Lifetimes, samples: int) -> int:
    """Estimate the largest number of bytes that a step's temporary arrays take on a device.

    `arrays` is the result of `lifetimes`. `samples` is the number of samples per device in one
    micro batch.
    """
    return int(_COPIES * traced_memory.peak(arrays, samples))


def lifetimes(traced: Traced, mesh: Mesh | AbstractMesh) -> Lifetimes:
    """Return the lifetimes and per-device sizes of the arrays in a traced step on `mesh`."""
    params, program = traced.state.params, traced.program
    weights = (params, shapes(traced.task.frozen))
    leaves, places = (jax.tree.leaves(tree) for tree in (weights, sharding.shardings(weights, mesh, traced.task.rules)))
    gathered = inputs_over("fsdp", program, places)
    halves, _ = traced_memory.split(program, inputs_over("tensor", program, places))
    trained = len(jax.tree.leaves(params))
    gradients = zip(program.outputs[-trained:], leaves, places, strict=False)
    results = {v: _shard_bytes(leaf, place) for v, leaf, place in gradients}
    ways = {v: mesh.shape["tensor"] for v in halves}
    return traced_memory.lifetimes(program, SAMPLES, gathered, results, ways)


def inputs_over(axis: str, program: TracedProgram, places: Sequence[Any]) -> set[int]:
    """Return the variable numbers of those inputs of a program that are sharded over a mesh axis.

    `places` holds the shardings of the program's first inputs, in order. Other inputs are ignored.
    """
    over = lambda names: axis in ((names,) if isinstance(names, str) else names or ())
    pairs = zip(program.inputs, places, strict=False)
    return {v for v, place in pairs if any(map(over, place.spec))}


def bytes_on_device(task: Task, tree: Any, mesh: Mesh | AbstractMesh) -> int:
    """Return the bytes that a tree, sharded by the rules of the task, takes on one device."""
    layout = sharding.shardings(tree, mesh, task.rules)
    return sum(jax.tree.leaves(jax.tree.map(_shard_bytes, tree, layout)))


def shapes(tree: Any) -> Any:
    """Replace each array of a tree by its jax.ShapeDtypeStruct, without reading the array."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def batch_of(example: Any, size: int) -> Any:
    """Return the shapes of a batch like `example`, but with `size` rows."""
    rows = lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
    return jax.tree.map(rows, dict(example))


def abstract_key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))


def _shard_bytes(leaf: Any, place: Any) -> int:
    return leaf.dtype.itemsize * math.prod(place.shard_shape(leaf.shape))


def abstract_keys(rows: int) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of random keys, one for each of `rows` images."""
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
