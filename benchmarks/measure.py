"""How every benchmark here times its work, and what it says of the machine."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from diffusion_jax.machine import hardware

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The work's result, once the devices have it, and the seconds that it took."""
    start = time.perf_counter()
    result = jax.block_until_ready(work())
    return result, time.perf_counter() - start


def rounds(work: Callable[[], object], count: int, warmup: int = 1) -> list[float]:
    """Seconds of each of `count` calls, after `warmup` calls that are not kept."""
    return [timed(work)[1] for _ in range(warmup + count)][warmup:]


def machine() -> dict[str, Any]:
    """The first device, the most memory that was in use on it so far, and the version of JAX."""
    device = jax.devices()[0]
    memory = hardware.memory(device)
    return {
        "peak_memory_gib": memory and memory.peak / 2**30,
        "device": device.device_kind,
        "jax": jax.__version__,
    }
