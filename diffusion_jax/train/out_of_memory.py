"""The error for a device that runs out of memory. Its message lists large arrays and remedies."""

import contextlib
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from diffusion_jax import files
from diffusion_jax.devices import hardware

PROFILE = "memory.prof"
_MANY = 3  # The error message names this many of the largest parts.


class OutOfMemory(RuntimeError):
    """Error raised if a step does not fit in a device's memory."""


def on_a_device(tree: Any) -> int:
    """Return the bytes that a tree of jax.Arrays occupies on one device."""
    size = lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


@contextlib.contextmanager
def explained(workdir: pathlib.Path, held: Mapping[str, Any], samples: int) -> Iterator[dict[str, int]]:
    """Turn XLA's RESOURCE_EXHAUSTED in this context into OutOfMemory.

    Before it raises OutOfMemory, this context manager writes a profile of the device's memory to
    `memory.prof`, which pprof can read.

    Args:
        workdir: The folder for `memory.prof`.
        held: Trees of jax.Arrays on the device, keyed by their names in the message.
        samples: The number of samples per device in one micro batch.

    Yields a dict with the bytes of each tree on one device. The caller may add entries; the message
    names the largest.
    """
    sizes = {name: on_a_device(tree) for name, tree in held.items()}
    del held  # Otherwise this frame would keep the first batch on the devices.
    try:
        yield sizes
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        ignored = contextlib.suppress(jax.errors.JaxRuntimeError, OSError)
        with ignored, files.whole(workdir / PROFILE) as temporary:
            jax.profiler.save_device_memory_profile(str(temporary))
        raise OutOfMemory(_message(sizes, samples, str(error))) from error


def _message(sizes: Mapping[str, int], samples: int, reason: str) -> str:
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:_MANY]
    named = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in largest)
    memory = hardware.memory(jax.local_devices()[0])
    of = f" of {memory.limit / 2**30:.1f} GiB" if memory else ""
    fewer = f"--config.optimizer.micro_batch={samples // 2}" if samples > 1 else "a smaller model"
    return (
        f"out of memory on a device{of}; the largest parts are: {named}. Each pass processes "
        f"{samples} samples per device: try {fewer}, or shard with --config.mesh.fsdp=-1, or "
        f"recompute activations with --config.unet.remat; `python -m launch.plan` shows what fits. "
        f"{PROFILE} in the workdir lists all arrays. XLA's error: {reason.splitlines()[0][:200]}"
    )
