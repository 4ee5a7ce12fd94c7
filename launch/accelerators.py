"""TPU slices and GPUs by the names that commands take: v5p:4x4x4, v5p:4x4x4*2 or h100:64."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import AbstractMesh, AxisType

from diffusion_jax.config.named import one_of
from diffusion_jax.machine import sharding
from diffusion_jax.machine.hardware import PEAKS

GB = 1e9


class Kind(NamedTuple):
    """One device, as its maker gives it. Bandwidths are bytes/s of a device, one way."""

    peak: float
    """Dense bfloat16 FLOP/s."""
    memory: float
    """Bytes."""
    memory_bandwidth: float
    link: float
    """To the others of a host (NVLink) or of a slice (all inter-chip links together)."""
    network: float
    """To other hosts or slices."""
    pool: str
    """GKE's label of its node pools."""
    torus: int = 0
    """Sizes of a TPU's topology; 0 for GPUs, which are counted."""
    on_one_host: tuple[int, ...] = ()
    """TPU slices of so many chips have one host; larger ones have hosts of four."""
    cores: int = 1
    """Devices that JAX sees of a TPU chip."""
    gpus: int = 8
    """Of a host, for GPUs,"""
    linked: int = 8
    """and how many are joined by links: those of a host, or of a rack."""


# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}, whose links are given for both ways
# together (v4: 2400 Gbit/s one way). Network: v5p 50 Gbit/s a chip, v5e 6.4 Tbit/s a pod of 256,
# v6e 25.6 Tbit/s a pod of 256; v4's is not given, so v5p's.
# GPUs, the SXM ones: NVIDIA's data sheets of A100 (2021), H100 (2022), H200 (2023), and of the
# systems DGX A100, H100, H200 and B200 (a card of 200 or 400 Gbit/s a GPU; memory of the system
# divided by 8). NVLink is given for both ways together. GB200: a 72nd of what NVIDIA gives for the
# rack GB200 NVL72, sparse arithmetic halved; a tray is the host. MI300X: AMD's data sheet (2023), 7
# links of 64 GB/s one way; the network is that of the others, since AMD sells none with it.
# v7x: docs.cloud.google.com/tpu/docs/tpu7x, halved, since JAX sees two devices of a chip.
KINDS: Mapping[str, Kind] = {
    "v4": Kind(PEAKS["TPU v4"], 32 * 2**30, 1228 * GB, 300 * GB, 6.25 * GB,
               "tpu-v4-podslice", 3),
    "v5e": Kind(PEAKS["TPU v5e"], 16 * GB, 819 * GB, 200 * GB, 3.125 * GB,
                "tpu-v5-lite-podslice", 2, (1, 4, 8)),
    "v5p": Kind(PEAKS["TPU v5"], 95 * 2**30, 2765 * GB, 600 * GB, 6.25 * GB,
                "tpu-v5p-slice", 3),
    "v6e": Kind(PEAKS["TPU v6"], 32 * GB, 1638 * GB, 400 * GB, 12.5 * GB,
                "tpu-v6e-slice", 2, (1, 4, 8)),
    "v7x": Kind(PEAKS["TPU7x"], 96 * 2**30, 3690 * GB, 300 * GB, 6.25 * GB,
                "tpu7x", 3, cores=2),
    "a100": Kind(PEAKS["A100"], 40 * GB, 1555 * GB, 300 * GB, 25 * GB, "nvidia-tesla-a100"),
    "a100-80gb": Kind(PEAKS["A100"], 80 * GB, 2039 * GB, 300 * GB, 25 * GB, "nvidia-a100-80gb"),
    "h100": Kind(PEAKS["H100"], 80 * GB, 3350 * GB, 450 * GB, 50 * GB, "nvidia-h100-80gb"),
    "h200": Kind(PEAKS["H200"], 141 * GB, 4800 * GB, 450 * GB, 50 * GB, "nvidia-h200-141gb"),
    "b200": Kind(PEAKS["B200"], 180 * GB, 8000 * GB, 900 * GB, 50 * GB, "nvidia-b200"),
    "gb200": Kind(PEAKS["GB200"], 186 * GB, 8000 * GB, 900 * GB, 50 * GB, "nvidia-gb200",
                  gpus=4, linked=72),
    "mi300x": Kind(PEAKS["MI300X"], 192 * GB, 5300 * GB, 448 * GB, 50 * GB, ""),
}  # fmt: skip


class Target(NamedTuple):
    """Devices of one kind: one TPU slice or several alike, or GPUs."""

    name: str
    sizes: tuple[int, ...]
    """The slice's topology; (devices,) for GPUs."""
    slices: int = 1

    @property
    def kind(self) -> Kind:
        """The rates and memory of each device."""
        return KINDS[self.name]

    @property
    def is_tpu(self) -> bool:
        """Whether it is made of slices."""
        return self.kind.torus > 0

    @property
    def topology(self) -> str:
        """The sizes of a slice as text, such as 4x4x4; the number of GPUs."""
        return "x".join(map(str, self.sizes))

    @property
    def devices(self) -> int:
        """The number of devices in all slices together."""
        return math.prod(self.sizes) * self.kind.cores * self.slices

    @property
    def chips_per_host(self) -> int:
        """The same number on every host, of TPU chips or of GPUs."""
        chips = math.prod(self.sizes)
        if self.is_tpu:
            return chips if chips in self.kind.on_one_host else 4
        return min(chips, self.kind.gpus)

    @property
    def devices_per_host(self) -> int:
        """Those that JAX sees."""
        return self.chips_per_host * self.kind.cores

    @property
    def hosts(self) -> int:
        """Hosts of a slice, or of all GPUs."""
        return math.prod(self.sizes) // self.chips_per_host

    @property
    def island(self) -> int:
        """Devices that are joined by links: a slice, or the GPUs of a host or a rack."""
        return math.prod(self.sizes) * self.kind.cores if self.is_tpu else self.kind.linked


def parse(text: str) -> Target:
    """The target of a name; ValueError, with what would do, if there is none."""
    name, _, size = text.partition(":")
    one_of("accelerator", name, KINDS)
    return _slices(name, size) if KINDS[name].torus else _gpus(name, size)


def mesh_over(sizes: tuple[int, ...], devices: int) -> AbstractMesh:
    """The mesh of these sizes, which must use all devices; ValueError that gives the arithmetic."""
    sizes = sharding.mesh_sizes(sizes, devices)
    if math.prod(sizes) != devices:
        named = ", ".join(f"{a}={n}" for a, n in zip(sharding.AXES, sizes, strict=True))
        raise ValueError(
            f"mesh {named} uses {math.prod(sizes)} of the target's {devices} devices: "
            "set one size to -1, or book fewer"
        )
    return AbstractMesh(sizes, sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def _slices(name: str, size: str) -> Target:
    torus = KINDS[name].torus
    number = r"([1-9]\d*)"
    match = re.fullmatch("x".join([number] * torus) + rf"(?:\*{number})?", size)
    if not match:
        example = f"{name}:{'x'.join(['4'] * torus)}"
        raise ValueError(
            f"accelerator '{name}:{size}': a {name} slice has {torus} sizes, such as {example}; "
            f"{example}*2 are two"
        )
    target = Target(name, tuple(map(int, match.groups()[:-1])), int(match.groups()[-1] or 1))
    chips = math.prod(target.sizes)
    if chips % target.chips_per_host:
        raise ValueError(
            f"accelerator '{name}:{size}' has {chips} chips, which do not fill hosts of "
            f"{target.chips_per_host}"
        )
    return target


def _gpus(name: str, size: str) -> Target:
    host = KINDS[name].gpus
    if not re.fullmatch(r"[1-9]\d*", size):
        raise ValueError(f"accelerator '{name}:{size}': say how many, such as {name}:{host}")
    count = int(size)
    if count > host and count % host:
        below = count // host * host
        raise ValueError(
            f"accelerator '{name}:{size}': hosts have {host} GPUs, so take {name}:{below} or "
            f"{name}:{below + host}"
        )
    return Target(name, (count,))
