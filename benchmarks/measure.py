"""How every benchmark here times its work, what it says of the machine, and where its lines go."""

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
    "workdir", None, "A folder for what is printed too, NAME.txt, as launchers give one."
)
_lines: list[str] = []

T = TypeVar("T")


def library(name: str) -> Any:
    """A library that benchmarks alone compare with; ImportError if it is not installed.

    By its name, since checkers of types take `import torch` for the torch.py beside this file.
    """
    return importlib.import_module(name)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The work's result, once the devices have it, and the seconds that it took."""
    start = time.perf_counter()
    result = jax.block_until_ready(work())
    return result, time.perf_counter() - start


def rounds(work: Callable[[], object], count: int, warmup: int = 1) -> list[float]:
    """Seconds of each of `count` calls, after `warmup` calls that are not kept."""
    return [timed(work)[1] for _ in range(warmup + count)][warmup:]


def say(result: Mapping[str, Any] | str) -> None:
    """Prints a line, JSON of a mapping, in the first process, and keeps all so far in --workdir."""
    if jax.process_index():
        return
    _lines.append(result if isinstance(result, str) else json.dumps(result))
    print(_lines[-1], flush=True)
    if WORKDIR.value:
        name = pathlib.Path(sys.argv[0]).with_suffix(".txt").name
        write(name, "\n".join(_lines) + "\n")


def write(name: str, content: bytes | str) -> None:
    """Writes a file of --workdir, which is made if need be."""
    folder = pathlib.Path(str(WORKDIR.value))
    folder.mkdir(parents=True, exist_ok=True)
    files.write_whole(folder / name, content)


def machine() -> dict[str, Any]:
    """The first device, the most memory that was in use on it so far, and the version of JAX."""
    device = jax.local_devices()[0]
    memory = hardware.memory(device)
    return {
        "peak_memory_gib": memory and memory.peak / 2**30,
        "device": device.device_kind,
        "jax": jax.__version__,
    }
