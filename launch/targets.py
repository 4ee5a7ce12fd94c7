"""What can be booked: the accelerators, and how a target such as v5p:4x4x4 or h100:64 is read."""

import difflib
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

GB = 1e9


class Accelerator(NamedTuple):
    """One device, as its maker gives it. Bandwidths are bytes/s of a device, one way."""

    peak: float
    """Dense bfloat16 FLOP/s."""
    memory: float
    """Bytes."""
    memory_bandwidth: float
    link: float
    """To the others of a node (NVLink) or of a slice (all inter-chip links together)."""
    network: float
    """To other nodes or slices."""
    torus: int
    """Dimensions of a TPU's topology; 0 for GPUs, which stand in nodes of 8."""


# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}, whose links are given for both ways
# together (v4: 2400 Gbit/s one way). Network: v5p 50 Gbit/s a chip, v5e 6.4 Tbit/s a pod of 256,
# v6e 25.6 Tbit/s a pod of 256; v4's is not given, so v5p's.
# GPUs, the SXM ones: NVIDIA's data sheets of A100 (2021), H100 (2022), H200 (2023), and of the
# systems DGX A100, H100, H200 and B200 (a card of 200 or 400 Gbit/s a GPU; memory of the system
# divided by 8). NVLink is given for both ways together.
ACCELERATORS: Mapping[str, Accelerator] = {
    "v4": Accelerator(275e12, 32 * 2**30, 1228 * GB, 300 * GB, 6.25 * GB, 3),
    "v5e": Accelerator(197e12, 16 * GB, 819 * GB, 200 * GB, 3.125 * GB, 2),
    "v5p": Accelerator(459e12, 95 * 2**30, 2765 * GB, 600 * GB, 6.25 * GB, 3),
    "v6e": Accelerator(918e12, 32 * GB, 1638 * GB, 400 * GB, 12.5 * GB, 2),
    "a100": Accelerator(312e12, 40 * GB, 1555 * GB, 300 * GB, 25 * GB, 0),
    "a100-80gb": Accelerator(312e12, 80 * GB, 2039 * GB, 300 * GB, 25 * GB, 0),
    "h100": Accelerator(989.4e12, 80 * GB, 3350 * GB, 450 * GB, 50 * GB, 0),
    "h200": Accelerator(989.4e12, 141 * GB, 4800 * GB, 450 * GB, 50 * GB, 0),
    "b200": Accelerator(2250e12, 180 * GB, 8000 * GB, 900 * GB, 50 * GB, 0),
}
GPUS_PER_NODE = 8


class Target(NamedTuple):
    """Devices of one kind."""

    kind: str
    topology: tuple[int, ...]
    """Of one TPU slice; (devices,) for GPUs."""
    slices: int

    @property
    def accelerator(self) -> Accelerator:
        """What each device can do."""
        return ACCELERATORS[self.kind]

    @property
    def devices(self) -> int:
        """Of all slices."""
        return math.prod(self.topology) * self.slices

    @property
    def island(self) -> int:
        """Devices that are joined by links: a slice, or a node."""
        return math.prod(self.topology) if self.accelerator.torus else GPUS_PER_NODE


def parse(text: str) -> Target:
    """KIND:DEVICES for GPUs, KIND:AxB or KIND:AxBxC for a TPU slice, with *N for N slices.

    ValueError that says what was probably meant.
    """
    match = re.fullmatch(r"([\w-]+):(\d+(?:x\d+)*)(?:\*(\d+))?", text)
    kind = match[1] if match else text.split(":")[0]
    if kind not in ACCELERATORS:
        close = difflib.get_close_matches(kind, ACCELERATORS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"unknown target {text!r}: {hint}known are {', '.join(ACCELERATORS)}")
    torus = ACCELERATORS[kind].torus
    form = {0: f"{kind}:64", 2: f"{kind}:4x4", 3: f"{kind}:4x4x4"}[torus]
    if not match:
        raise ValueError(f"cannot read the target {text!r}: write {form}")
    topology, slices = tuple(map(int, match[2].split("x"))), int(match[3] or 1)
    if len(topology) != (torus or 1) or min(*topology, slices) < 1 or (not torus and slices > 1):
        what = f"a torus of {torus} sizes" if torus else "a number of GPUs"
        raise ValueError(f"cannot read the target {text!r}: {kind} takes {what}, such as {form}")
    return Target(kind, topology, slices)
