"""The memory of a training step on a device, and a run's disk, from shapes: nothing is compiled."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from diffusion_jax.config.settings import Optimizer, Run
from diffusion_jax.machine import flops, sharding, traced_memory
from diffusion_jax.machine.traced_memory import Lifetimes, Program
from diffusion_jax.task import Task
from diffusion_jax.train.optimizer import snapshot_every
from diffusion_jax.train.state import TrainState

USABLE = 0.9
"""The share of a device's memory that arrays may fill: the runtime and gaps take the rest."""
SAMPLES = 1009
"""Those of a traced step: a prime, so that a size which it divides is one of the batch."""
_COPIES = 1.18  # Of temporaries: layouts, reversed kernels, gaps. Fitted to XLA's CPU compiler.


class Bytes(NamedTuple):
    """The memory that a device needs, by what it holds."""

    parameters: int
    optimizer: int
    ema: int
    frozen: int
    batch: int
    temporary: int

    @property
    def total(self) -> int:
        """The bytes of all kinds together."""
        return sum(self)


class Traced(NamedTuple):
    """A task and the program of its loss and gradient; no number of it depends on a batch."""

    task: Task
    state: TrainState
    """Shapes."""
    example: Any
    """Arrays of a batch, or their shapes, with any number of rows."""
    program: Program
    flops: float
    """A training sample's, forward and backward."""


def trace(task: Task, state: TrainState, example: Any) -> Traced:
    """Traces loss and gradient once, for all batches and meshes: seconds, and no compiling."""
    gradient = jax.value_and_grad(task.loss, has_aux=True)
    arguments = (state.params, shapes(task.frozen), batch_of(example, SAMPLES), abstract_key())
    closed = jax.make_jaxpr(gradient)(*arguments)
    work = flops.count(closed.jaxpr) / SAMPLES
    return Traced(task, state, example, traced_memory.flatten(closed.jaxpr), work)


def bytes_per_device(traced: Traced, mesh: Mesh | AbstractMesh, samples: int, passes: int) -> Bytes:
    """Where the memory goes of a step of so many passes with `samples` of a device in each."""
    held = lambda tree: bytes_on_device(traced.task, tree, mesh)
    parameters = held(traced.state.params)
    temporary = peak(lifetimes(traced, mesh), samples)
    row = sum(x.dtype.itemsize * math.prod(x.shape[1:]) for x in jax.tree.leaves(traced.example))
    return Bytes(
        parameters=parameters,
        optimizer=held(traced.state.opt_state),
        ema=held(traced.state.ema),
        frozen=held(shapes(traced.task.frozen)),
        batch=row * samples * passes,
        temporary=temporary + (parameters if passes > 1 else 0),  # The sum of the gradients so far.
    )


class Disk(NamedTuple):
    """Bytes of what a run keeps, and how many of each."""

    checkpoint: int
    checkpoints: int
    snapshot: int
    """Of the averages by power functions."""
    snapshots: int

    @property
    def total(self) -> int:
        """The bytes of all."""
        return self.checkpoint * self.checkpoints + self.snapshot * self.snapshots


def disk(run: Run, settings: Optimizer, state: TrainState) -> Disk:
    """What the run keeps at its end, of a state of these shapes."""
    leaves = jax.tree.leaves(state)
    kept = run.keep_last + (run.steps // run.keep_every if run.keep_every else 0)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state.params)) * len(settings.ema_widths)
    snapshots = -(-run.steps // snapshot_every(settings, run.steps)) if numbers else 0
    each = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return Disk(each, kept, numbers * jnp.dtype(settings.snapshot_dtype).itemsize, snapshots)


def peak(arrays: Lifetimes, samples: int) -> int:
    """The most bytes of temporaries at once, for so many samples of a device in a pass."""
    return int(_COPIES * traced_memory.peak(arrays, samples))


def lifetimes(traced: Traced, mesh: Mesh | AbstractMesh) -> Lifetimes:
    """When each array of the step lives, on a device of this mesh."""
    params, program = traced.state.params, traced.program
    weights = (params, shapes(traced.task.frozen))
    leaves, places = (
        jax.tree.leaves(tree)
        for tree in (weights, sharding.shardings(weights, mesh, traced.task.rules))
    )
    gathered = inputs_over("fsdp", program, places)
    halves, _ = traced_memory.split(program, inputs_over("tensor", program, places))
    trained = len(jax.tree.leaves(params))
    gradients = zip(program.outputs[-trained:], leaves, places, strict=False)
    results = {v: _shard_bytes(leaf, place) for v, leaf, place in gradients}
    ways = {v: mesh.shape["tensor"] for v in halves}
    return traced_memory.lifetimes(program, SAMPLES, gathered, results, ways)


def inputs_over(axis: str, program: Program, places: Sequence[Any]) -> set[int]:
    """The inputs that this axis of the mesh splits, of weights in these places."""
    over = lambda names: axis in ((names,) if isinstance(names, str) else names or ())
    pairs = zip(program.inputs, places, strict=False)
    return {v for v, place in pairs if any(map(over, place.spec))}


def bytes_on_device(task: Task, tree: Any, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of these arrays on a device, where the task's rules place them."""
    layout = sharding.shardings(tree, mesh, task.rules)
    return sum(jax.tree.leaves(jax.tree.map(_shard_bytes, tree, layout)))


def shapes(tree: Any) -> Any:
    """The shapes of arrays, also of those that were not read yet."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def batch_of(example: Any, size: int) -> Any:
    """The shapes of a batch with this number of rows."""
    rows = lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
    return jax.tree.map(rows, dict(example))


def abstract_key() -> jax.ShapeDtypeStruct:
    """The shape of a random key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def _shard_bytes(leaf: Any, place: Any) -> int:
    return leaf.dtype.itemsize * math.prod(place.shard_shape(leaf.shape))
