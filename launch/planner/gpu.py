"""Compilation for NVIDIA GPUs on machines without a GPU.

This needs the packages of the extra `plan-gpu`: jax's plugin for CUDA 13, NVIDIA's assembler and
cuDNN. The packages for CUDA 12 work as well.

XLA then compiles whole programs from a description of the device, without a GPU or its driver. The
description is XLA's GpuTargetConfigProto (https://github.com/openxla/xla,
xla/backends/gpu/target_config). Convolutions and attention become calls of cuDNN, and matrix
products calls of cuBLAS. Nothing is autotuned or timed: the compiled program shows memory and
kernels, but not times.
"""

import ctypes
import importlib.util
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.experimental import topologies

from launch.accelerators import Target


class Device(NamedTuple):
    """Properties of a GPU that XLA needs to compile for it, from NVIDIA's device queries."""

    name: str
    cores: int
    """Number of streaming multiprocessors."""
    units: int
    """Number of FP32 units per streaming multiprocessor."""
    clock: float
    """Clock rate in GHz."""
    memory: int
    """Memory in bytes."""
    bandwidth: int
    """Memory bandwidth in bytes/s."""
    l2: int
    """Size of the L2 cache in bytes."""
    shared: int
    """Bytes of shared memory per streaming multiprocessor; one thread block can use 1 KiB less."""
    capability: int
    """Major number of the CUDA compute capability."""


DEVICES: Mapping[str, Device] = {
    "a100": Device("NVIDIA A100-SXM4-40GB", 108, 64, 1.41, 42_400_000_000, 1_555_200_000_000, 41_943_040, 167_936, 8),
    "a100-80gb": Device(
        "NVIDIA A100-SXM4-80GB", 108, 64, 1.41, 85_100_068_864, 2_039_040_000_000, 41_943_040, 167_936, 8
    ),
    "h100": Device("NVIDIA H100 80GB HBM3", 132, 128, 1.98, 84_942_979_072, 3_352_320_000_000, 52_428_800, 233_472, 9),
    "h200": Device(
        "NVIDIA H200 141GB HBM3e", 132, 128, 1.98, 151_397_597_184, 4_800_000_000_000, 52_428_800, 233_472, 9
    ),
    "b200": Device("NVIDIA B200", 148, 128, 1.965, 191_514_411_008, 7_672_320_000_000, 132_644_864, 233_472, 10),
}
# Compiler options for a second attempt, which leave matrix products to cuBLAS instead of Triton.
# Without a GPU for autotuning, XLA cannot compile some float32 matrix products with Triton
# ("Couldn't find output tile sizes"), for example in the bicubic filter of super-resolution.
FALLBACK = {"xla_gpu_enable_triton_gemm": False}
_TEXT = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {d.shared}
  shared_memory_per_block_optin: {optin} core_count: {d.cores} fpus_per_core: {d.units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {d.bandwidth} l2_cache_size: {d.l2} clock_rate_ghz: {d.clock}
  device_memory_size: {d.memory} cuda_compute_capability {{ major: {d.capability} minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ {runtime} }} device_description_str: "{d.name}"
"""


def missing(target: Target) -> str | None:
    """Return why this machine cannot compile for the target's GPUs, or None if it can."""
    if target.name not in DEVICES:
        return f"launch/planner/gpu.py has no description of {target.name}"
    cuda = version()
    assembler = ("nvidia.cuda_nvcc", "nvidia-cuda-nvcc-cu12")
    if cuda == 13:
        assembler = ("nvidia.cu13.bin", "nvidia-cuda-nvcc")
    packages = {f"jax_plugins.xla_cuda{cuda}": f"jax-cuda{cuda}-plugin", assembler[0]: assembler[1]}
    missing = [package for module, package in packages.items() if not _installed(module)]
    return f"this machine lacks {' and '.join(missing)} (extra plan-gpu)" if missing else None


def version() -> int:
    """Return the major version of CUDA that jax's installed plugin is for; 13 without a plugin."""
    return 12 if _installed("jax_plugins.xla_cuda12") else 13


def devices(target: Target) -> list[Any]:
    """Return the target's GPUs, ordered by host, to compile for them. They need not exist.

    Raises ValueError if XLA cannot compile for these GPUs.
    """
    shape = f"{target.hosts}x{target.devices_per_host}x1"
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=text(DEVICES[target.name]), topology=shape
        )
    except Exception as error:
        raise ValueError(f"XLA cannot compile for {target.name}: {error}") from error
    return list(topology.devices)


def text(device: Device) -> str:
    """Return the description of a GPU for XLA: a GpuTargetConfigProto in text form."""
    runtime = {12: "major: 12 minor: 9 patch: 0", 13: "major: 13 minor: 0 patch: 0"}[version()]
    return _TEXT.format(d=device, optin=device.shared - 1024, runtime=runtime)


def has_cudnn() -> bool:
    """Return whether cuDNN is installed, which is needed to compile its attention kernels."""
    return _cudnn() is not None


def load_cudnn() -> None:
    """Load the cuDNN library from its Python package, if the package is installed.

    XLA cannot find the library by itself, because LD_LIBRARY_PATH lacks the package's folder.
    """
    if path := _cudnn():
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def kernels(program: str) -> dict[str, int]:
    """Count the calls of cuBLAS and cuDNN in a compiled program (HLO text), by function name."""
    names = re.findall(r'custom_call_target="__(cu\w+\$?\w*)', program)
    return {name: names.count(name) for name in sorted(set(names))}


def _cudnn() -> pathlib.Path | None:
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")
    for folder in spec.submodule_search_locations or () if spec else ():
        libraries = sorted(pathlib.Path(folder, "lib").glob("libcudnn.so*"))
        if libraries:
            return libraries[0]
    return None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # A parent package is missing.
        return False
