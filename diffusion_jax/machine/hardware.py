"""The accelerators: their peak arithmetic, and the memory in use."""

import os
from typing import Any, NamedTuple

import jax

# Dense bfloat16 FLOP/s of one device as its maker gives them (without sparsity), by what is found
# in `device_kind`. The first match counts, so that a variant stands before its family.
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
    """Bytes in use on a device, the most that were, and the limit."""

    used: int
    peak: int
    limit: int


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of one device of this `jax.Device.device_kind`; None if unknown."""
    return next((peak for name, peak in PEAKS.items() if name in device_kind), None)


def utilization(flops: float, seconds: float, device_kind: str, num_devices: int) -> float | None:
    """Model FLOP utilization in [0, 1] of `flops` done by all devices together in `seconds`."""
    peak = peak_flops(device_kind)
    return None if peak is None else flops / (seconds * peak * num_devices)


def memory(device: Any) -> Memory | None:
    """The memory of a jax.Device, or None where its backend does not say (the CPU)."""
    stats = device.memory_stats() or {}
    if "bytes_in_use" not in stats or "bytes_limit" not in stats:
        return None
    used = stats["bytes_in_use"]
    return Memory(used, stats.get("peak_bytes_in_use", used), stats["bytes_limit"])


def limit(device: Any) -> int:
    """The bytes that arrays may take on a jax.Device of this process: of a CPU, its share."""
    stats = memory(device)
    return stats.limit if stats else host_memory() // jax.local_device_count()


def host_memory() -> int:
    """The bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
