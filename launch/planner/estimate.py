"""Estimates of memory, arithmetic, communication, time and disk space for a training run."""

import bisect
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from diffusion_jax.devices import sharding, traced_memory
from diffusion_jax.precache import store
from diffusion_jax.train import memory, optimizer
from diffusion_jax.train.memory import Traced
from launch import accelerators
from launch.accelerators import Target
from launch.planner import tasks, traffic
from launch.planner.compiling import Compiled
from launch.planner.tasks import PlannedTask
from launch.planner.traffic import Collective

_TOKENS, _CAPTION = 25, 100  # Assumed length of an average caption: in T5 tokens, and in bytes.


class Step(NamedTuple):
    """Predicted seconds of the parts of a train step."""

    arithmetic: float
    """Forward and backward pass, at the given model FLOP utilization."""
    update: float
    """Update of parameters, optimizer moments and averages: each is read and written once, at full
    memory bandwidth."""
    communication: float
    """Communication at full bandwidth."""

    @property
    def hidden(self) -> float:
        """Seconds per step if communication overlaps with arithmetic as much as possible."""
        return max(self.arithmetic, self.communication) + self.update

    @property
    def exposed(self) -> float:
        """Seconds per step if no communication overlaps with arithmetic: the sum of all parts."""
        return sum(self)


def trace(model: PlannedTask) -> Traced:
    """Trace the loss and its gradient, which takes seconds because nothing is compiled.

    One trace serves for all batch sizes and meshes.
    """
    return memory.trace(model.task, model.state, model.example)


def largest_batch(traced: Traced, mesh: AbstractMesh, limit: float) -> int:
    """Return the largest global batch size that fits into memory without gradient accumulation.

    `limit` is the memory per device in bytes. The result is 0 if not even one sample fits.
    """
    need = memory.needs(traced, mesh)
    total = lambda samples: need(samples, 1).total
    return bisect.bisect_right(range(1, 2**20), limit, key=total) * sharding.batch_ways(mesh)


def collectives(model: PlannedTask, plan: memory.Plan, mesh: AbstractMesh) -> list[Collective]:
    """Return the collectives of a train step, estimated from the sharding of the parameters.

    Parameters are gathered, and gradients summed, once per micro batch. If the mesh has a tensor
    axis, activations are summed over it.
    """
    program = plan.traced.program
    layout = sharding.shardings(model.state.params, mesh, model.task.rules)
    sizes = tuple(mesh.shape[axis] for axis in sharding.AXES)
    exchanges = traffic.of_state(model.state.params, layout, sizes, model.itemsize)
    if mesh.shape["tensor"] > 1:
        over_tensor = memory.inputs_over("tensor", program, jax.tree.leaves(layout))
        _, summed = traced_memory.split(program, over_tensor)
        size = sum(traced_memory.size(program, v) for v in summed) // memory.SAMPLES * plan.samples
        groups = np.arange(mesh.size).reshape(-1, mesh.shape["tensor"])
        exchanges.append(traffic.Collective("all-reduce", size, groups))
    return [c._replace(size=c.size * plan.passes) for c in exchanges]


def step_time(
    model: PlannedTask, traced: Traced, mesh: AbstractMesh, target: Target, mfu: float, exchanges: list[Collective]
) -> Step:
    """Predict the seconds of a train step.

    `mfu` is the assumed model FLOP utilization of one device, and `exchanges` are the collectives
    of the step.
    """
    kind, samples = target.kind, model.run.batch_size // sharding.batch_ways(mesh)
    arithmetic = samples * traced.flops / (mesh.shape["tensor"] * kind.peak * mfu)
    local_bytes = lambda tree: memory.bytes_on_device(model.task, tree, mesh)
    traffic_bytes = 2 * local_bytes(model.state) + local_bytes(model.state.params)
    update = traffic_bytes / kind.memory_bandwidth
    return Step(arithmetic, update, traffic.seconds(exchanges, target))


def plan(
    model: PlannedTask, traced: Traced, target: Target, *, mfu: float, pictures: int, compiled: Compiled | None = None
) -> dict[str, Any]:
    """Return the plan of a training run as a dict that can be written as JSON.

    Memory is in bytes. "seconds" holds the parts of a `Step`, and in "busy" the seconds for which
    links and network are in use. "samples_per_second" assumes that communication overlaps with
    arithmetic as much as possible ("hidden"), or not at all ("exposed"). "days" and "device_hours"
    are for exposed communication.

    Args:
        mfu: Assumed model FLOP utilization of one device.
        pictures: Number of pictures in the data set.
        compiled: Source of temporary memory and communication; by default, both are estimated.
    """
    mesh = accelerators.mesh_over(model.mesh, target.devices)
    limit = memory.USABLE * target.kind.memory
    batch, steps = model.run.batch_size, model.run.steps
    passes = optimizer.num_passes(model.optimizer, batch, mesh)
    planned = memory.plan(traced, mesh, batch, passes, limit)
    facts = compiled or Compiled(None, collectives(model, planned, mesh))
    temporary, exchanges = facts.temporary, facts.collectives
    need = planned.need if temporary is None else planned.need._replace(temporary=temporary)
    step = step_time(model, traced, mesh, target, mfu, exchanges)
    hours = step.exposed * steps / 3600
    return {
        "target": {"kind": target.name, "devices": target.devices, "slices": target.slices},
        "mesh": dict(mesh.shape),
        "parameters": tasks.parameters(model),
        "bytes_per_device": {**need._asdict(), "total": need.total, "limit": int(limit)},
        "temporary_modelled": planned.need.temporary,
        "memory_source": "model" if temporary is None else "compiled",
        "fits": need.total <= limit,
        "batch": batch,
        "accumulate": planned.passes,
        "micro_batch": planned.samples,
        "largest_micro_batch": planned.largest,
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


def disk(model: PlannedTask, pictures: int) -> dict[str, int]:
    """Estimate the disk space of a run's checkpoints, snapshots and data set.

    Returns bytes for "checkpoint" and "snapshot" (one each), "checkpoints" (all that are kept) and
    "data", and counts for "checkpoints_kept", "snapshots_kept" and "pictures". The estimate assumes
    that pictures are stored as moments if the config trains on stored moments, and otherwise as
    JPEGs of quality 95. Texts are stored as captions or, if the network reads stored embeddings, as
    int8 embeddings of 25 tokens.
    """
    run = memory.disk(model.run, model.optimizer, model.state)
    text = _CAPTION
    if "text" in model.example:
        text = store.bytes_per_caption(_TOKENS, model.example["text"].shape[-1], "int8")
    return {
        "checkpoint": run.checkpoint,
        "checkpoints_kept": run.checkpoints,
        "checkpoints": run.checkpoint * run.checkpoints,
        "snapshot": run.snapshot,
        "snapshots_kept": run.snapshots,
        "pictures": pictures,
        "data": int(pictures * (model.stored + text)),
    }
