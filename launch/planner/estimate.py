"""Figures of a config on a target: memory, arithmetic, communication, time, disk."""

import bisect
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from diffusion_jax.machine import sharding, traced_memory
from diffusion_jax.precache import cost
from diffusion_jax.train import memory, optimizer
from diffusion_jax.train.memory import Bytes
from launch import accelerators
from launch.accelerators import Target
from launch.planner import systems, traffic
from launch.planner.compiling import Compiled
from launch.planner.systems import Model
from launch.planner.traffic import Collective

_TOKENS, _CAPTION = 25, 100  # Of a caption, on average: T5 tokens, bytes.


class Traced(NamedTuple):
    """A model and the program of its loss and gradient."""

    model: Model
    step: memory.Traced

    @property
    def flops(self) -> float:
        """A training sample's, forward and backward."""
        return self.step.flops


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
    return Traced(model, memory.trace(model.task, model.state, model.example))


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
    """Where the memory goes, the temporary part by the model of traced_memory.py."""
    model = traced.model
    return memory.bytes_per_device(traced.step, mesh, local_batch(model, mesh), passes(model, mesh))


def largest_batch(traced: Traced, mesh: AbstractMesh, limit: float) -> int:
    """The largest global batch, of one micro batch, whose memory is below `limit`; 0 if none."""
    arrays, one = (
        memory.lifetimes(traced.step, mesh),
        memory.bytes_per_device(traced.step, mesh, 1, 1),
    )
    fixed = one.total - one.temporary - one.batch
    need = lambda samples: fixed + samples * one.batch + memory.peak(arrays, samples)
    return bisect.bisect_right(range(1, 2**20), limit, key=need) * sharding.batch_ways(mesh)


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
    model, program = traced.model, traced.step.program
    layout = sharding.shardings(model.state.params, mesh, model.task.rules)
    sizes = tuple(mesh.shape[axis] for axis in sharding.AXES)
    exchanges = traffic.of_state(model.state.params, layout, sizes, model.itemsize)
    if mesh.shape["tensor"] > 1:
        over_tensor = memory.inputs_over("tensor", program, jax.tree.leaves(layout))
        _, summed = traced_memory.split(program, over_tensor)
        size = (
            sum(traced_memory.size(program, v) for v in summed)
            // memory.SAMPLES
            * local_batch(model, mesh)
        )
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
        held = lambda tree: memory.bytes_on_device(model.task, tree, mesh)
        update = (2 * held(model.state) + held(model.state.params)) / kind.memory_bandwidth
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
    limit = memory.USABLE * target.kind.memory
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
    """Bytes of checkpoints and snapshots that a run keeps, and of a data set of so many pictures.

    Pictures are JPEGs of quality 95 at the size that is trained on, or moments; texts, where the
    network reads stored ones, a store of int8 embeddings of 25 tokens.
    """
    kept = memory.disk(model.run, model.optimizer, model.state)
    text = _CAPTION
    if "text" in model.example:
        text = cost.bytes_per_caption(_TOKENS, model.example["text"].shape[-1], "int8")
    return {
        "checkpoint": kept.checkpoint,
        "checkpoints_kept": kept.checkpoints,
        "checkpoints": kept.checkpoint * kept.checkpoints,
        "snapshot": kept.snapshot,
        "snapshots_kept": kept.snapshots,
        "pictures": pictures,
        "data": int(pictures * (model.stored + text)),
    }
