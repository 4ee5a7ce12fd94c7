"""Timing, description of the machine, and output, as used by all benchmarks."""

import importlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from absl import flags

from diffusion_jax.machine import files, hardware

WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder to also write the output to, as NAME.txt; launchers set it."
)
_lines: list[str] = []

T = TypeVar("T")


def library(name: str) -> Any:
    """Import a library that only benchmarks need. Raises ImportError if it is not installed.

    Type checkers would resolve a normal `import torch` to the file torch.py in this folder.
    """
    return importlib.import_module(name)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `work`, once it is ready, and the seconds it took."""
    start = time.perf_counter()
    result = jax.block_until_ready(work())
    return result, time.perf_counter() - start


def rounds(work: Callable[[], object], count: int, warmup: int = 1) -> list[float]:
    """Return the seconds of `count` calls, after `warmup` calls."""
    return [timed(work)[1] for _ in range(warmup + count)][warmup:]


def say(result: Mapping[str, Any] | str) -> None:
    """Print a line of text, or a mapping as JSON, and write all lines so far to --workdir.

    Only the first process does this.
    """
    if jax.process_index():
        return
    _lines.append(result if isinstance(result, str) else json.dumps(result))
    print(_lines[-1], flush=True)
    if WORKDIR.value:
        name = pathlib.Path(sys.argv[0]).with_suffix(".txt").name
        write(name, "\n".join(_lines) + "\n")


def write(name: str, content: bytes | str) -> None:
    """Write a file to --workdir, creating the folder if needed."""
    folder = pathlib.Path(str(WORKDIR.value))
    folder.mkdir(parents=True, exist_ok=True)
    files.write_whole(folder / name, content)


def machine() -> dict[str, Any]:
    """Return the kind of the first device, its peak memory so far, and the version of JAX."""
    device = jax.local_devices()[0]
    memory = hardware.memory(device)
    return {
        "peak_memory_gib": memory and memory.peak / 2**30,
        "device": device.device_kind,
        "jax": jax.__version__,
    }
