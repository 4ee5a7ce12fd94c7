"""TPU and GPU data sheets, and parsing of accelerator names such as v5p:4x4x4*2 and h100:64."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jax.sharding import AbstractMesh, AxisType

from diffusion_jax.config.named import one_of
from diffusion_jax.devices import sharding
from diffusion_jax.devices.hardware import PEAKS

GB = 1e9


class Chip(NamedTuple):
    """Data sheet of an accelerator. FLOP/s, memory and bandwidths are per JAX device."""

    peak: float
    """Dense bfloat16 FLOP/s."""
    memory: float
    """Memory in bytes."""
    memory_bandwidth: float
    """Memory bandwidth in bytes/s."""
    link: float
    """Bandwidth of direct links in bytes/s, in one direction. GPUs: bandwidth to the other GPUs of
    the host, for example by NVLink. TPUs: bandwidth of all links to other chips together."""
    network: float
    """Bandwidth of the network to other hosts or TPU slices, in bytes/s and in one direction."""
    pool: str
    """Value of the GKE node label that selects this accelerator; "" if GKE does not offer it."""
    torus: int = 0
    """Number of dimensions of a TPU slice's topology (2 or 3); 0 for GPUs."""
    on_one_host: tuple[int, ...] = ()
    """Sizes (in chips) of the TPU slices that have a single host; other slices have four chips per
    host."""
    chips: int = 256
    """Number of chips of the largest TPU slice."""
    cores: int = 1
    """Number of JAX devices per TPU chip."""
    gpus: int = 8
    """Number of GPUs per host."""
    linked: int = 8
    """Number of GPUs connected by direct links: all GPUs of a host, or of a rack (GB200)."""


# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}. These pages give link bandwidths for both
# directions together, except for v4 (2400 Gbit/s in one direction). Network: v5p 50 Gbit/s per
# chip, v5e 6.4 and v6e 25.6 Tbit/s per pod of 256 chips. The v4 network is not published, so the
# v5p value is used. v7x: docs.cloud.google.com/tpu/docs/tpu7x, halved because JAX sees two devices
# per chip.
# GPUs (SXM): NVIDIA's data sheets of A100 (2021), H100 (2022), H200 (2023), and of the systems DGX
# A100, H100, H200 and B200 (a network card of 200 or 400 Gbit/s per GPU; 1/8 of the system's
# memory). These data sheets give NVLink bandwidths for both directions together. GB200: 1/72 of
# NVIDIA's numbers for the rack GB200 NVL72; dense FLOP/s are half of the sparse FLOP/s; a host is
# one tray of the rack. MI300X: AMD's data sheet (2023), 7 links of 64 GB/s in one direction. AMD
# sells no network with the MI300X, so the H100 value is used.
KINDS: Mapping[str, Chip] = {
    "v4": Chip(PEAKS["TPU v4"], 32 * 2**30, 1228 * GB, 300 * GB, 6.25 * GB, "tpu-v4-podslice", 3, chips=4096),
    "v5e": Chip(PEAKS["TPU v5e"], 16 * GB, 819 * GB, 200 * GB, 3.125 * GB, "tpu-v5-lite-podslice", 2, (1, 4, 8)),
    "v5p": Chip(PEAKS["TPU v5"], 95 * 2**30, 2765 * GB, 600 * GB, 6.25 * GB, "tpu-v5p-slice", 3, chips=6144),
    "v6e": Chip(PEAKS["TPU v6"], 32 * GB, 1638 * GB, 400 * GB, 12.5 * GB, "tpu-v6e-slice", 2, (1, 4, 8)),
    "v7x": Chip(PEAKS["TPU7x"], 96 * 2**30, 3690 * GB, 300 * GB, 6.25 * GB, "tpu7x", 3, chips=9216, cores=2),
    "a100": Chip(PEAKS["A100"], 40 * GB, 1555 * GB, 300 * GB, 25 * GB, "nvidia-tesla-a100"),
    "a100-80gb": Chip(PEAKS["A100"], 80 * GB, 2039 * GB, 300 * GB, 25 * GB, "nvidia-a100-80gb"),
    "h100": Chip(PEAKS["H100"], 80 * GB, 3350 * GB, 450 * GB, 50 * GB, "nvidia-h100-80gb"),
    "h200": Chip(PEAKS["H200"], 141 * GB, 4800 * GB, 450 * GB, 50 * GB, "nvidia-h200-141gb"),
    "b200": Chip(PEAKS["B200"], 180 * GB, 8000 * GB, 900 * GB, 50 * GB, "nvidia-b200"),
    "gb200": Chip(PEAKS["GB200"], 186 * GB, 8000 * GB, 900 * GB, 50 * GB, "nvidia-gb200", gpus=4, linked=72),
    "mi300x": Chip(PEAKS["MI300X"], 192 * GB, 5300 * GB, 448 * GB, 50 * GB, ""),
}

# Topologies of small TPU slices, by number of dimensions (sources: the pages above, and GKE's page
# on TPUs). Larger slices with three dimensions consist of whole cubes of 4x4x4 chips.
_SMALL = {
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"),
}


_MAX_GPUS = 2**15  # Largest number of GPUs that a target may have.


class Target(NamedTuple):
    """Accelerators of a training run: one or several equal TPU slices, or a number of GPUs."""

    name: str
    """Name of the accelerator, a key of KINDS."""
    sizes: tuple[int, ...]
    """Topology of one TPU slice, such as (4, 4, 4); for GPUs, (number of GPUs,)."""
    slices: int = 1
    """Number of TPU slices; 1 for GPUs."""

    @property
    def kind(self) -> Chip:
        return KINDS[self.name]

    @property
    def is_tpu(self) -> bool:
        return self.kind.torus > 0

    @property
    def topology(self) -> str:
        """Topology of one TPU slice, such as "4x4x4", or the number of GPUs, as a string."""
        return "x".join(map(str, self.sizes))

    @property
    def devices(self) -> int:
        """Total number of JAX devices, over all slices."""
        return math.prod(self.sizes) * self.kind.cores * self.slices

    @property
    def chips_per_host(self) -> int:
        """Number of TPU chips or GPUs per host."""
        chips = math.prod(self.sizes)
        if self.is_tpu:
            return chips if chips in self.kind.on_one_host else 4
        return min(chips, self.kind.gpus)

    @property
    def devices_per_host(self) -> int:
        """Number of JAX devices per host."""
        return self.chips_per_host * self.kind.cores

    @property
    def hosts(self) -> int:
        """Number of hosts per TPU slice, or for all GPUs together."""
        return math.prod(self.sizes) // self.chips_per_host

    @property
    def island(self) -> int:
        """Number of devices that direct links connect.

        These are the devices of a TPU slice, or the GPUs of a host or rack. A host or rack counts
        as a whole, even if the target uses only some of its GPUs.
        """
        return math.prod(self.sizes) * self.kind.cores if self.is_tpu else self.kind.linked


def parse(text: str) -> Target:
    """Parse an accelerator name such as v5p:4x4x4, v5p:4x4x4*2 (two slices) or h100:64.

    Raises ValueError for an unknown name or an impossible size.
    """
    name, _, size = text.partition(":")
    one_of("accelerator", name, KINDS)
    return _slices(name, size) if KINDS[name].torus else _gpus(name, size)


def mesh_over(sizes: tuple[int, ...], devices: int) -> AbstractMesh:
    """Return a mesh with axes (replica, fsdp, tensor) of these sizes.

    One size may be -1, which stands for all remaining devices. Raises ValueError unless the mesh
    uses exactly `devices` devices.
    """
    sizes = sharding.mesh_sizes(sizes, devices)
    if math.prod(sizes) != devices:
        axes = ", ".join(f"{a}={n}" for a, n in zip(sharding.AXES, sizes, strict=True))
        raise ValueError(
            f"mesh {axes} uses {math.prod(sizes)} of the target's {devices} devices: "
            "set one size to -1, such as mesh.fsdp=-1, or choose fewer devices"
        )
    return AbstractMesh(sizes, sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def _slices(name: str, size: str) -> Target:
    torus = KINDS[name].torus
    number = r"([1-9]\d*)"
    match = re.fullmatch("x".join([number] * torus) + rf"(?:\*{number})?", size)
    if not match:
        example = f"{name}:{'x'.join(['4'] * torus)}"
        raise ValueError(
            f"accelerator '{name}:{size}': a {name} slice has {torus} dimensions, such as "
            f"{example}, or {example}*2 for two slices; write positive numbers with x between them"
        )
    target = Target(name, tuple(map(int, match.groups()[:-1])), int(match.groups()[-1] or 1))
    small = _SMALL[torus]
    is_large = torus == 3 and all(n % 4 == 0 for n in target.sizes)
    is_sold = is_large and list(target.sizes) == sorted(target.sizes)
    if target.topology not in small and not is_sold:
        larger = ", or three multiples of 4 in ascending order, such as 4x4x8" * (torus == 3)
        raise ValueError(
            f"accelerator '{name}:{size}': there is no such {name} slice; choose {', '.join(small)}{larger}"
        )
    if (chips := math.prod(target.sizes)) > target.kind.chips:
        raise ValueError(
            f"accelerator '{name}:{size}' has {chips} chips, but a {name} slice has at most "
            f"{target.kind.chips}: choose a smaller slice, or several slices, written as "
            f"{name}:TOPOLOGY*2"
        )
    return target


def _gpus(name: str, size: str) -> Target:
    host = KINDS[name].gpus
    if not re.fullmatch(r"[1-9]\d*", size):
        raise ValueError(f"accelerator '{name}:{size}': give a number of GPUs, such as {name}:{host}")
    count = int(size)
    if count > _MAX_GPUS:
        raise ValueError(f"accelerator '{name}:{size}': choose at most {_MAX_GPUS:,} GPUs")
    if count > host and count % host:
        below = count // host * host
        raise ValueError(
            f"accelerator '{name}:{size}': each host has {host} GPUs, so choose {name}:{below} or {name}:{below + host}"
        )
    return Target(name, (count,))
