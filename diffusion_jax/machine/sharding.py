"""Where every array lives: one mesh, one list of rules, no annotations in the models."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffusion_jax.machine.stored import Stored

AXES = ("replica", "fsdp", "tensor")
# A rule's spec may be one of three words. FSDP splits the largest axis that divides over "fsdp".
# The others also split a layer over "tensor", by its outputs (the last axis) or its inputs (the
# last but one): the first and the second of two layers, between which nothing is exchanged then.
FSDP, OUTPUTS, INPUTS = "fsdp", "outputs", "inputs"
_TENSOR_AXIS = {OUTPUTS: -1, INPUTS: -2}
Rules = Sequence[tuple[str, P | str]]
# Of the networks of both systems, their text encoders and autoencoders.
RULES: Rules = [
    (r"conv1/(unit_)?kernel$", OUTPUTS),  # Of residual blocks, between which lies a group norm.
    (r"conv2/(unit_)?kernel$", INPUTS),
    (r"(kernel|null_token|embedding)$", FSDP),
    (r"(bias|scale|frequencies)$", P()),
]


def make_mesh(
    replica: int = 1, fsdp: int = -1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over `devices` (default: all); one size may be -1 and takes what is left.

    Batches are split over replica and fsdp, parameters over fsdp and tensor. Sizes whose product
    is smaller than the number of devices use the first ones, which only one process may do. Where
    the devices are several TPU slices, replica spans them, or fsdp if replica cannot.
    """
    devices = list(devices or jax.devices())
    sizes = mesh_sizes((replica, fsdp, tensor), len(devices))
    used = math.prod(sizes)
    if used < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"mesh {_describe(sizes)} uses {used} of {len(devices)} devices, but "
            f"{jax.process_count()} processes must use all: set one size to -1"
        )
    # Auto, not the default Explicit: the compiler propagates shardings through the UNet.
    auto = (AxisType.Auto,) * 3
    slices = len({getattr(device, "slice_index", 0) for device in devices[:used]})
    if slices > 1:
        within, between = _across(sizes, slices)
        grid = mesh_utils.create_hybrid_device_mesh(within, between, devices[:used])
        return Mesh(grid, AXES, axis_types=auto)
    return jax.make_mesh(sizes, AXES, axis_types=auto, devices=devices[:used])


def mesh_sizes(sizes: tuple[int, ...], num_devices: int) -> tuple[int, ...]:
    """The sizes with -1 replaced; ValueError where they do not divide the devices."""
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(
            f"mesh {_describe(sizes)}: sizes are positive, and at most one is -1 (what is left)"
        )
    known = math.prod(size for size in sizes if size != -1)
    if num_devices % known:
        raise ValueError(
            f"mesh {_describe(sizes)} does not fit {num_devices} devices: {known} does not divide "
            f"{num_devices}; choose sizes whose product does, or -1 for one of them"
        )
    return tuple(num_devices // known if size == -1 else size for size in sizes)


def shardings(
    tree: Any, mesh: Mesh | AbstractMesh, rules: Rules, *, fsdp_min_size: int = 2**16
) -> Any:
    """A NamedSharding per leaf, from the first rule whose regex is found in the leaf's path.

    `tree` holds arrays or shapes; a path reads like "opt_state/0/mu/params/conv1/kernel", so that
    a rule that does not start with ^ places a parameter, its averages and its moments alike.
    Scalars need no rule. FSDP leaves arrays below `fsdp_min_size` elements whole. A leaf without
    a rule and a spec that does not fit its leaf are errors.
    """

    def place(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not leaf.shape:
            return replicated(mesh)
        for pattern, spec in rules:
            if re.search(pattern, name):
                if spec in (FSDP, OUTPUTS, INPUTS):
                    spec = _split(leaf.shape, mesh, fsdp_min_size, _TENSOR_AXIS.get(str(spec)))
                return NamedSharding(mesh, _checked(spec, name, leaf.shape, mesh))
        raise ValueError(
            f"no sharding rule matches {name!r} of shape {leaf.shape}: "
            "add a rule whose pattern is found in this path"
        )

    return jax.tree_util.tree_map_with_path(place, tree)


def placed(shapes: Any, where: Any) -> Any:
    """A jax.ShapeDtypeStruct with its sharding a leaf: what restoring and compiling ask for."""
    place = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    return jax.tree.map(place, shapes, where)


def ambient(mesh: Mesh | AbstractMesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, traced with the mesh in use: attention's kernels ask for it and its devices."""

    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh

    @functools.wraps(function)
    def in_mesh(*args, **kwargs):
        with jax.sharding.use_abstract_mesh(abstract):
            return function(*args, **kwargs)

    return in_mesh


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The first axis split over replica and fsdp: every array of a batch."""
    return NamedSharding(mesh, P(("replica", "fsdp")))


def batch_ways(mesh: Mesh | AbstractMesh) -> int:
    """The number of parts that `batch_sharding` splits a batch into."""
    return mesh.shape["replica"] * mesh.shape["fsdp"]


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """A whole copy on every device: keys, scalars, metrics."""
    return NamedSharding(mesh, P())


def place(array: Any, sharding: NamedSharding) -> jax.Array:
    """A host array, the same in every process, onto the devices of all of them.

    Of a `Stored` array each process reads its devices' parts alone.
    """
    array = array if isinstance(array, Stored) else np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def place_all(tree: Any, mesh: Mesh, rules: Rules) -> Any:
    """Every array of `tree` where the rules put it; one after the other, so that none is held."""
    return jax.tree.map(place, tree, shardings(tree, mesh, rules))


def check_batch(
    batch_size: int, accumulate: int, mesh: Mesh | AbstractMesh, name: str = "accumulate"
) -> None:
    """ValueError unless every micro batch divides over the devices that split it.

    `accumulate` counts micro batches, or, under another `name`, the samples of one.
    """
    if accumulate < 1:
        raise ValueError(f"{name} {accumulate} is not positive: 1 takes each batch whole")
    unit = accumulate * batch_ways(mesh)
    if batch_size < 1 or batch_size % unit:
        below = batch_size // unit * unit
        nearest = (
            f"sizes that do are {below} or {below + unit}"
            if below > 0
            else (f"size that does is {unit}")
        )
        raise ValueError(
            f"batch_size {batch_size} does not divide over {name} {accumulate} x "
            f"replica {mesh.shape['replica']} x fsdp {mesh.shape['fsdp']} = {unit}: "
            f"the nearest batch {nearest}"
        )


def _describe(sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))


def _across(sizes: tuple[int, ...], slices: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The mesh inside a slice, and over the slices; ValueError where no axis can span them."""
    for axis in (0, 1):
        if sizes[axis] % slices == 0:
            within, between = list(sizes), [1, 1, 1]
            within[axis] //= slices
            between[axis] = slices
            return tuple(within), tuple(between)
    raise ValueError(
        f"mesh {_describe(sizes)} does not fit {slices} slices: replica or fsdp must be a multiple "
        f"of {slices}, since tensor would cross the slow network between slices"
    )


def _split(shape: tuple[int, ...], mesh: Any, min_size: int, tensor: int | None) -> P:
    """Over tensor along the axis `tensor`, where that divides, and over fsdp along the largest."""
    spec: list[str | None] = [None] * len(shape)
    ways = mesh.shape["tensor"]
    if tensor is not None and ways > 1 and len(shape) >= -tensor and shape[tensor] % ways == 0:
        spec[tensor] = "tensor"
    if math.prod(shape) >= min_size:
        for axis in sorted(range(len(shape)), key=lambda i: -shape[i]):
            if shape[axis] % mesh.shape["fsdp"] == 0 and spec[axis] is None:
                spec[axis] = "fsdp"
                break
    while spec and spec[-1] is None:
        spec.pop()
    return P(*spec)


def _checked(spec: P | str, name: str, shape: tuple[int, ...], mesh: Any) -> P:
    """The spec, if `shape` has its axes and they divide."""
    if isinstance(spec, str) or len(spec) > len(shape):
        raise ValueError(f"sharding rule {spec!r} does not fit {name!r} of shape {shape}")
    for axis, names in enumerate(spec):
        names = (names,) if isinstance(names, str) else names or ()
        ways = math.prod(mesh.shape[n] for n in names)
        if shape[axis] % ways:
            raise ValueError(
                f"axis {axis} of {name!r} with shape {shape} does not divide over "
                f"{' x '.join(names)} = {ways}: choose a mesh size that divides {shape[axis]}"
            )
    return spec
