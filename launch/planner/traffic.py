"""Communication between the devices of a mesh during a train step, and its predicted time."""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Int

from launch.accelerators import Target

Groups: TypeAlias = Int[np.ndarray, "G D"]
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8}

# A transfer to other TPU slices. The target "{1,2}x{0:3}" means that devices at the same position
# in slices 1 and 2 communicate. The target {{100000,100001,200000,200001}} means that devices 0 and
# 1 of slices 1 and 2 all communicate with each other.
_SEND = re.compile(
    r"= \((\w+)\[([\d,]*)\].* send\(.*_xla_megascale_target=(\"\{[^\"]*\"|\{\{.*?\}\})"
    r".*_xla_megascale_transfer_type=\"(\w+)\""
)
_SLICE = 100_000  # In such a target, device d of slice s has the number s * _SLICE + d.


class Collective(NamedTuple):
    """Collective operation, such as an all-gather: its kind, size and groups of devices."""

    kind: str
    size: int
    """Bytes of the full array: the result of a gather on a device, or its input to a reduction."""
    groups: Groups
    """Groups of communicating devices, one per row."""


def of_state(params: Any, layout: Any, sizes: Sequence[int], itemsize: int) -> list[Collective]:
    """Return the collectives of parameters and gradients in one forward and backward pass.

    `layout` holds the shardings of the parameters, `sizes` the mesh sizes (replica, fsdp, tensor),
    and `itemsize` the bytes per number in the dtype of the computation. Parameters that are sharded
    over fsdp are gathered in this dtype: convolution kernels twice, because the backward pass
    reverses them, and other parameters once. Each gradient is summed over all devices that hold a
    part of the batch. The communication of activations is not included.
    """
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    by_fsdp = ids.transpose(0, 2, 1).reshape(-1, sizes[1])
    by_replica = ids.transpose(1, 2, 0).reshape(-1, sizes[0])
    by_batch = ids.transpose(2, 0, 1).reshape(-1, sizes[0] * sizes[1])
    gathered = scattered = summed = 0
    for leaf, place in zip(jax.tree.leaves(params), jax.tree.leaves(layout), strict=True):
        split = axes(place.spec)
        size = leaf.size * itemsize // (sizes[2] if "tensor" in split else 1)
        if "fsdp" in split:
            gathered, scattered = gathered + size * (1 + (leaf.ndim == 4)), scattered + size
        else:
            summed += size
    collectives = [
        Collective("all-gather", gathered, by_fsdp),
        Collective("reduce-scatter", scattered, by_fsdp),
        Collective("all-reduce", scattered // sizes[1], by_replica),
        Collective("all-reduce", summed, by_batch),
    ]
    return [c for c in collectives if c.size and c.groups.shape[1] > 1]


def of_hlo(text: str, per_slice: int = 0) -> list[Collective]:
    """Return the collectives in a compiled program (HLO text); each counts once, even in a loop.

    If the compiler splits a collective into parts that overlap with computation, all these parts
    have the channel of the collective, which counts once.

    `per_slice` is the number of devices in a TPU slice. In a program for several slices, transfers
    between the slices follow a collective: each device sends to the devices at the same position in
    the other slices. These transfers are returned as additional collectives. Raises ValueError if
    the groups of a collective cannot be parsed.
    """
    collectives, channels = [], set()
    pattern = rf"= (.*?) ({'|'.join(_KINDS)})(-start)?\((.*)"
    for match in re.finditer(pattern, text):
        kind, arguments = match[2], match[4]
        if channel := re.search(r"channel_id=\d+", arguments):
            if (kind, channel[0]) in channels:
                continue
            channels.add((kind, channel[0]))
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        sizes = [_BYTES.get(t, 4) * math.prod(_numbers(dims)) for t, dims in shapes]
        # The shape of an asynchronous start includes its inputs: the larger array is the result.
        size = max(sizes) if match[3] and kind != "all-reduce" else sum(sizes)
        groups = _groups(arguments)
        members = groups.shape[1]
        if members > 1:
            # The result of a reduce-scatter is a part of the reduced array.
            full_size = size * (members if kind == "reduce-scatter" else 1)
            collectives.append(Collective(kind, full_size, groups))
    for dtype, dims, destination, transfer in _SEND.findall(text):
        groups = _slice_groups(destination, per_slice)
        kind = transfer.lower().replace("_", "-")
        size = _BYTES.get(dtype, 4) * math.prod(_numbers(dims))
        size *= groups.shape[1] if kind == "all-gather" else 1
        collectives.append(Collective(kind, size, groups))
    return collectives


def bytes_by_kind(collectives: Sequence[Collective]) -> dict[str, int]:
    """Return the bytes that each device sends with ring algorithms, by kind of collective."""
    sent: dict[str, int] = {}
    for c in collectives:
        members = c.groups.shape[1]
        sent[c.kind] = sent.get(c.kind, 0) + int(_rounds(c.kind) * c.size * (members - 1) / members)
    return sent


def seconds(collectives: Sequence[Collective], target: Target) -> float:
    """Predict the seconds of collectives that run one after the other, without latency.

    In a group of n devices, each device sends size * (n - 1) / n over the links within its node or
    slice. If the group spans m nodes or slices, each of these receives size * (m - 1) / m over the
    network, divided among the network cards of its devices in the group. An all-reduce sends twice
    as much. Links and network work at the same time, so the slower of the two determines the time.
    """
    return sum(max(_times(c, target)) for c in collectives)


def seconds_by_link(collectives: Sequence[Collective], target: Target) -> dict[str, float]:
    """Return the seconds for which the collectives use each kind of connection.

    The keys are "link" (direct links within a node or slice) and "network" (between them).
    """
    times = [_times(c, target) for c in collectives]
    return {"link": sum(t[0] for t in times), "network": sum(t[1] for t in times)}


def _times(c: Collective, target: Target) -> tuple[float, float]:
    kind, members = target.kind, c.groups.shape[1]
    islands = len(set(c.groups[0] // target.island))
    size = _rounds(c.kind) * c.size
    inside = 0.0 if islands == members else size * (members - 1) / members / kind.link
    cards = members / islands * kind.network
    return inside, size * (islands - 1) / islands / cards


def _rounds(kind: str) -> int:
    return 2 if kind == "all-reduce" else 1


def axes(spec: Any) -> set[str]:
    """Return the names of the mesh axes in a PartitionSpec."""
    return {n for names in spec for n in ((names,) if isinstance(names, str) else names or ())}


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_GRID = re.compile(rf"replica_groups=\[([\d,]+)\]<={_IOTA}")
_MESH = re.compile(rf"replica_groups=mesh\[(.*?)\](?:, device_ids=\({_IOTA}\))? \{{(.*?)\}}")
_LIST = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}")


def _groups(text: str) -> Groups:
    """Return the groups of devices that communicate in a collective, parsed from its HLO text.

    XLA writes groups as {{0,1},{2,3}}, [2,2]<=[4], [2,2]<=[2,2]T(1,0), mesh['a'=2,'b'=2] {'a'},
    mesh[...], device_ids=([2,2]T(1,0)) {'a'}, or as a list of (source, target) pairs. Raises
    ValueError for other forms.
    """
    if match := _GRID.search(text):
        shape, grid, order = (_numbers(part or "") for part in match.groups())
        return _iota(grid, order).reshape(shape)
    if match := _MESH.search(text):
        axes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        sizes = [*axes.values()]
        ids = _iota(_numbers(match[2] or str(math.prod(sizes))), _numbers(match[3] or ""))
        inside = [axis for axis in axes if f"'{axis}'" in match[4]]
        order = sorted(range(len(axes)), key=lambda i: [*axes][i] in inside)
        members = math.prod(axes[axis] for axis in inside)
        return ids.reshape(sizes).transpose(order).reshape(-1, members)
    if match := _LIST.search(text):
        return np.array([_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match[1])])
    raise ValueError(f"cannot parse the groups of devices in {text[:200]!r}: use --fast")


def _slice_groups(destination: str, per_slice: int) -> Groups:
    """Return the groups of devices that communicate in a transfer to other slices (see _SEND)."""
    if destination.startswith("{{"):
        groups = [_numbers(group) for group in re.findall(r"\d[\d,]*", destination)]
        slices, devices = np.divmod(np.array(groups), _SLICE)
        return (slices - 1) * per_slice + devices
    members = len(_range(destination[2 : destination.index("}")]))
    return np.arange(members * per_slice).reshape(members, per_slice).T


def _iota(grid: list[int], order: list[int]) -> Int[np.ndarray, "..."]:
    return np.arange(math.prod(grid)).reshape(grid).transpose(order or None)


def _range(text: str) -> list[int]:
    """Parse numbers and inclusive ranges, such as "1,2" or "0:3"."""
    ends = [[int(end) for end in part.split(":")] for part in text.split(",")]
    return [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
