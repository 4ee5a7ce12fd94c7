"""What a config needs on a target, computed: memory, arithmetic, communication, time, disk."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from diffusion_jax.machine import flops, sharding
from diffusion_jax.precache import cost
from launch import accelerators
from launch.accelerators import Target
from launch.planner import memory, systems, traffic
from launch.planner.memory import Lifetimes, Program
from launch.planner.systems import Model
from launch.planner.traffic import Collective

USABLE = 0.9
"""Of a device's memory: the rest is for the runtime and for gaps between arrays."""
_COPIES = 1.25  # Of temporaries: layouts, reversed kernels, gaps. Fitted to XLA's CPU compiler.
_SAMPLES = 1009  # A prime, so that a size which it divides is one of the batch.
_TOKENS, _CAPTION = 25, 100  # Of a caption, on average: T5 tokens, bytes.


class Traced(NamedTuple):
    """A model and the program of its loss and gradient; no number of it depends on a batch."""

    model: Model
    program: Program
    flops: float
    """Of a training sample, forward and backward."""


class Bytes(NamedTuple):
    """On each device."""

    parameters: int
    optimizer: int
    ema: int
    frozen: int
    batch: int
    temporary: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class Step(NamedTuple):
    """Predicted seconds of a step, by what is busy."""

    arithmetic: float
    """At the stated utilization."""
    update: float
    """Reading and writing parameters, moments and averages once, at full memory bandwidth."""
    communication: float
    """At full bandwidth, nothing at the same time."""

    @property
    def hidden(self) -> float:
        """Where communication hides behind arithmetic as far as that lasts."""
        return max(self.arithmetic, self.communication) + self.update

    @property
    def exposed(self) -> float:
        """Where nothing is hidden."""
        return sum(self)


def trace(model: Model) -> Traced:
    """Traces loss and gradient once, for all batches and meshes: seconds, and no compiling."""
    gradient = jax.value_and_grad(model.task.loss, has_aux=True)
    closed = jax.make_jaxpr(gradient)(
        model.state.params,
        systems.frozen_shapes(model.task),
        systems.batch_shapes(model, _SAMPLES),
        systems.abstract_key(),
    )
    work = flops.count(closed.jaxpr) / _SAMPLES
    return Traced(model, memory.flatten(closed.jaxpr), work)


def mesh_of(model: Model, devices: int) -> AbstractMesh:
    """The config's mesh over that many devices; ValueError that gives the arithmetic."""
    return accelerators.mesh_over(tuple(model.mesh), devices)


def local_batch(model: Model, mesh: AbstractMesh) -> int:
    """Samples that a device works on at a time; ValueError unless the batch divides."""
    sharding.check_batch(model.run.batch_size, model.optimizer.accumulate, mesh)
    ways = mesh.shape["replica"] * mesh.shape["fsdp"]
    return model.run.batch_size // (ways * model.optimizer.accumulate)


def bytes_per_device(traced: Traced, mesh: AbstractMesh) -> Bytes:
    """Where the memory goes, the temporary part by launch/planner/memory.py's model."""
    model = traced.model
    layout = sharding.shardings(model.state, mesh, model.task.rules)
    frozen = systems.frozen_shapes(model.task)
    frozen_layout = sharding.shardings(frozen, mesh, model.task.rules)
    samples = local_batch(model, mesh)
    example = sum(leaf.nbytes for leaf in model.example.values())
    parameters = _bytes(model.state.params, layout.params)
    temporary = int(_COPIES * memory.peak(lifetimes(traced, mesh), samples))
    if model.optimizer.accumulate > 1:  # The sum of the gradients so far.
        temporary += parameters
    return Bytes(
        parameters=parameters,
        optimizer=_bytes(model.state.opt_state, layout.opt_state),
        ema=_bytes(model.state.ema, layout.ema),
        frozen=_bytes(frozen, frozen_layout),
        batch=example * samples * model.optimizer.accumulate,
        temporary=temporary,
    )


def lifetimes(traced: Traced, mesh: AbstractMesh) -> Lifetimes:
    """When each array of the step lives, on a device of this mesh."""
    params, program = traced.model.state.params, traced.program
    frozen = systems.frozen_shapes(traced.model.task)
    layout = sharding.shardings((params, frozen), mesh, traced.model.task.rules)
    leaves, places = jax.tree.leaves((params, frozen)), jax.tree.leaves(layout)
    gathered = _inputs_over("fsdp", program, places)
    halves, _ = memory.split(program, _inputs_over("tensor", program, places))
    trained = len(jax.tree.leaves(params))
    gradients = zip(program.outputs[-trained:], leaves, places, strict=False)
    results = {
        v: leaf.dtype.itemsize * math.prod(at.shard_shape(leaf.shape)) for v, leaf, at in gradients
    }
    ways = {v: mesh.shape["tensor"] for v in halves}
    return memory.lifetimes(program, _SAMPLES, gathered, results, ways)


def _inputs_over(axis: str, program: Program, places: list[Any]) -> set[int]:
    """The inputs that this axis of the mesh splits, of weights in these places."""
    pairs = zip(program.inputs, places, strict=False)
    return {v for v, place in pairs if axis in traffic.axes(place.spec)}


def largest_batch(traced: Traced, mesh: AbstractMesh, limit: float) -> int:
    """The largest global batch, of one micro batch, whose memory is below `limit`; 0 if none."""
    model = traced.model
    one = model._replace(optimizer=model.optimizer._replace(accumulate=1))
    ways = mesh.shape["replica"] * mesh.shape["fsdp"]
    arrays = lifetimes(traced, mesh)
    one = one._replace(run=one.run._replace(batch_size=ways))
    rest = bytes_per_device(traced._replace(model=one), mesh)
    fixed, each = rest.total - rest.temporary - rest.batch, rest.batch
    need = lambda samples: fixed + samples * each + _COPIES * memory.peak(arrays, samples)
    if need(1) > limit:
        return 0
    low, high = 1, 2
    while need(high) <= limit and high < 2**20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= limit else (low, middle)
    return low * ways


def collectives(traced: Traced, mesh: AbstractMesh) -> list[Collective]:
    """What the parameters' places demand of a step; each micro batch's gradients are summed."""
    model, program = traced.model, traced.program
    layout = sharding.shardings(model.state.params, mesh, model.task.rules)
    sizes = tuple(mesh.shape[axis] for axis in sharding.AXES)
    found = traffic.of_state(model.state.params, layout, sizes, model.itemsize)
    if mesh.shape["tensor"] > 1:
        over_tensor = _inputs_over("tensor", program, jax.tree.leaves(layout))
        _, summed = memory.split(program, over_tensor)
        size = sum(memory.size(program, v) for v in summed) // _SAMPLES * local_batch(model, mesh)
        groups = np.arange(mesh.size).reshape(-1, mesh.shape["tensor"])
        found.append(traffic.Collective("all-reduce", size, groups))
    times = model.optimizer.accumulate
    return [c._replace(size=c.size * times) for c in found]


def step_time(
    traced: Traced, mesh: AbstractMesh, target: Target, mfu: float, found: list[Collective]
) -> Step:
    """Seconds of a step."""
    model, kind = traced.model, target.kind
    samples = local_batch(model, mesh) * model.optimizer.accumulate
    tensor = mesh.shape["tensor"]
    arithmetic = samples * traced.flops / (tensor * kind.peak * mfu)
    layout = sharding.shardings(model.state, mesh, model.task.rules)
    state = _bytes(model.state, layout)
    update = (2 * state + _bytes(model.state.params, layout.params)) / kind.memory_bandwidth
    return Step(arithmetic, update, traffic.seconds(found, target))


def plan(
    traced: Traced,
    target: Target,
    *,
    mfu: float,
    pictures: int,
    temporary: int | None = None,
    found: list[Collective] | None = None,
) -> dict[str, Any]:
    """All figures, ready for JSON; `temporary` and `found` are those of a compiled program."""
    model, mesh = traced.model, mesh_of(traced.model, target.devices)
    source = "model" if temporary is None else "compiled"
    need = bytes_per_device(traced, mesh)
    if temporary is not None:
        need = need._replace(temporary=temporary)
    limit = USABLE * target.kind.memory
    found = collectives(traced, mesh) if found is None else found
    step = step_time(traced, mesh, target, mfu, found)
    batch, steps = model.run.batch_size, model.run.steps
    hours = step.exposed * steps / 3600
    return {
        "target": {"kind": target.name, "devices": target.devices, "slices": target.slices},
        "mesh": dict(mesh.shape),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.state.params)),
        "bytes_per_device": {**need._asdict(), "total": need.total, "limit": int(limit)},
        "memory_source": source,
        "fits": need.total <= limit,
        "batch": batch,
        "accumulate": model.optimizer.accumulate,
        "largest_batch": largest_batch(traced, mesh, limit),
        "tflop_per_sample": traced.flops / 1e12,
        "bytes_sent": traffic.bytes_by_kind(found),
        "seconds": {
            **step._asdict(),
            "busy": traffic.seconds_by_link(found, target),
        },
        "mfu": mfu,
        "samples_per_second": {"hidden": batch / step.hidden, "exposed": batch / step.exposed},
        "steps": steps,
        "samples": steps * batch,
        "days": hours / 24,
        "device_hours": hours * target.devices,
        "disk": disk(model, pictures),
    }


def disk(model: Model, pictures: int) -> dict[str, int]:
    """Bytes of the checkpoints that a run keeps, and of a data set of so many pictures.

    Pictures are JPEGs of quality 95 at the size that is trained on, or moments; texts, where the
    network reads stored ones, a store of int8 embeddings of 25 tokens.
    """
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.state))
    run = model.run
    kept = run.keep_last + (run.steps // run.keep_every if run.keep_every else 0)
    text = _CAPTION
    if "text" in model.example:
        text = cost.bytes_per_caption(_TOKENS, model.example["text"].shape[-1], "int8")
    return {
        "checkpoint": state,
        "checkpoints_kept": kept,
        "checkpoints": state * kept,
        "pictures": pictures,
        "data": int(pictures * (model.stored + text)),
    }


def _bytes(shapes: Any, layout: Any) -> int:
    sizes = jax.tree.map(
        lambda leaf, place: leaf.dtype.itemsize * math.prod(place.shard_shape(leaf.shape)),
        shapes,
        layout,
    )
    return sum(jax.tree.leaves(sizes))
