"""Place arrays on a mesh of devices by a list of rules, so that models need no annotations."""

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

from diffusion_jax.devices.lazy_arrays import Stored

AXES = ("replica", "fsdp", "tensor")
# A rule's spec may be one of three words. FSDP splits an array over the mesh axis "fsdp", along its
# largest divisible axis. OUTPUTS and INPUTS also split a kernel over the mesh axis "tensor", along
# its outputs (the last axis) or its inputs (the last but one). If the first of two layers is split
# by outputs and the second by inputs, the devices exchange nothing between the two layers.
FSDP, OUTPUTS, INPUTS = "fsdp", "outputs", "inputs"
_TENSOR_AXIS = {OUTPUTS: -1, INPUTS: -2}
ShardingRules = Sequence[tuple[str, P | str]]
# Rules for the UNets, text encoders and autoencoders of both systems.
RULES: ShardingRules = [
    (r"conv1/(unit_)?kernel$", OUTPUTS),  # In residual blocks, with a group norm in between.
    (r"conv2/(unit_)?kernel$", INPUTS),
    (r"mlp1/kernel$", OUTPUTS),  # In transformers, with a GELU in between.
    (r"mlp2/kernel$", INPUTS),
    (r"(kernel|null_token|embedding)$", FSDP),
    (r"(bias|scale|frequencies)$", P()),
]


def make_mesh(replica: int = 1, fsdp: int = -1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh with the axes replica, fsdp and tensor over `devices`, by default all devices.

    One size may be -1. It becomes the number of devices divided by the product of the other sizes.
    Batches are split over replica and fsdp. Parameters are split over fsdp and tensor. If the
    product of the sizes is smaller than the number of devices, only the first devices are used. A
    job with several processes must use all devices. With several TPU slices, the axis replica spans
    the slices if its size is a multiple of the number of slices. Otherwise, the axis fsdp spans
    them.

    Raises:
        ValueError: The sizes do not fit the devices, processes or slices.
    """
    devices = list(devices or jax.devices())
    sizes = mesh_sizes((replica, fsdp, tensor), len(devices))
    used = math.prod(sizes)
    if used < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"mesh {_describe(sizes)} uses {used} of {len(devices)} devices, but "
            f"{jax.process_count()} processes must use all devices: set one size to -1"
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
    """Return the mesh sizes. A size of -1 becomes num_devices / (product of the other sizes).

    Raises ValueError if a size is invalid, or if the product of the positive sizes does not divide
    the number of devices.
    """
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(
            f"mesh {_describe(sizes)}: sizes must be positive, except that one may be -1 (all remaining devices)"
        )
    product = math.prod(size for size in sizes if size != -1)
    if num_devices % product:
        raise ValueError(
            f"mesh {_describe(sizes)} does not fit {num_devices} devices: {product} does not "
            f"divide {num_devices}; choose sizes whose product divides {num_devices}, or set one "
            "size to -1"
        )
    return tuple(num_devices // product if size == -1 else size for size in sizes)


def shardings(tree: Any, mesh: Mesh | AbstractMesh, rules: ShardingRules, *, fsdp_min_size: int = 2**16) -> Any:
    """Return a tree with the NamedSharding of each leaf of `tree`.

    The first rule whose pattern matches the leaf's path determines the sharding.

    Args:
        tree: Arrays or shapes. The path of a leaf looks like "opt_state/0/mu/params/conv1/kernel".
            So a rule for a parameter also places the parameter's averages and moments, unless its
            pattern starts with ^.
        mesh: The mesh.
        rules: (pattern, spec) pairs: a regular expression, and a PartitionSpec or one of the words
            FSDP, OUTPUTS and INPUTS. Scalars need no rule; they are replicated.
        fsdp_min_size: FSDP does not split arrays with fewer elements than this.

    Raises:
        ValueError: A leaf has no rule, or its rule does not fit its shape.
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
            f"no sharding rule matches the path {name!r} of an array of shape {leaf.shape}: add a "
            "rule whose pattern matches this path"
        )

    return jax.tree_util.tree_map_with_path(place, tree)


def placed(shapes: Any, where: Any) -> Any:
    """Return `shapes` as jax.ShapeDtypeStructs with the shardings in the tree `where`.

    Such a tree is needed to restore a checkpoint and to compile a program before arrays exist.
    """
    place = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    return jax.tree.map(place, shapes, where)


def ambient(mesh: Mesh | AbstractMesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `function` with this mesh as JAX's current mesh.

    The attention kernels look up the current mesh while they are traced.
    """

    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh

    @functools.wraps(function)
    def in_mesh(*args, **kwargs):
        with jax.sharding.use_abstract_mesh(abstract):
            return function(*args, **kwargs)

    return in_mesh


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of batches, which splits their first axis over replica and fsdp."""
    return NamedSharding(mesh, P(("replica", "fsdp")))


def batch_ways(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of parts into which `batch_sharding` splits a batch."""
    return mesh.shape["replica"] * mesh.shape["fsdp"]


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding that copies an array to every device, as for keys and metrics."""
    return NamedSharding(mesh, P())


def place(array: Any, sharding: NamedSharding) -> jax.Array:
    """Copy a host array to the devices of all processes, split by `sharding`.

    Every process must pass an equal array. If it is a `Stored` array, each process reads only the
    parts that its devices need.
    """
    array = array if isinstance(array, Stored) else np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def place_all(tree: Any, mesh: Mesh, rules: ShardingRules) -> Any:
    """Copy the arrays of `tree` to the devices, sharded by the rules, and return the new tree.

    The arrays are copied one at a time to save host memory.
    """
    return jax.tree.map(place, tree, shardings(tree, mesh, rules))


def check_batch(batch_size: int, micro_batch: int, mesh: Mesh | AbstractMesh) -> None:
    """Raise ValueError unless the devices can take equal micro batches.

    Args:
        batch_size: The number of samples in the global batch.
        micro_batch: The number of samples per device in one pass; 0 for a single pass.
        mesh: The mesh.
    """
    micro = f"optimizer.micro_batch {micro_batch} x " if micro_batch else ""
    ways = batch_ways(mesh)
    unit = (micro_batch or 1) * ways
    if batch_size < 1 or batch_size % unit:
        below = batch_size // unit * unit
        nearest = f"sizes are {below} and {below + unit}" if below > 0 else f"size is {unit}"
        if batch_size > 0 and batch_size % ways == 0:
            nearest += f", and optimizer.micro_batch may be a divisor of {batch_size // ways}"
        raise ValueError(
            f"batch_size {batch_size} is not divisible by {micro}"
            f"replica {mesh.shape['replica']} x fsdp {mesh.shape['fsdp']} = {unit}: "
            f"the nearest valid {nearest}"
        )


def _describe(sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))


def _across(sizes: tuple[int, ...], slices: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the mesh sizes within a slice, and the mesh sizes over slices.

    Raises ValueError if the number of slices divides neither the replica nor the fsdp axis.
    """
    for axis in (0, 1):
        if sizes[axis] % slices == 0:
            within, between = list(sizes), [1, 1, 1]
            within[axis] //= slices
            between[axis] = slices
            return tuple(within), tuple(between)
    raise ValueError(
        f"mesh {_describe(sizes)} does not fit {slices} slices: set replica or fsdp to a multiple "
        f"of {slices}, so that the tensor axis does not cross the slow network between slices"
    )


def _split(shape: tuple[int, ...], mesh: Any, min_size: int, tensor: int | None) -> P:
    """Return a spec that splits axis number `tensor` of an array over the mesh axis "tensor".

    If the size of the mesh axis "tensor" does not divide this array axis, the array axis stays
    whole. An array with at least `min_size` elements is also split over "fsdp", along its largest
    other axis that is divisible by the size of "fsdp".
    """
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
    if isinstance(spec, str) or len(spec) > len(shape):
        raise ValueError(
            f"sharding rule {spec!r} does not fit {name!r} of shape {shape}: use FSDP, OUTPUTS, "
            f"INPUTS or a PartitionSpec of at most {len(shape)} axes"
        )
    for axis, names in enumerate(spec):
        names = (names,) if isinstance(names, str) else names or ()
        ways = math.prod(mesh.shape[n] for n in names)
        if shape[axis] % ways:
            raise ValueError(
                f"axis {axis} of {name!r} with shape {shape} is not divisible by "
                f"{' x '.join(names)} = {ways}: choose a mesh size that divides {shape[axis]}"
            )
    return spec
