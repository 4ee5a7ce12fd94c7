"""The accelerators that can be booked, by the names that commands take: v5p:4x4x4, h100:64."""

import math
import re
from typing import NamedTuple

from diffusion_jax import settings


class Kind(NamedTuple):
    """A sort of accelerator. `pool` is what GKE labels its node pools with."""

    pool: str
    axes: int = 0
    """How many sizes a TPU's topology has; 0 for GPUs, which are counted."""
    on_one_host: tuple[int, ...] = ()
    """Slices of so many chips have one host; larger ones have hosts of four."""


class Accelerator(NamedTuple):
    """What a job runs on: one TPU slice, or GPUs."""

    name: str
    pool: str
    topology: str
    """Of a TPU slice, such as 4x4x4; "" for GPUs."""
    hosts: int
    chips_per_host: int

    @property
    def is_tpu(self) -> bool:
        """Whether it is a TPU slice."""
        return bool(self.topology)


KINDS = {
    "v4": Kind("tpu-v4-podslice", 3),
    "v5e": Kind("tpu-v5-lite-podslice", 2, (1, 4, 8)),
    "v5p": Kind("tpu-v5p-slice", 3),
    "v6e": Kind("tpu-v6e-slice", 2, (1, 4, 8)),
    "a100": Kind("nvidia-tesla-a100"),
    "a100-80gb": Kind("nvidia-a100-80gb"),
    "h100": Kind("nvidia-h100-80gb"),
    "h200": Kind("nvidia-h200-141gb"),
    "b200": Kind("nvidia-b200"),
}
_GPUS = 8  # Of a host.


def parse(text: str) -> Accelerator:
    """The accelerator of a name; ValueError, with what would do, if there is none."""
    name, _, size = text.partition(":")
    settings.one_of("accelerator", name, KINDS)
    kind = KINDS[name]
    if not kind.axes:
        return _gpus(name, kind.pool, size)
    if not re.fullmatch("x".join([r"[1-9]\d*"] * kind.axes), size):
        example = f"{name}:{'x'.join(['4'] * kind.axes)}"
        raise ValueError(
            f"accelerator {text!r}: a {name} slice has {kind.axes} sizes, such as {example}"
        )
    chips = math.prod(map(int, size.split("x")))
    per_host = chips if chips in kind.on_one_host else 4
    if chips % per_host:
        raise ValueError(
            f"accelerator {text!r} has {chips} chips, which do not fill hosts of {per_host}"
        )
    return Accelerator(name, kind.pool, size, chips // per_host, per_host)


def _gpus(name: str, pool: str, size: str) -> Accelerator:
    if not re.fullmatch(r"[1-9]\d*", size):
        raise ValueError(f"accelerator '{name}:{size}': say how many, such as {name}:{_GPUS}")
    count = int(size)
    if count > _GPUS and count % _GPUS:
        below = count // _GPUS * _GPUS
        raise ValueError(
            f"accelerator '{name}:{size}': hosts have {_GPUS} GPUs, so take {name}:{below} or "
            f"{name}:{below + _GPUS}"
        )
    return Accelerator(name, pool, "", max(1, count // _GPUS), min(count, _GPUS))
