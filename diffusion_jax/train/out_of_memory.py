"""What a device held when its memory was full, and what to change."""

import contextlib
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from diffusion_jax.machine import files, hardware

PROFILE = "memory.prof"
_MANY = 3  # Of the largest, so many are named.


class OutOfMemory(RuntimeError):
    """A device's memory does not hold a step: one line, with the way out."""


def on_a_device(tree: Any) -> int:
    """Bytes of a tree of jax.Arrays on one device."""
    own = lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return sum(own(leaf) for leaf in jax.tree.leaves(tree))


@contextlib.contextmanager
def explained(
    workdir: pathlib.Path, held: Mapping[str, Any], samples: int
) -> Iterator[dict[str, int]]:
    """OutOfMemory in place of XLA's RESOURCE_EXHAUSTED, and `memory.prof` for pprof.

    `held` are trees of jax.Arrays by name, `samples` those of a device in one pass. Yields the
    bytes on a device by name, to which more may be added.
    """
    sizes = {name: on_a_device(tree) for name, tree in held.items()}
    del held  # Nothing here keeps the first batch on the devices.
    try:
        yield sizes
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        ignored = contextlib.suppress(jax.errors.JaxRuntimeError, OSError)
        with ignored, files.whole(workdir / PROFILE) as temporary:
            jax.profiler.save_device_memory_profile(str(temporary))
        raise OutOfMemory(_message(sizes, samples, str(error))) from error


def _message(sizes: Mapping[str, int], samples: int, said: str) -> str:
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:_MANY]
    named = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in largest)
    memory = hardware.memory(jax.local_devices()[0])
    of = f" of {memory.limit / 2**30:.1f} GiB" if memory else ""
    fewer = f"--config.optimizer.micro_batch={samples // 2}" if samples > 1 else "a smaller model"
    return (
        f"out of memory on a device{of}, whose largest parts are: {named}. It works on {samples} "
        f"samples at a time: take {fewer}, or shard with --config.mesh.fsdp=-1, or recompute with "
        f"--config.unet.remat; `python -m launch.plan` says what fits. {PROFILE} in the workdir "
        f"holds what was there; XLA said: {said.splitlines()[0][:200]}"
    )
