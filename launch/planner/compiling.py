"""The train step compiled for a target that is not here: its memory and its collectives."""

import hashlib
import importlib.util
import inspect
import json
import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from diffusion_jax.machine import files, sharding
from diffusion_jax.train import loop, memory, optimizer
from launch.accelerators import Target
from launch.planner import traffic
from launch.planner.systems import Model
from launch.planner.traffic import Collective


class Compiled(NamedTuple):
    """A compiled train step, as far as its compiler tells."""

    temporary: int | None
    """Bytes a device; None if they are not known."""
    collectives: list[Collective]


def prepare(devices: int) -> None:
    """Gives this process as many virtual CPU devices as the target has; before JAX starts."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    # Else libtpu asks a server that only a TPU's host has, and complains of no answer.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_HOST_BOUNDS", "1,1,1")


def analyse(model: Model, target: Target, mesh: AbstractMesh) -> tuple[Compiled, list[str]]:
    """The step compiled for the target, or what is nearest to that here; notes on the latter."""
    here = target.is_tpu and importlib.util.find_spec("libtpu") is not None
    devices = tpu_devices(target) if here else jax.devices()
    if len(devices) != mesh.size:
        raise ValueError(f"{len(devices)} devices to compile for, and the mesh has {mesh.size}")
    grid = np.array(devices).reshape(tuple(mesh.shape.values()))
    mesh_here = Mesh(grid, sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    compiled = _compile(lower_step(model, mesh_here), target, devices[0])
    if here:
        return compiled, []
    missing = "libtpu is not installed (pip install libtpu): memory is the model's, and the "
    notes = [missing + "collectives are the CPU's"] * target.is_tpu
    return compiled._replace(temporary=None), notes


def lower_step(model: Model, mesh: Mesh) -> jax.stages.Lowered:
    """The train step of the loop, on devices that need not be here."""
    where = sharding.shardings(model.state, mesh, model.task.rules)
    frozen = memory.shapes(model.task.frozen)
    by_rules = sharding.shardings(frozen, mesh, model.task.rules)
    batch = memory.batch_of(model.example, model.run.batch_size)
    split, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)
    settings = optimizer.for_mesh(model.optimizer, model.run.batch_size, mesh)
    tx = optimizer.make_optimizer(settings, model.run.steps)
    step = loop.make_step(model.task, settings, tx, where)
    return step.lower(
        sharding.placed(model.state, where),
        sharding.placed(frozen, by_rules),
        sharding.placed(batch, jax.tree.map(lambda _: split, batch)),
        sharding.placed(memory.abstract_key(), whole),
    )


def _compile(lowered: jax.stages.Lowered, target: Target, device: Any) -> Compiled:
    """Compiles a step, or reads what an earlier plan kept of it beside JAX's own programs.

    JAX itself keeps none for devices that are not here.
    """
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    path = pathlib.Path(folder or "", f"plan-{_fingerprint(lowered, target, device)}.json")
    if folder and path.exists():
        temporary, rows = json.loads(path.read_text()).values()
        return Compiled(temporary, [Collective(kind, n, np.array(g)) for kind, n, g in rows])
    program: Any = lowered.compile()
    temporary = program.memory_analysis().temp_size_in_bytes
    compiled = Compiled(temporary, traffic.of_hlo(program.as_text()))
    if folder:
        rows = [(c.kind, c.size, c.groups.tolist()) for c in compiled.collectives]
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps({"temporary": temporary, "collectives": rows}))
    return compiled


def _fingerprint(lowered: jax.stages.Lowered, target: Target, device: Any) -> str:
    """A hash of program, place, compiler, its options, and this reader of what it says."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_OPTIMIZATION_LEVEL")
    options = [os.environ.get(name, "") for name in names]
    compiler = jax.__version__, device.client.platform_version
    parts = [lowered.as_text(), target, *compiler, *options, inspect.getsource(traffic)]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def tpu_devices(target: Target) -> list[Any]:
    """Devices of a slice to compile for; ValueError if libtpu knows no such slice."""
    name = f"{target.name}:{target.topology}"
    try:
        options = {"num_slices": target.slices} if target.slices > 1 else {}
        topology = topologies.get_topology_desc(topology_name=name, platform="tpu", **options)
    except Exception as error:
        raise ValueError(f"libtpu cannot compile for {name}: {error}") from error
    return list(topology.devices)
