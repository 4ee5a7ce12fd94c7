"""Figures of a config on a target: memory, arithmetic, communication, time, disk."""

import bisect
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from diffusion_jax.machine import flops, sharding
from diffusion_jax.precache import cost
from diffusion_jax.train import optimizer
from launch import accelerators
from launch.accelerators import Target
from launch.planner import memory, systems, traffic
from launch.planner.compiling import Compiled
from launch.planner.memory import Lifetimes, Program
from launch.planner.systems import Model
from launch.planner.traffic import Collective

USABLE = 0.9
"""The share of a device's memory that arrays may fill: the runtime and gaps take the rest."""
_COPIES = 1.25  # Of temporaries: layouts, reversed kernels, gaps. Fitted to XLA's CPU compiler.
_SAMPLES = 1009  # A prime, so that a size which it divides is one of the batch.
_TOKENS, _CAPTION = 25, 100  # Of a caption, on average: T5 tokens, bytes.


class Traced(NamedTuple):
    """A model and the program of its loss and gradient; no number of it depends on a batch."""

    model: Model
    program: Program
    flops: float
    """A training sample's, forward and backward."""


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
        """Seconds if communication hides behind arithmetic as far as that lasts."""
        return max(self.arithmetic, self.communication) + self.update

    @property
    def exposed(self) -> float:
        """Seconds if nothing is hidden: the sum of all."""
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


def passes(model: Model, mesh: AbstractMesh) -> int:
    """The micro batches of a step; ValueError unless the batch divides."""
    return optimizer.for_mesh(model.optimizer, model.run.batch_size, mesh).accumulate


def local_batch(model: Model, mesh: AbstractMesh) -> int:
    """Samples that a device works on at a time; ValueError unless the batch divides."""
    return model.run.batch_size // (sharding.batch_ways(mesh) * passes(model, mesh))


def bytes_per_device(traced: Traced, mesh: AbstractMesh) -> Bytes:
    """Where the memory goes, the temporary part by launch/planner/memory.py's model."""
    model = traced.model
    held = lambda shapes: _bytes(model, shapes, mesh)
    samples = local_batch(model, mesh)
    example = sum(leaf.nbytes for leaf in model.example.values())
    parameters = held(model.state.params)
    temporary = int(_COPIES * memory.peak(lifetimes(traced, mesh), samples))
    parts = passes(model, mesh)
    if parts > 1:  # The sum of the gradients so far.
        temporary += parameters
    return Bytes(
        parameters=parameters,
        optimizer=held(model.state.opt_state),
        ema=held(model.state.ema),
        frozen=held(systems.frozen_shapes(model.task)),
        batch=example * samples * parts,
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
    results = {v: _shard_bytes(leaf, place) for v, leaf, place in gradients}
    ways = {v: mesh.shape["tensor"] for v in halves}
    return memory.lifetimes(program, _SAMPLES, gathered, results, ways)


def _inputs_over(axis: str, program: Program, places: list[Any]) -> set[int]:
    """The inputs that this axis of the mesh splits, of weights in these places."""
    pairs = zip(program.inputs, places, strict=False)
    return {v for v, place in pairs if axis in traffic.axes(place.spec)}


def largest_batch(traced: Traced, mesh: AbstractMesh, limit: float) -> int:
    """The largest global batch, of one micro batch, whose memory is below `limit`; 0 if none."""
    ways, arrays = sharding.batch_ways(mesh), lifetimes(traced, mesh)
    one = traced.model._replace(run=traced.model.run._replace(batch_size=ways))
    rest = bytes_per_device(with_micro_batch(traced._replace(model=one), 1), mesh)
    fixed, each = rest.total - rest.temporary - rest.batch, rest.batch
    need = lambda samples: fixed + samples * each + _COPIES * memory.peak(arrays, samples)
    return bisect.bisect_right(range(1, 2**20), limit, key=need) * ways


def largest_micro_batch(traced: Traced, mesh: AbstractMesh, limit: float) -> int:
    """The most samples of a device in a pass that divide its share and fit; 0 if none do."""
    ways = sharding.batch_ways(mesh)
    share, most = traced.model.run.batch_size // ways, largest_batch(traced, mesh, limit) // ways
    need = lambda samples: bytes_per_device(with_micro_batch(traced, samples), mesh).total
    sizes = (n for n in range(min(most, share), 0, -1) if share % n == 0)
    return next((n for n in sizes if need(n) <= limit), 0)


def with_micro_batch(traced: Traced, samples: int) -> Traced:
    """The same with passes of so many samples a device."""
    settings = traced.model.optimizer._replace(micro_batch=samples, accumulate=1)
    return traced._replace(model=traced.model._replace(optimizer=settings))


def collectives(traced: Traced, mesh: AbstractMesh) -> list[Collective]:
    """The exchanges that the parameters' places demand; each micro batch's gradients are summed."""
    model, program = traced.model, traced.program
    layout = sharding.shardings(model.state.params, mesh, model.task.rules)
    sizes = tuple(mesh.shape[axis] for axis in sharding.AXES)
    exchanges = traffic.of_state(model.state.params, layout, sizes, model.itemsize)
    if mesh.shape["tensor"] > 1:
        over_tensor = _inputs_over("tensor", program, jax.tree.leaves(layout))
        _, summed = memory.split(program, over_tensor)
        size = sum(memory.size(program, v) for v in summed) // _SAMPLES * local_batch(model, mesh)
        groups = np.arange(mesh.size).reshape(-1, mesh.shape["tensor"])
        exchanges.append(traffic.Collective("all-reduce", size, groups))
    times = passes(model, mesh)
    return [c._replace(size=c.size * times) for c in exchanges]


def step_time(
    traced: Traced,
    mesh: AbstractMesh,
    target: Target,
    mfu: float,
    exchanges: list[Collective],
    update: float | None = None,
) -> Step:
    """Seconds of a step that exchanges these; of the update as modelled, unless they are given."""
    model, kind = traced.model, target.kind
    samples = model.run.batch_size // sharding.batch_ways(mesh)
    arithmetic = samples * traced.flops / (mesh.shape["tensor"] * kind.peak * mfu)
    if update is None:
        state, params = model.state, model.state.params
        moved = 2 * _bytes(model, state, mesh) + _bytes(model, params, mesh)
        update = moved / kind.memory_bandwidth
    return Step(arithmetic, update, traffic.seconds(exchanges, target))


def plan(
    traced: Traced,
    target: Target,
    *,
    mfu: float,
    pictures: int,
    update: float | None = None,
    compiled: Compiled | None = None,
) -> dict[str, Any]:
    """All figures, ready for JSON; the model's own where no compiler tells."""
    model, mesh = traced.model, mesh_of(traced.model, target.devices)
    found = compiled or Compiled(None, collectives(traced, mesh))
    temporary, exchanges = found.temporary, found.collectives
    need = bytes_per_device(traced, mesh)
    modelled = need.temporary
    if temporary is not None:
        need = need._replace(temporary=temporary)
    limit = USABLE * target.kind.memory
    step = step_time(traced, mesh, target, mfu, exchanges, update)
    batch, steps = model.run.batch_size, model.run.steps
    hours = step.exposed * steps / 3600
    return {
        "target": {"kind": target.name, "devices": target.devices, "slices": target.slices},
        "mesh": dict(mesh.shape),
        "parameters": systems.parameters(model),
        "bytes_per_device": {**need._asdict(), "total": need.total, "limit": int(limit)},
        "temporary_modelled": modelled,
        "memory_source": "model" if temporary is None else "compiled",
        "fits": need.total <= limit,
        "batch": batch,
        "accumulate": passes(model, mesh),
        "micro_batch": local_batch(model, mesh),
        "largest_micro_batch": largest_micro_batch(traced, mesh, limit),
        "largest_batch": largest_batch(traced, mesh, limit),
        "tflop_per_sample": traced.flops / 1e12,
        "bytes_sent": traffic.bytes_by_kind(exchanges),
        "seconds": {**step._asdict(), "busy": traffic.seconds_by_link(exchanges, target)},
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


def _bytes(model: Model, shapes: Any, mesh: AbstractMesh) -> int:
    """Bytes of these arrays on a device."""
    layout = sharding.shardings(shapes, mesh, model.task.rules)
    return sum(jax.tree.leaves(jax.tree.map(_shard_bytes, shapes, layout)))


def _shard_bytes(leaf: Any, place: Any) -> int:
    return leaf.dtype.itemsize * math.prod(place.shard_shape(leaf.shape))
