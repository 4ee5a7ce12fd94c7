"""Timing, output and the description of the machine, shared by the benchmarks."""

import contextlib
import ctypes
import importlib
import importlib.util
import itertools
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from absl import flags

from diffusion_jax import files
from diffusion_jax.devices import hardware

WORKDIR = flags.DEFINE_string("workdir", None, "Folder for files and a copy of the printed lines; launchers set it.")
_lines: list[str] = []

T = TypeVar("T")


def library(name: str) -> Any:
    """Import a library that only benchmarks need, such as torch.

    Raises ImportError if it is not installed. Benchmarks use this function because type checkers
    would resolve `import torch` to benchmarks/torch.py.
    """
    return importlib.import_module(name)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Call `work`, wait until its JAX arrays are computed, and return (result, seconds)."""
    start = time.perf_counter()
    result = jax.block_until_ready(work())
    return result, time.perf_counter() - start


def rounds(work: Callable[[], object], count: int, warmup: int = 1) -> list[float]:
    """Return the seconds of each of `count` calls, made after `warmup` untimed calls."""
    return [timed(work)[1] for _ in range(warmup + count)][warmup:]


def in_flight(work: Callable[[], object], steps: int, seconds: float) -> list[float]:
    """Return the seconds between the ends of consecutive calls, of which two are always in flight.

    A call is made before the previous one has ended, as in training, so the device does not wait
    for the host. Times `steps` calls, or, with `steps` 0, calls until `seconds` have passed.
    """
    running = work()
    jax.block_until_ready(running)
    ends = [time.perf_counter()]
    running = work()
    while len(ends) <= steps if steps else len(ends) < 3 or ends[-1] - ends[0] < seconds:
        following = work()
        jax.block_until_ready(running)
        ends.append(time.perf_counter())
        running = following
    jax.block_until_ready(running)
    return [end - start for start, end in itertools.pairwise(ends)]


@contextlib.contextmanager
def gpu_power() -> Iterator[dict[str, float]]:
    """Read the power and the clock of the first GPU twice a second, while the context is open.

    Yields a dict. On exit, it receives "watts" and "mhz": the medians of the second half of the
    readings. Without nvidia-smi, it stays empty.
    """
    command = [
        "nvidia-smi",
        "--id=0",
        "--query-gpu=power.draw,clocks.sm",
        "--loop-ms=500",
        "--format=csv,noheader,nounits",
    ]
    medians: dict[str, float] = {}
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        yield medians
        return
    try:
        yield medians
    finally:
        process.terminate()
        lines = [line.split(",") for line in process.communicate()[0].splitlines()]
        rows = [(float(watts), float(mhz)) for watts, mhz in lines[len(lines) // 2 :]]
        if rows:
            watts, mhz = map(statistics.median, zip(*rows, strict=True))
            medians.update(watts=watts, mhz=mhz)


def set_l2_fetch(size: int) -> int:
    """Ask CUDA to fetch `size` bytes (32, 64 or 128) at once into a GPU's L2 cache.

    Returns the size that CUDA then reports. Call it after JAX has started. Raises OSError if CUDA's
    runtime library cannot be loaded.
    """
    version = 12 if importlib.util.find_spec("jax_plugins.xla_cuda12") else 13
    runtime, granularity, reported = ctypes.CDLL(f"libcudart.so.{version}"), 5, ctypes.c_size_t()
    runtime.cudaDeviceSetLimit(granularity, ctypes.c_size_t(size))
    runtime.cudaDeviceGetLimit(ctypes.byref(reported), granularity)
    return reported.value


def gpu_kernels(work: Callable[[], object], calls: int = 3, longest: int = 40) -> dict[str, Any]:
    """Profile some calls, and return the milliseconds per call that kernels took on GPUs.

    Returns "total_ms", "kinds" (milliseconds by the operation's name in XLA's program without its
    number, such as "cudnn-conv-bw-filter"), and "longest": [milliseconds, launches per call,
    operation, kernel] of those that took longest. Without a GPU, everything is empty.
    """
    kinds: Counter[str] = Counter()
    kernels: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                timed(work)
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        lines = [
            line
            for plane in planes
            if "/device:GPU" in plane.name
            for line in plane.lines
            if line.name.startswith("Stream")
        ]
        for event in (event for line in lines for event in line.events):
            operation = next((str(v) for name, v in event.stats if name == "hlo_op"), event.name)
            milliseconds = event.duration_ns / 1e6 / calls
            kinds[re.sub(r"[._]\d+$", "", operation)] += milliseconds
            row = kernels.setdefault((operation, event.name[:100]), [0.0, 0.0])
            row[0], row[1] = row[0] + milliseconds, row[1] + 1 / calls
    rows = sorted(((*row, *names) for names, row in kernels.items()), reverse=True)
    return {"total_ms": sum(kinds.values()), "kinds": dict(kinds.most_common(longest)), "longest": rows[:longest]}


def say(result: Mapping[str, Any] | str) -> None:
    """Print a line of text, or a mapping as JSON.

    If --workdir is set, also write all lines printed so far to the file BENCHMARK.txt in this
    folder, where BENCHMARK is the name of the running benchmark. Only process 0 prints and writes.
    """
    if jax.process_index():
        return
    _lines.append(result if isinstance(result, str) else json.dumps(result))
    print(_lines[-1], flush=True)
    if WORKDIR.value:
        name = pathlib.Path(sys.argv[0]).with_suffix(".txt").name
        write(name, "\n".join(_lines) + "\n")


def write(name: str, content: bytes | str) -> None:
    """Write a file to the folder --workdir, which is created if needed."""
    folder = pathlib.Path(str(WORKDIR.value))
    folder.mkdir(parents=True, exist_ok=True)
    files.write_whole(folder / name, content)


def machine() -> dict[str, Any]:
    """Describe the first device and the version of JAX.

    Returns "device" (its kind), "peak_memory_gib" (its peak memory so far; None if unknown) and
    "jax" (the version).
    """
    device = jax.local_devices()[0]
    memory = hardware.memory(device)
    return {"peak_memory_gib": memory and memory.peak / 2**30, "device": device.device_kind, "jax": jax.__version__}
