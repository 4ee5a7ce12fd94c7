"""The train step compiled for a target that is not here: its memory and its collectives."""

import hashlib
import importlib.util
import inspect
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from diffusion_jax.machine import files, sharding
from diffusion_jax.train import loop, optimizer
from launch.accelerators import Target
from launch.planner import systems, traffic
from launch.planner.systems import Model
from launch.planner.traffic import Collective


def prepare(devices: int) -> None:
    """Gives this process as many virtual CPU devices as the target has; before JAX starts."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    # Else libtpu asks a server that only a TPU's host has, and complains of no answer.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_HOST_BOUNDS", "1,1,1")


def analyse(
    model: Model, target: Target, mesh: AbstractMesh
) -> tuple[int | None, list[Collective], list[str]]:
    """Temporary bytes a device (None if no compiler tells), the collectives, and notes."""
    here = target.is_tpu and importlib.util.find_spec("libtpu") is not None
    devices = tpu_devices(target) if here else jax.devices()
    mesh_here = _mesh(devices, mesh)
    temporary, found = _kept(lower_step(model, mesh_here), target, devices[0])
    if here:
        return temporary, found, []
    missing = "libtpu is not installed (pip install libtpu): memory is the model's, and the "
    return None, found, [missing + "collectives are the CPU's"] * target.is_tpu


def lower_step(model: Model, mesh: Mesh) -> jax.stages.Lowered:
    """The train step of the loop, on devices that need not be here."""
    where = sharding.shardings(model.state, mesh, model.task.rules)
    frozen = systems.frozen_shapes(model.task)
    by_rules = sharding.shardings(frozen, mesh, model.task.rules)
    batch = systems.batch_shapes(model, model.run.batch_size)
    split, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)
    tx = optimizer.make_optimizer(model.optimizer, model.run.steps)
    step = loop.make_step(model.task, model.optimizer, tx, where)
    return step.lower(
        sharding.placed(model.state, where),
        sharding.placed(frozen, by_rules),
        sharding.placed(batch, jax.tree.map(lambda _: split, batch)),
        sharding.placed(systems.abstract_key(), whole),
    )


def _kept(lowered: jax.stages.Lowered, target: Target, device: Any) -> tuple[int, list[Collective]]:
    """Temporary bytes a device, and the collectives; beside the programs that JAX keeps.

    JAX itself keeps none for devices that are not here.
    """
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    name = _fingerprint(lowered, target, device)
    path = pathlib.Path(folder, f"plan-{name}.json") if folder else None
    if path is not None and path.exists():
        kept = json.loads(path.read_text())
        found = [Collective(kind, size, np.array(g)) for kind, size, g in kept["collectives"]]
        return kept["temporary"], found
    compiled: Any = lowered.compile()
    found = traffic.of_hlo(compiled.as_text())
    temporary = compiled.memory_analysis().temp_size_in_bytes
    if path is not None:
        rows = [(c.kind, c.size, c.groups.tolist()) for c in found]
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps({"temporary": temporary, "collectives": rows}))
    return temporary, found


def _fingerprint(lowered: jax.stages.Lowered, target: Target, device: Any) -> str:
    """Of all that changes what is found: program, place, compiler, its options, and the reader."""
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
        found = topologies.get_topology_desc(topology_name=name, platform="tpu", **options)
    except Exception as error:
        raise ValueError(f"libtpu cannot compile for {name}: {error}") from error
    return list(found.devices)


def _mesh(devices: list[Any], mesh: AbstractMesh) -> Mesh:
    sizes = tuple(mesh.shape.values())
    if len(devices) != mesh.size:
        raise ValueError(f"{len(devices)} devices to compile for, and the mesh has {mesh.size}")
    return Mesh(np.array(devices).reshape(sizes), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
