"""Says what a machine is and whether its accelerators work: what to send with a bug report.

    python -m diffusion_jax.doctor
    python -m diffusion_jax.doctor --json

JAX's own report, further versions, devices and their memory, whether attention through cudnn works,
the environment that JAX and XLA read, and the measured rates of a matrix product and a convolution
beside the maker's (machine/hardware.py). It takes less than a minute, writes nothing and uses no
network.
"""

import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from absl import app, flags

from diffusion_jax import cli
from diffusion_jax.machine import hardware, log
from diffusion_jax.nn import ops

_JSON = flags.DEFINE_bool("json", False, "Print JSON.")
_PACKAGES = (
    "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "flax", "optax", "orbax-checkpoint", "grain", "ml_collections", "tensorflow", "tensorflow-cpu",
)  # fmt: skip
_VARIABLES = ("XLA_", "LIBTPU_", "JAX_", "TPU_", "CUDA_", "NCCL_", "SLURM_NTASKS", "SLURM_PROCID")


def main(argv: list[str]) -> None:
    """Examines the machine and prints the report."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
    cli.start()
    report = examine()
    if jax.process_index() == 0:
        print(json.dumps(report, indent=1) if _JSON.value else text(report))


def examine() -> dict[str, Any]:
    """Everything, by subject; a part that fails holds its error in place of its result."""
    first = jax.local_devices()[0]
    return {
        "jax": str(jax.print_environment_info(return_string=True)).splitlines(),
        "host": _host(),
        "git": log.git_commit(pathlib.Path(__file__)),
        "versions": {name: version for name in _PACKAGES if (version := log.version(name))},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
        "devices": _devices(),
        "attention": attention(),
        "rates": rates(first),
    }


def attention() -> dict[str, str]:
    """Each implementation of ops.attend: "works", or why it does not here."""
    q = jnp.ones((2, 64, 4, 64), jnp.bfloat16)
    return {name: _outcome(lambda n=name: ops.attend(q, q, q, implementation=n)) for name in
            ops.ATTENTION}  # fmt: skip


def rates(device: Any) -> dict[str, Any]:
    """TFLOP/s of one device: measured, and the maker's figure (None if unknown)."""
    large, peak = device.platform != "cpu", hardware.peak_flops(device.device_kind)
    dtype = jnp.bfloat16 if large else jnp.float32
    with jax.default_device(device):
        product = matmul(8192 if large else 1024, dtype)
        convolution = conv(64 if large else 1, 256 if large else 64, dtype)
        return {
            "dtype": jnp.dtype(dtype).name,
            "matmul": float(f"{rate(*product) / 1e12:.4g}"),
            "conv": float(f"{rate(*convolution) / 1e12:.4g}"),
            "peak": peak and peak / 1e12,
        }


def matmul(size: int, dtype: Any) -> tuple[Callable[[], jax.Array], float]:
    """A product of two matrices of this size, and its floating-point operations."""
    a = jnp.ones((size, size), dtype)
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(a, a), 2.0 * size**3


def conv(batch: int, channels: int, dtype: Any) -> tuple[Callable[[], jax.Array], float]:
    """A 3x3 convolution without padding, 66x66 to 64x64 pixels, and its operations."""
    x = jnp.ones((batch, 66, 66, channels), dtype)
    kernel = jnp.ones((3, 3, channels, channels), dtype)

    @jax.jit
    def convolve(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=layout)

    return lambda: convolve(x, kernel), 2.0 * batch * 64 * 64 * 9 * channels**2


def rate(run: Callable[[], jax.Array], flops: float, seconds: float = 0.5) -> float:
    """FLOP/s of `run`, called again and again for about so long after a first call."""
    jax.block_until_ready(run())
    start, calls, result = time.perf_counter(), 0, None
    while time.perf_counter() - start < seconds:
        for _ in range(4):  # So that the device has work while the host asks for more.
            result = run()
        jax.block_until_ready(result)
        calls += 4
    return calls * flops / (time.perf_counter() - start)


def text(report: dict[str, Any]) -> str:
    """The report of `examine` for people: JAX's own as it stands, the rest as YAML."""
    rest = {subject: value for subject, value in report.items() if subject != "jax"}
    return "\n".join([*report["jax"], "", yaml.safe_dump(rest, sort_keys=False, width=1000)])


def _devices() -> list[dict[str, Any]]:
    rows = []
    for device in jax.devices():
        row = {"id": device.id, "kind": device.device_kind, "process": device.process_index}
        memory = hardware.memory(device) if device in jax.local_devices() else None
        if memory:
            row |= {"memory_used": _gib(memory.used), "memory": _gib(memory.limit)}
        rows.append(row)
    return rows


def _host() -> dict[str, Any]:
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        "python": sys.executable,
        "cpus": os.cpu_count(),
        "memory": _gib(os.sysconf("SC_PHYS_PAGES") * page),
        "memory_free": _gib(os.sysconf("SC_AVPHYS_PAGES") * page),
        "disk_free": _gib(shutil.disk_usage(".").free),
    }


def _outcome(run: Callable[[], Any]) -> str:
    try:
        jax.block_until_ready(run())
    except Exception as error:  # Whatever a backend raises is the finding.
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return "works"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


if __name__ == "__main__":
    cli.run(main)
