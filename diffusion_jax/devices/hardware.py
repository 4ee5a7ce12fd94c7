"""Look up the peak FLOP/s and the memory of devices."""

import os
from typing import Any, NamedTuple

import jax

# Dense bfloat16 FLOP/s of one device (without sparsity), from data sheets. Each key is a part of
# `device_kind`. The first match counts, so variants such as "H100 PCIe" come before "H100".
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "MI300X": 1307.4e12,
    "A100": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # v5p: its kind is "TPU v5" or "TPU v5p".
    "TPU v6": 918e12,
    "TPU7x": 1153.5e12,  # One of the two devices of a chip.
}


class Memory(NamedTuple):
    """Memory of a device, in bytes: the current use, the peak use so far, and the limit."""

    used: int
    peak: int
    limit: int


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device of this kind, or None if it is unknown."""
    return next((peak for name, peak in PEAKS.items() if name in device_kind), None)


def utilization(flops: float, seconds: float, device_kind: str, num_devices: int) -> float | None:
    """Return a program's model FLOP utilization, in [0, 1], or None for an unknown device kind.

    All devices together execute `flops` floating-point operations in `seconds`. The result is the
    ratio of this speed to the sum of the devices' peak FLOP/s.
    """
    peak = peak_flops(device_kind)
    return None if peak is None else flops / (seconds * peak * num_devices)


def memory(device: Any) -> Memory | None:
    """Return the memory of a jax.Device, or None if its backend, such as the CPU, reports none."""
    stats = device.memory_stats() or {}
    if "bytes_in_use" not in stats or "bytes_limit" not in stats:
        return None
    used = stats["bytes_in_use"]
    return Memory(used, stats.get("peak_bytes_in_use", used), stats["bytes_limit"])


def limit(device: Any) -> int:
    """Return the number of bytes available to arrays on a local jax.Device.

    Each CPU device gets an equal share of the host's memory.
    """
    stats = memory(device)
    return stats.limit if stats else host_memory() // jax.local_device_count()


def host_memory() -> int:
    """Return the size of this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
