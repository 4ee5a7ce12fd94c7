"""A train step as the blocks that its networks are made of, each compiled once for a TPU.

A whole model takes the best part of an hour on a few cores; its blocks are few, and equal ones cost
the same. A block is a module that a network calls itself: a residual block, a transformer. Of the
parameters' update one program is made, without a network. What lies between the blocks
(concatenations, the loss) is left out, and what the compiler fuses across them is not.
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

from diffusion_jax.machine import flops, sharding
from diffusion_jax.train import loop, memory, optimizer
from launch.planner import audit, compiling, cycles, kernels
from launch.planner.audit import Audit
from launch.planner.cycles import Cost
from launch.planner.systems import Model

UPDATE = "update"
DEAREST = 10


class Block(NamedTuple):
    """A module as it is called, and what is equal in all calls that count as one."""

    label: str
    """Its class, and its inputs' shapes, such as "ResBlock 16x64x64x256, 16x1024"."""
    names: Sequence[str]
    """Those of the modules, in the order in which they are called."""
    module: nn.Module
    variables: Any
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]]
    """Positional and keyword arguments, arrays as shapes."""
    trained: bool
    """Whether it is part of a gradient; otherwise it runs forwards alone."""


class Measured(NamedTuple):
    """What the compiler says of a block, or of the update."""

    label: str
    cycles: Mapping[str, float]
    """By kind, see cycles.KINDS."""
    layers: Mapping[str, float]
    """Cycles by part of the network, as jax names it."""
    flops: float
    """Of matrix products and convolutions, what is computed again left out."""
    temporary: int
    """Bytes."""
    seconds: float
    """That compiling took."""
    dearest: Sequence[Cost]
    """The instructions that cost most."""
    unknown: int
    """Kernels of which there is no estimate."""
    audit: Audit

    @property
    def total(self) -> float:
        """Cycles of all kinds."""
        return sum(self.cycles.values())


def record(model: Model, samples: int) -> list[Block]:
    """The blocks of the loss of a batch; none is computed and nothing compiled.

    ValueError where the loss calls no flax module.
    """
    found: dict[Any, Block] = {}
    trained: set[int] = set()
    inside = 0

    def see(call, args, kwargs, context):
        nonlocal inside
        module, path = context.module, context.module.path
        if inside or not path or context.method_name != "__call__":
            return call(*args, **kwargs)
        variables = module.variables
        ours = any(id(leaf) in trained for leaf in jax.tree.leaves(variables))
        shape = lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf
        )
        variables, inputs = jax.tree.map(shape, (dict(variables), (args, kwargs)))
        block = Block(_label(module, inputs), [module.name], module, variables, inputs, ours)
        key = _fields(module), str(jax.tree.flatten((variables, inputs))), ours
        if key in found:
            block = found[key]._replace(names=[*found[key].names, module.name])
        found[key] = block
        inside += 1
        try:
            return call(*args, **kwargs)
        finally:
            inside -= 1

    def loss(params, *rest):
        trained.update(map(id, jax.tree.leaves(params)))
        with nn.intercept_methods(see):
            return model.task.loss(params, *rest)

    frozen, batch = memory.shapes(model.task.frozen), memory.batch_of(model.example, samples)
    jax.eval_shape(loss, model.state.params, frozen, batch, memory.abstract_key())
    if not found:
        raise ValueError("the loss calls no flax module whose blocks could be compiled")
    return list(found.values())


def work(block: Block) -> float:
    """FLOPs of a block's products, the gradient's twice those of its forward pass."""
    function, arguments = _programs(block)[0]
    once = flops.count(jax.make_jaxpr(function)(*arguments).jaxpr)
    return float(once * (3 if block.trained else 1))


def measure(block: Block, kind: str) -> Measured:
    """A block compiled for one TPU of a kind, with its gradient where it is trained."""
    mesh = compiling.one_device(kind)
    function, arguments = _programs(block)[block.trained]
    # Parameters lie as the state keeps them, activations as the compiler likes, which within a
    # whole program is free too: with fixed ones it would copy them at every block's border.
    fixed = sharding.replicated(mesh)
    free = Format(Layout.AUTO, fixed)
    places = (fixed, free, fixed, fixed, free)[: len(arguments)]
    results = (free, (fixed, free)) if block.trained else free
    run = sharding.ambient(mesh, function)
    lowered = jax.jit(run, in_shardings=places, out_shardings=results).lower(*arguments)
    label = block.label if block.trained else f"{block.label}, forward"
    return measured(compiling.compile_for(lowered, kind), kind, label, work(block))


def measure_update(model: Model, mesh: AbstractMesh, kind: str) -> Measured:
    """Clipping, optimizer and averages, on the part of the state that a device of `mesh` has."""
    one = compiling.one_device(kind)
    places = sharding.shardings(model.state, mesh, model.task.rules)
    whole = sharding.replicated(one)
    part = lambda leaf, where: jax.ShapeDtypeStruct(
        where.shard_shape(leaf.shape), leaf.dtype, sharding=whole
    )
    state = jax.tree.map(part, model.state, places)

    @jax.custom_vjp
    def loss_of(params, gradient):
        return jnp.zeros(())

    loss_of.defvjp(lambda params, gradient: (jnp.zeros(()), gradient), lambda g, _: (g, None))
    task = model.task._replace(loss=lambda p, frozen, batch, key: (loss_of(p, batch), {}))
    settings = model.optimizer._replace(accumulate=1, micro_batch=0)
    tx = optimizer.make_optimizer(settings, model.run.steps)
    step = loop.make_step(task, settings, tx, jax.tree.map(lambda _: whole, state))
    key = sharding.placed(memory.abstract_key(), whole)
    lowered = step.lower(state, {}, state.params, key)
    found = measured(compiling.compile_for(lowered, kind), kind, UPDATE, 0.0)
    dearest = [row._replace(kind=cycles.OPTIMIZER) for row in found.dearest]
    return found._replace(cycles={cycles.OPTIMIZER: found.total}, dearest=dearest)


def measured(program: compiling.Program, kind: str, label: str, work: float) -> Measured:
    """What a compiled program for a TPU of this kind says."""
    unknown = 0

    def of_kernel(instruction):
        nonlocal unknown
        found = kernels.cycles(kind, instruction)
        unknown += found is None
        return found

    by_kind: collections.Counter[str] = collections.Counter()
    layers: collections.Counter[str] = collections.Counter()
    rows = sorted(cycles.costs(program.text, of_kernel), reverse=True)
    for row in rows:
        by_kind[row.kind] += row.cycles  # pyright: ignore[reportArgumentType]
        layers[row.layer] += row.cycles  # pyright: ignore[reportArgumentType]
    return Measured(
        label=label,
        cycles=dict(by_kind),
        layers=dict(layers),
        flops=work,
        temporary=program.temporary,
        seconds=program.seconds,
        dearest=rows[:DEAREST],
        unknown=unknown,
        audit=audit.audit(program),
    )


def _programs(block: Block) -> tuple[tuple[Any, tuple], tuple[Any, tuple]]:
    """(function, arguments) of the block forwards, and of it with the gradient of all it reads."""
    leaves, tree = jax.tree.flatten(block.inputs)
    is_array = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    is_real = lambda leaf: is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
    real = [leaf for leaf in leaves if is_real(leaf)]
    whole = [leaf for leaf in leaves if is_array(leaf) and not is_real(leaf)]
    module = block.module.clone(parent=None, name=None)

    def forward(variables, real, whole, key):
        reals, wholes = iter(real), iter(whole)
        pick = lambda leaf: next(reals) if is_real(leaf) else next(wholes)
        filled = [pick(leaf) if is_array(leaf) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(tree, filled)
        return module.apply(variables, *args, rngs={"dropout": key}, **kwargs)

    def gradient(variables, real, whole, key, cotangents):
        run = lambda variables, real: forward(variables, real, whole, key)
        out, pull = jax.vjp(run, variables, real)
        return out, pull(cotangents)

    arguments = block.variables, real, whole, memory.abstract_key()
    cotangents = jax.eval_shape(forward, *arguments)
    return (forward, arguments), (gradient, (*arguments, cotangents))


def _label(module: nn.Module, inputs: Any) -> str:
    shapes = [leaf.shape for leaf in jax.tree.leaves(inputs) if hasattr(leaf, "shape")]
    name = re.sub(r"^(Checkpoint|_)+", "", type(module).__name__)
    width = getattr(module, "width", None) or getattr(module, "features", None)
    to = f" to {width}" if width else ""
    return f"{name} {', '.join('x'.join(map(str, shape)) for shape in shapes)}{to}"


def _fields(module: nn.Module) -> str:
    """A module's class and fields, apart from its place; functions by their names."""
    values = {f.name: getattr(module, f.name, None) for f in dataclasses.fields(module)}
    named = {
        name: getattr(value, "__qualname__", value)
        for name, value in values.items()
        if name not in ("parent", "name")
    }
    return f"{type(module).__qualname__} {named}"
