"""Compilation of the train step for TPUs and GPUs that this machine does not have."""

import base64
import hashlib
import importlib.util
import json
import os
import pathlib
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from diffusion_jax import files
from diffusion_jax.devices import sharding, tuning
from diffusion_jax.logs import run_log
from diffusion_jax.train import loop, memory, optimizer
from launch.accelerators import KINDS, Target
from launch.planner import gpu, traffic
from launch.planner.tasks import PlannedTask
from launch.planner.traffic import Collective

T = TypeVar("T")

_LIBTPU = {"v7x": "tpu7x"}  # TPUs for which libtpu uses another name than this project.
COMPILERS = (
    "libtpu",
    "jax-cuda12-plugin",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-cudnn-cu12",
    "jax-cuda13-plugin",
    "nvidia-cuda-nvcc",
    "nvidia-cudnn-cu13",
)
"""Packages whose versions can change a compiled program."""


class CompiledProgram(NamedTuple):
    """Compiled program with its memory, compile time and text."""

    text: str
    """The optimized HLO, as printed by XLA."""
    temporary: int
    """Temporary memory per device in bytes."""
    seconds: float
    """Compile time in seconds."""


class Compiled(NamedTuple):
    """Memory and communication of a compiled train step."""

    temporary: int | None
    """Temporary memory per device in bytes; None if unknown."""
    collectives: list[Collective]
    program: CompiledProgram | None = None
    """The program; None if it was compiled for CPUs in place of the target."""


def prepare(devices: int, *kinds: str) -> None:
    """Prepare this process to compile for other machines. Call this before JAX starts.

    JAX gets `devices` virtual CPU devices. The compilers get the settings that training runs use on
    accelerators of these `kinds` ("tpu", "gpu", or a name such as "v5e").
    """
    os.environ.update(tuning.environment(kinds, os.environ))
    # libtpu reads XLA_FLAGS too, and exits on flags of the CPU compiler.
    words = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(w for w in words if not w.startswith("--xla_cpu_"))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    # JAX's compilation cache cannot load programs for devices that this machine lacks.
    jax.config.update("jax_enable_compilation_cache", False)
    # Otherwise libtpu queries a metadata server that only TPU hosts have, and logs errors.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_HOST_BOUNDS", "1,1,1")
    # Otherwise libtpu refuses to load while another process compiles, although neither has a TPU.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    gpu.load_cudnn()


def analyse(model: PlannedTask, target: Target, mesh: AbstractMesh) -> tuple[Compiled, list[str]]:
    """Compile the train step for the target, and return the result and notes for the user.

    If the target's compiler is not installed, the step is compiled for CPUs instead, and a note
    says so. Raises ValueError if the mesh does not use all devices of the target.
    """
    missing = missing_for(target)
    make_devices = tpu_devices if target.is_tpu else gpu.devices
    devices = jax.devices() if missing else make_devices(target)
    if len(devices) != mesh.size:
        raise ValueError(
            f"the mesh has {mesh.size} devices, but the target has {len(devices)}: set one mesh "
            "size to -1, such as --config.mesh.fsdp=-1"
        )
    grid = np.array(devices).reshape(tuple(mesh.shape.values()))
    concrete_mesh = Mesh(grid, sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    version = devices[0].client.platform_version if missing else devices[0].device_kind
    fallback = gpu.FALLBACK if not missing and not target.is_tpu else None
    program = compile_for(lower_step(model, concrete_mesh), target, version, fallback=fallback)
    exchanges = traffic.of_hlo(program.text, target.island)
    if missing:
        note = (
            f"{missing}, so the step was compiled for CPUs: the collectives are those of XLA's CPU "
            "backend, and the memory is estimated from the trace"
        )
        return Compiled(None, exchanges), [note]
    notes = []
    if not target.is_tpu:
        kernels = gpu.kernels(program.text)
        notes.append("kernels: " + ", ".join(f"{n} {name}" for name, n in kernels.items()))
        if not gpu.has_cudnn():
            notes.append(
                f"nvidia-cudnn-cu{gpu.version()} is not installed, so attention_impl=auto uses XLA's attention"
            )
    return Compiled(program.temporary, exchanges, program), notes


def missing_for(target: Target) -> str | None:
    """Return a message that names the missing software if this machine cannot compile for a target.

    Returns None if nothing is missing.
    """
    if not target.is_tpu:
        return gpu.missing(target)
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu (pip install libtpu) is not installed"
    return None


def lower_step(model: PlannedTask, mesh: Mesh) -> jax.stages.Lowered:
    """Lower the train step for a mesh. The mesh's devices need not exist on this machine."""
    places = sharding.shardings(model.state, mesh, model.task.rules)
    frozen = memory.shapes(model.task.frozen)
    frozen_places = sharding.shardings(frozen, mesh, model.task.rules)
    batch = memory.batch_of(model.example, model.run.batch_size)
    split, replicated = sharding.batch_sharding(mesh), sharding.replicated(mesh)
    passes = optimizer.num_passes(model.optimizer, model.run.batch_size, mesh)
    tx = optimizer.make_optimizer(model.optimizer, model.run.steps)
    step = loop.make_step(model.task, model.optimizer, tx, places, passes)
    return step.lower(
        sharding.placed(model.state, places),
        sharding.placed(frozen, frozen_places),
        sharding.placed(batch, jax.tree.map(lambda _: split, batch)),
        sharding.placed(memory.abstract_key(), replicated),
    )


def compile_for(lowered: jax.stages.Lowered, *place: Any, fallback: dict[str, Any] | None = None) -> CompiledProgram:
    """Compile a lowered program, or read the compiled program from the cache.

    The values in `place` identify the target device in the cache's key. If compilation fails, a
    second attempt uses the compiler options `fallback`.
    """

    source = lowered.as_text()

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

    result = cached("program", [source, *place, *versions()], compile_it)
    text = zlib.decompress(base64.b64decode(result["packed"])).decode()
    return CompiledProgram(text, result["temporary"], result["seconds"])


def cached(name: str, parts: Sequence[Any], make: Callable[[], T]) -> T:
    """Return the cached result for this name and these parts, or call make() and cache its result.

    Results are cached as JSON in the folder of JAX's compilation cache. If no folder is set,
    nothing is cached. (JAX itself does not cache programs for devices that the machine lacks.)
    """
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
    path = pathlib.Path(folder or "", f"{name}-{digest}.json")
    if folder and path.exists():
        return json.loads(path.read_text())
    value = make()
    if folder:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps(value))
    return value


def versions() -> list[str]:
    """Return the versions and options of the compilers, for use in cache keys."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_OPTIMIZATION_LEVEL")
    compilers = [f"{name} {run_log.version(name)}" for name in ("jax", "jaxlib", *COMPILERS)]
    return [*compilers, *(os.environ.get(name, "") for name in names)]


def one_device(kind: str) -> Mesh:
    """Return a mesh of one TPU of this kind, to compile for it. The TPU need not exist."""
    shape = "2x2x1" if kind == "v7x" else "x".join("1" * KINDS[kind].torus)
    name = f"{_LIBTPU.get(kind, kind)}:{shape}"
    device = topologies.get_topology_desc(topology_name=name, platform="tpu").devices[0]
    return Mesh(np.array([[[device]]]), sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def tpu_devices(target: Target) -> list[Any]:
    """Return the devices of the target's TPU slices, to compile for them. They need not exist.

    Raises ValueError if libtpu does not support slices of this topology.
    """
    name = f"{_LIBTPU.get(target.name, target.name)}:{target.topology}"
    try:
        options = {"num_slices": target.slices} if target.slices > 1 else {}
        topology = topologies.get_topology_desc(topology_name=name, platform="tpu", **options)
    except Exception as error:
        raise ValueError(f"libtpu cannot compile for {name}: {error}") from error
    return list(topology.devices)
