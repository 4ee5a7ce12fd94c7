"""Compilation of a train step for a TPU block by block, with each distinct block compiled once.

A block is a module that the network calls directly, such as a residual block or a transformer.
Compiling a whole model takes most of an hour on a few cores. Compiling by block is faster, because
a model has few distinct blocks. The update of the parameters is compiled as one more program.
Operations between blocks (concatenations, the loss) and fusions across blocks are left out.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh

from benchmarks.profile import cycles, pallas
from benchmarks.profile.cycles import Cost
from diffusion_jax.devices import flops, sharding
from diffusion_jax.train import loop, memory, optimizer
from launch.accelerators import KINDS
from launch.planner import compiling
from launch.planner.tasks import PlannedTask

UPDATE = "update"
"""Label of the parameter update."""
COSTLIEST = 10
"""Number of the most expensive instructions to list."""


class NetworkBlock(NamedTuple):
    """Block of a network: a module and its input shapes.

    Calls with equal modules and shapes share one block.
    """

    label: str
    """Class and input shapes, such as "ResBlock 16x64x64x256, 16x1024"."""
    names: Sequence[str]
    """Names of all modules that share this block, in the order of their calls."""
    module: nn.Module
    variables: Any
    """Variables of the module, with shapes in place of arrays."""
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]]
    """Positional and keyword arguments of a call, with shapes in place of arrays."""
    trained: bool
    """Whether the block has trained parameters; otherwise only its forward pass is compiled."""


class Profile(NamedTuple):
    """The compiler's estimates of a block, the parameter update or a step, for one TPU device."""

    kind: str
    """Kind of TPU, such as "v5e"."""
    label: str
    """Description of what was compiled, such as the whole program, or its blocks."""
    cycles: Mapping[str, float]
    """Estimated cycles by kind of work; cycles.KINDS lists the kinds."""
    layers: Mapping[str, float]
    """Estimated cycles by part of the network, such as "down_1_res": all residual blocks of one
    level."""
    flops: float
    """FLOPs of matrix products and convolutions, without recomputation."""
    temporary: int | None
    """Temporary memory in bytes; None for the sum of several programs."""
    seconds: float
    """Compile time in seconds."""
    costliest: Sequence[Cost]
    """The most expensive instructions, with the largest estimates first."""
    unknown: int
    """Number of kernels without an estimate, which count as 0 cycles."""

    @property
    def total(self) -> float:
        """Total cycles. If the blocks of a step were compiled separately (see `label`),
        communication between devices is not included."""
        return sum(self.cycles.values())

    @property
    def clock(self) -> float:
        """Clock rate in cycles per second."""
        return KINDS[self.kind].peak / cycles.FLOP_PER_CYCLE[self.kind]

    @property
    def mfu(self) -> float:
        """Model FLOP utilization of the whole step."""
        return self.flops / (self.total * cycles.FLOP_PER_CYCLE[self.kind])

    @property
    def update(self) -> float:
        """Seconds of the parameter update (optimizer and averages)."""
        return self.cycles.get(cycles.OPTIMIZER, 0.0) / self.clock

    def summary(self) -> dict[str, Any]:
        """Return the profile as a dict that can be written as JSON."""
        return {
            "how": self.label,
            "cycles": self.cycles,
            "layers": self.layers,
            "costliest": [tuple(row) for row in self.costliest],
            "mfu": self.mfu,
            "compile_seconds": self.seconds,
            "unknown_kernels": self.unknown,
        }


def record(model: PlannedTask, samples: int) -> list[NetworkBlock]:
    """Return the distinct blocks that the loss calls for a batch of this many samples.

    Nothing is computed or compiled. Raises ValueError if the loss calls no flax module.
    """
    blocks: dict[Any, NetworkBlock] = {}
    trained: set[int] = set()
    depth = 0

    def intercept(call, args, kwargs, context):
        nonlocal depth
        module, path = context.module, context.module.path
        if depth or not path or context.method_name != "__call__":
            return call(*args, **kwargs)
        variables = module.variables
        is_trained = any(id(leaf) in trained for leaf in jax.tree.leaves(variables))
        shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf
        variables, inputs = jax.tree.map(shape, (dict(variables), (args, kwargs)))
        block = NetworkBlock(_label(module, inputs), [module.name], module, variables, inputs, is_trained)
        key = _fields(module), str(jax.tree.flatten((variables, inputs))), is_trained
        if key in blocks:
            block = blocks[key]._replace(names=[*blocks[key].names, module.name])
        blocks[key] = block
        depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            depth -= 1

    def loss(params, *args):
        trained.update(map(id, jax.tree.leaves(params)))
        with nn.intercept_methods(intercept):
            return model.task.loss(params, *args)

    frozen, batch = memory.shapes(model.task.frozen), memory.batch_of(model.example, samples)
    jax.eval_shape(loss, model.state.params, frozen, batch, memory.abstract_keys(samples))
    if not blocks:
        raise ValueError("the loss calls no flax module, so there are no blocks: add --whole")
    return list(blocks.values())


def work(block: NetworkBlock) -> float:
    """Return the FLOPs of the matrix products and convolutions in one call of a block.

    For a trained block, the result includes the gradient, which takes twice the FLOPs of the
    forward pass.
    """
    function, arguments = _programs(block)[0]
    forward = flops.count(jax.make_jaxpr(function)(*arguments).jaxpr)
    return float(forward * (3 if block.trained else 1))


def measure(block: NetworkBlock, kind: str) -> Profile:
    """Compile a block for one TPU of this kind, and return the compiler's estimates.

    For a trained block, the program also computes the gradient.
    """
    mesh = compiling.one_device(kind)
    function, arguments = _programs(block)[block.trained]
    # Parameters keep the layout of the train state. The compiler chooses the layout of activations,
    # as in a whole program. A fixed layout would add copies at the inputs and outputs of blocks.
    fixed = sharding.replicated(mesh)
    automatic = Format(Layout.AUTO, fixed)
    places = (fixed, automatic, fixed, fixed, automatic)[: len(arguments)]
    results = (automatic, (fixed, automatic)) if block.trained else automatic
    run = sharding.ambient(mesh, function)
    lowered = jax.jit(run, in_shardings=places, out_shardings=results).lower(*arguments)
    label = block.label if block.trained else f"{block.label}, forward"
    return measured(compiling.compile_for(lowered, kind), kind, label, work(block))


def measure_update(model: PlannedTask, mesh: AbstractMesh, kind: str) -> Profile:
    """Compile the parameter update for one TPU of this kind, and return the compiler's estimates.

    For the part of the train state that one device of `mesh` holds, the program clips the gradient,
    runs the optimizer and updates the parameter averages.
    """
    places = sharding.shardings(model.state, mesh, model.task.rules)
    replicated = sharding.replicated(compiling.one_device(kind))
    shard = lambda leaf, place: jax.ShapeDtypeStruct(place.shard_shape(leaf.shape), leaf.dtype, sharding=replicated)
    state = jax.tree.map(shard, model.state, places)

    @jax.custom_vjp
    def loss_of(params, gradient):
        return jnp.zeros(())

    loss_of.defvjp(lambda params, gradient: (jnp.zeros(()), gradient), lambda g, _: (g, None))
    task = model.task._replace(loss=lambda p, frozen, batch, key: (loss_of(p, batch), {}))
    tx = optimizer.make_optimizer(model.optimizer, model.run.steps)
    step = loop.make_step(task, model.optimizer, tx, jax.tree.map(lambda _: replicated, state))
    key = sharding.placed(memory.abstract_key(), replicated)
    lowered = step.lower(state, {}, state.params, key)
    update = measured(compiling.compile_for(lowered, kind), kind, UPDATE, 0.0)
    costliest = [row._replace(kind=cycles.OPTIMIZER) for row in update.costliest]
    return update._replace(cycles={cycles.OPTIMIZER: update.total}, costliest=costliest)


def measured(program: compiling.CompiledProgram, kind: str, label: str, work: float) -> Profile:
    """Return the compiler's estimates for a compiled TPU program.

    `work` is the number of model FLOPs that the program computes; it is stored in `flops`.
    """
    unknown = 0

    def kernel_cycles(instruction):
        nonlocal unknown
        estimate = pallas.cycles(kind, instruction)
        unknown += estimate is None
        return estimate

    by_kind: collections.Counter[str] = collections.Counter()
    layers: collections.Counter[str] = collections.Counter()
    rows = sorted(cycles.costs(program.text, kernel_cycles), reverse=True)
    for row in rows:
        by_kind[row.kind] += row.cycles  # pyright: ignore[reportArgumentType]
        layers[row.layer] += row.cycles  # pyright: ignore[reportArgumentType]
    return Profile(
        kind=kind,
        label=label,
        cycles=dict(by_kind),
        layers=dict(layers),
        flops=work,
        temporary=program.temporary,
        seconds=program.seconds,
        costliest=rows[:COSTLIEST],
        unknown=unknown,
    )


def _programs(block: NetworkBlock) -> tuple[tuple[Any, tuple], tuple[Any, tuple]]:
    """Return (function, arguments) of two programs: the forward pass, and forward plus backward."""
    leaves, tree = jax.tree.flatten(block.inputs)
    is_array = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    is_float = lambda leaf: is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
    floats = [leaf for leaf in leaves if is_float(leaf)]
    others = [leaf for leaf in leaves if is_array(leaf) and not is_float(leaf)]
    module = block.module.clone(parent=None, name=None)

    def forward(variables, floats, others, key):
        next_float, next_other = iter(floats), iter(others)
        pick = lambda leaf: next(next_float) if is_float(leaf) else next(next_other)
        inputs = [pick(leaf) if is_array(leaf) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(tree, inputs)
        return module.apply(variables, *args, rngs={"dropout": key}, **kwargs)

    def gradient(variables, floats, others, key, cotangents):
        run = lambda variables, floats: forward(variables, floats, others, key)
        out, pull = jax.vjp(run, variables, floats)
        return out, pull(cotangents)

    arguments = block.variables, floats, others, memory.abstract_key()
    cotangents = jax.eval_shape(forward, *arguments)
    return (forward, arguments), (gradient, (*arguments, cotangents))


def _label(module: nn.Module, inputs: Any) -> str:
    shapes = [leaf.shape for leaf in jax.tree.leaves(inputs) if hasattr(leaf, "shape")]
    name = re.sub(r"^(Checkpoint|_)+", "", type(module).__name__)
    width = getattr(module, "width", None) or getattr(module, "features", None)
    to = f" to {width}" if width else ""
    return f"{name} {', '.join('x'.join(map(str, shape)) for shape in shapes)}{to}"


def _fields(module: nn.Module) -> str:
    """Return a string that identifies a module's class and fields, without its name."""
    values = {f.name: getattr(module, f.name, None) for f in dataclasses.fields(module)}
    fields = {
        name: getattr(value, "__qualname__", value) for name, value in values.items() if name not in ("parent", "name")
    }
    return f"{type(module).__qualname__} {fields}"
