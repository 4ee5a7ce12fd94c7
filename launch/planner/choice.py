"""Choice of the mesh, the micro batch and rematerialization for the fastest step on a target."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh

from diffusion_jax.devices import sharding
from diffusion_jax.train import memory
from diffusion_jax.train.memory import Traced
from launch.accelerators import Target
from launch.planner import estimate
from launch.planner.estimate import Step
from launch.planner.tasks import PlannedTask


class MeshChoice(NamedTuple):
    """Mesh and micro batch that fit into memory, with the predicted times of a step."""

    mesh: AbstractMesh
    micro_batch: int
    """Samples per device and pass."""
    accumulate: int
    """Passes (micro batches) per step."""
    step: Step
    bytes: int
    """Memory needed per device, in bytes."""


def meshes(target: Target) -> list[tuple[int, int]]:
    """Return the mesh sizes to try, as (replica, fsdp).

    The candidates are plain data parallelism, fsdp over all devices, and fsdp within each group of
    directly linked devices (a TPU slice, or the GPUs of a host or rack).
    """
    devices, island = target.devices, min(target.devices, target.island)
    by_island = {(devices // island, island)} if devices % island == 0 else set()
    return sorted({(devices, 1), (1, devices)} | by_island)


def best(
    model: PlannedTask, traced: Traced, target: Target, mfu: float, shapes: list[tuple[int, int]] | None = None
) -> MeshChoice | None:
    """Return the choice with the fastest step on the target, or None if nothing fits into memory.

    `shapes` lists the mesh sizes (replica, fsdp) to try; the default is the result of `meshes`.
    `mfu` is the assumed model FLOP utilization. Step times assume that no communication overlaps
    with arithmetic.
    """
    choices = (_choice(model, traced, target, shape, mfu) for shape in shapes or meshes(target))
    return min((c for c in choices if c), key=lambda choice: choice.step.exposed, default=None)


def _choice(
    model: PlannedTask, traced: Traced, target: Target, shape: tuple[int, int], mfu: float
) -> MeshChoice | None:
    mesh, batch = AbstractMesh((*shape, 1), sharding.AXES), model.run.batch_size
    if batch % sharding.batch_ways(mesh):
        return None
    limit = memory.USABLE * target.kind.memory
    plan = memory.plan(traced, mesh, batch, 1, limit)
    if not plan.largest:
        return None
    plan = memory.plan(traced, mesh, batch, plan.samples // plan.largest, limit)
    exchanges = estimate.collectives(model, plan, mesh)
    step = estimate.step_time(model, traced, mesh, target, mfu, exchanges)
    return MeshChoice(mesh, plan.samples, plan.passes, step, plan.need.total)


def advise(
    model: PlannedTask,
    traced: Traced,
    with_remat: Callable[[], Traced],
    target: Target,
    mfu: float,
    current: Mapping[str, Any],
) -> str:
    """Return one line of advice: the flags of the fastest choice, and its time and memory.

    `current` is the plan of the unchanged config, for comparison. If nothing fits into memory,
    `with_remat` traces the model with rematerialization, which adds a third to the arithmetic, and
    the advice is for this model.
    """
    tried, remat = traced, False
    if (choice := best(model, traced, target, mfu)) is None:
        tried, remat = with_remat(), True
        choice = best(model, tried, target, mfu)
    if choice is None:
        return (
            "nothing fits on these devices, not even one sample each with rematerialization: "
            "choose more devices, or devices with more memory"
        )
    current_seconds = sum(current["seconds"][part] for part in ("arithmetic", "update", "communication"))
    text = f"{_flags(choice, remat)}: {_cost(choice, target)}"
    text += f"; this config takes {_ms(current_seconds)}" * current["fits"]
    text += "; without rematerialization not even one sample fits" * remat
    if choice.mesh.shape["fsdp"] == 1:
        return text
    data_parallel = best(model, tried, target, mfu, [(target.devices, 1)])
    if data_parallel:
        return f"{text}; plain data parallelism takes {_cost(data_parallel, target)}"
    need = memory.needs(tried, AbstractMesh((target.devices, 1, 1), sharding.AXES))(1, 1)
    state = need.total - need.temporary - need.batch
    return f"{text}; plain data parallelism does not fit: the state alone is {_gib(state)} GiB"


def _flags(choice: MeshChoice, remat: bool) -> str:
    mesh = choice.mesh.shape
    flags = f"--config.mesh.replica={mesh['replica']} --config.mesh.fsdp={mesh['fsdp']}"
    flags += f" --config.optimizer.micro_batch={choice.micro_batch}"
    return flags + " --config.unet.remat=True" * remat


def _cost(choice: MeshChoice, target: Target) -> str:
    parts = ", ".join(f"{name} {_ms(s)}" for name, s in choice.step._asdict().items())
    limit = _gib(memory.USABLE * target.kind.memory)
    room = f"{_gib(choice.bytes)} of {limit} GiB of memory"
    return f"{_ms(choice.step.exposed)} per step with no communication hidden ({parts}), {room}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def _gib(count: float) -> str:
    return f"{count / 2**30:,.1f}"
