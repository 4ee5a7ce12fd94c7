"""The train step compiled for a target that is not here: its memory and its collectives."""

import hashlib
import importlib.util
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from diffusion_jax import files, loop, sharding
from launch import systems, traffic
from launch.accelerators import Target
from launch.systems import Model
from launch.traffic import Collective


def prepare(devices: int) -> None:
    """Gives this process as many virtual CPU devices as the target has; before JAX starts."""
    jax.config.update("jax_platforms", "cpu")
    # The same collectives, the memory within 3 %, in 40 % of the time.
    jax.config.update("jax_optimization_level", "O0")
    jax.config.update("jax_num_cpu_devices", devices)
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # Else libtpu asks a server that only a TPU's host has.


def analyse(
    model: Model, target: Target, mesh: AbstractMesh
) -> tuple[int | None, list[Collective], list[str]]:
    """Temporary bytes a device (None if no compiler tells), the collectives, and notes."""
    here = target.is_tpu and importlib.util.find_spec("libtpu") is not None
    devices = tpu_devices(target) if here else jax.devices()
    mesh_here = _mesh(devices, mesh)
    temporary, found = _kept(lower_step(model, mesh_here), devices[0])
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
    tx = loop.make_optimizer(model.optimizer, model.run.steps)
    step = loop.make_step(model.task, model.optimizer, tx, where)
    return step.lower(
        _placed(model.state, where),
        _placed(frozen, by_rules),
        _placed(batch, jax.tree.map(lambda _: split, batch)),
        _placed(systems.abstract_key(), whole),
    )


def _kept(lowered: jax.stages.Lowered, device: Any) -> tuple[int, list[Collective]]:
    """Temporary bytes a device, and the collectives; beside the programs that JAX keeps.

    JAX itself keeps none for devices that are not here.
    """
    version = jax.__version__, device.client.platform_version, device.device_kind
    name = hashlib.sha256("\n".join([*version, lowered.as_text()]).encode()).hexdigest()
    path = pathlib.Path(jax.config.jax_compilation_cache_dir or ".", f"plan-{name}.json")
    if not path.exists():
        compiled = lowered.compile()
        found = traffic.of_hlo(compiled.as_text())
        rows = [(c.kind, c.size, c.groups.tolist()) for c in found]
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = compiled.memory_analysis().temp_size_in_bytes
        files.write_whole(path, json.dumps({"temporary": temporary, "collectives": rows}))
    kept = json.loads(path.read_text())
    found = [Collective(kind, size, np.array(g)) for kind, size, g in kept["collectives"]]
    return kept["temporary"], found


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


def _placed(shapes: Any, where: Any) -> Any:
    return jax.tree.map(
        lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, where
    )
