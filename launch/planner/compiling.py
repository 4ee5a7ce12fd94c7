"""The train step compiled for a target that is not here: its memory and its collectives."""

import base64
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from diffusion_jax.machine import files, log, sharding, tuning
from diffusion_jax.train import loop, memory, optimizer
from launch.accelerators import KINDS, Target
from launch.planner import gpu, traffic
from launch.planner.systems import Model
from launch.planner.traffic import Collective

T = TypeVar("T")


_LIBTPU = {"v7x": "tpu7x"}
COMPILERS = ("libtpu", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "nvidia-cudnn-cu12")


class Program(NamedTuple):
    """A compiled program."""

    text: str
    """As XLA prints it."""
    temporary: int
    """Bytes a device."""
    seconds: float
    """That compiling took."""
    products: int
    """Convolutions and matrix products of what was compiled."""


class Compiled(NamedTuple):
    """A compiled train step, as far as its compiler tells."""

    temporary: int | None
    """Bytes a device; None if they are not known."""
    collectives: list[Collective]
    program: Program | None = None
    """Where it is the target's own."""


def prepare(devices: int, *kinds: str) -> None:
    """Gives this process as many virtual CPU devices as the target has; before JAX starts.

    Compilers get the settings of these kinds of accelerators, as runs on them do.
    """
    os.environ.update(tuning.environment(kinds, os.environ))
    # Libtpu reads these too, and ends the process over what only a CPU's compiler knows.
    words = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(w for w in words if not w.startswith("--xla_cpu_"))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_compilation_cache", False)  # It cannot read what is not for here.
    # Else libtpu asks a server that only a TPU's host has, and complains of no answer.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_HOST_BOUNDS", "1,1,1")
    # Else it refuses while another process compiles: of no TPU here.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    gpu.load_cudnn()


def analyse(model: Model, target: Target, mesh: AbstractMesh) -> tuple[Compiled, list[str]]:
    """The step compiled for the target, or what is nearest to that here; notes on the latter."""
    missing = missing_for(target)
    devices = jax.devices() if missing else _devices(target)
    if len(devices) != mesh.size:
        raise ValueError(f"{len(devices)} devices to compile for, and the mesh has {mesh.size}")
    grid = np.array(devices).reshape(tuple(mesh.shape.values()))
    mesh_here = Mesh(grid, sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    version = devices[0].client.platform_version if missing else devices[0].device_kind
    fallback = gpu.FALLBACK if not missing and not target.is_tpu else None
    program = compile_for(lower_step(model, mesh_here), target, version, fallback=fallback)
    exchanges = traffic.of_hlo(program.text)
    if missing:
        note = f"{missing}: memory is the model's, and the collectives are the CPU's"
        return Compiled(None, exchanges), [note]
    notes = []
    if not target.is_tpu:
        used = gpu.kernels(program.text)
        notes.append("kernels: " + ", ".join(f"{n} {name}" for name, n in used.items()))
        if not gpu.has_cudnn():
            notes.append("nvidia-cudnn-cu12 is not installed: auto takes XLA's attention")
    return Compiled(program.temporary, exchanges, program), notes


def missing_for(target: Target) -> str | None:
    """What must be installed to compile for a target; None if all is here."""
    if not target.is_tpu:
        return gpu.missing(target)
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu (pip install libtpu) is not installed"
    return None


def _devices(target: Target) -> list[Any]:
    return tpu_devices(target) if target.is_tpu else gpu.devices(target)


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


def compile_for(
    lowered: jax.stages.Lowered, *place: Any, fallback: dict[str, Any] | None = None
) -> Program:
    """Compiles a program for a place, or reads what was kept of it beside JAX's own programs.

    `fallback` are options of the compiler for a second try, where the first fails.
    """

    written = lowered.as_text()

    def compile_it() -> dict[str, Any]:
        start = time.time()
        program: Any = None
        try:
            program = lowered.compile()
        except jax.errors.JaxRuntimeError:
            if not fallback:
                raise
            program = lowered.compile(compiler_options=fallback)
        seconds = time.time() - start
        packed = base64.b64encode(zlib.compress(program.as_text().encode())).decode()
        temporary = program.memory_analysis().temp_size_in_bytes
        return {"temporary": temporary, "seconds": seconds, "packed": packed}

    found = kept("program", [written, *place, *versions()], compile_it)
    text = zlib.decompress(base64.b64decode(found["packed"])).decode()
    products = len(re.findall(r"stablehlo\.(?:dot_general|convolution)", written))
    return Program(text, found["temporary"], found["seconds"], products)


def kept(name: str, parts: Sequence[Any], make: Callable[[], T]) -> T:
    """What was made once of these parts, as JSON beside JAX's own programs, or else is made now.

    JAX itself keeps none for devices that are not here.
    """
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
    path = pathlib.Path(folder or "", f"{name}-{digest}.json")
    if folder and path.exists():
        return json.loads(path.read_text())
    made = make()
    if folder:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps(made))
    return made


def versions() -> list[str]:
    """The compilers and their options, on which programs depend beside what they are made of."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_OPTIMIZATION_LEVEL")
    compilers = [f"{name} {log.version(name)}" for name in ("jax", "jaxlib", *COMPILERS)]
    return [*compilers, *(os.environ.get(name, "") for name in names)]


def one_device(kind: str) -> Mesh:
    """A mesh of a single TPU of this kind, to compile for."""
    shape = "2x2x1" if kind == "v7x" else "x".join("1" * KINDS[kind].torus)
    name = f"{_LIBTPU.get(kind, kind)}:{shape}"
    device = topologies.get_topology_desc(topology_name=name, platform="tpu").devices[0]
    return Mesh(np.array([[[device]]]), sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def tpu_devices(target: Target) -> list[Any]:
    """Devices of a slice to compile for; ValueError if libtpu knows no such slice."""
    name = f"{_LIBTPU.get(target.name, target.name)}:{target.topology}"
    try:
        options = {"num_slices": target.slices} if target.slices > 1 else {}
        topology = topologies.get_topology_desc(topology_name=name, platform="tpu", **options)
    except Exception as error:
        raise ValueError(f"libtpu cannot compile for {name}: {error}") from error
    return list(topology.devices)
