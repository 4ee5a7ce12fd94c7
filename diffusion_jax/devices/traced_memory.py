"""Estimate the memory of a traced program from its equations, without compiling it.

The estimate is a simple model of what the compiler does. Elementwise operations are fused into the
operations that use their results. A result takes memory only if a matrix product, convolution or
similar operation needs the whole array, or if it is expensive to compute and used more than once.
Reshapes, transpositions and reversals are free. Equations run in the order of tracing. An array is
freed after its last use.
"""

import collections
import dataclasses
import functools
import math
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core
from jaxtyping import Float, Int

from diffusion_jax.devices.flops import subjaxprs

_ALIASES = {
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "rev",
    "copy",
    "stop_gradient",
    "optimization_barrier",
    "sharding_constraint",
    "name",
    "reduce_precision",
}
_PRODUCTS = {"dot_general", "conv_general_dilated"}
_BATCHED = "batched_dot_general"
_OPAQUE = {
    *_PRODUCTS,
    _BATCHED,
    "sort",
    "scatter",
    "scatter-add",
    "gather",
    "cumsum",
    "while",
    "scan",
    "cond",
    "top_k",
    "custom_call",
}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax"}
_EXPENSIVE = {
    "exp",
    "log",
    "logistic",
    "tanh",
    "erf",
    "erf_inv",
    "pow",
    "sin",
    "cos",
    "rsqrt",
    "sqrt",
    "div",
    "rem",
    "log1p",
    "expm1",
    "threefry2x32",
    "random_bits",
}
_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "remat",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}


class Equation(NamedTuple):
    """One operation of a program. Variables are numbered; literals have the number -1."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedProgram:
    """A program whose calls are all inlined.

    `inputs` and `outputs` hold numbers of variables. `arrays` holds (shape, bytes per element) of
    each variable, in the order of the numbers.
    """

    equations: list[Equation]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arrays: list[tuple[tuple[int, ...], int]]


class Lifetimes(NamedTuple):
    """The lifetimes and sizes of a program's arrays.

    An array is in memory from equation number `start` up to, but not including, number `stop`.
    """

    start: Int[np.ndarray, "N"]
    stop: Int[np.ndarray, "N"]
    fixed: Float[np.ndarray, "N"]
    """Bytes of each array whose size does not depend on the batch size; 0 for other arrays."""
    each: Float[np.ndarray, "N"]
    """Bytes per sample of each array whose size depends on the batch size; 0 for other arrays."""


def flatten(jaxpr: core.Jaxpr) -> TracedProgram:
    """Convert a jaxpr to a TracedProgram. Calls are inlined, and unused equations left out."""
    equations: list[Equation] = []
    arrays: list[tuple[tuple[int, ...], int]] = []

    def number(var: Any) -> int:
        arrays.append((tuple(var.aval.shape), _itemsize(var.aval)))
        return len(arrays) - 1

    def run(jaxpr: core.Jaxpr, numbers: dict[Any, int]) -> tuple[int, ...]:
        def read(atom: Any) -> int:
            if isinstance(atom, core.Literal):
                return -1
            if atom not in numbers:
                numbers[atom] = number(atom)
            return numbers[atom]

        for equation in jaxpr.eqns:
            inputs = tuple(map(read, equation.invars))
            inner = next(subjaxprs(equation), None)
            if equation.primitive.name in _CALLS and inner is not None:
                outputs = run(inner, dict(zip(inner.invars, inputs, strict=True)))
                numbers.update(zip(equation.outvars, outputs, strict=True))
            else:
                outputs = tuple(map(read, equation.outvars))
                equations.append(Equation(_name(equation), inputs, outputs))
        return tuple(map(read, jaxpr.outvars))

    numbers = {var: number(var) for var in jaxpr.invars}
    inputs = tuple(numbers.values())
    outputs = run(jaxpr, numbers)
    return TracedProgram(_needed(equations, outputs), inputs, outputs, arrays)


def loops(jaxpr: core.Jaxpr) -> Iterator[core.Jaxpr]:
    """Yield a jaxpr, and those of its loops and branches, which `flatten` does not inline."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for inner in subjaxprs(equation):
            bodies = loops(inner)
            if equation.primitive.name in _CALLS:
                next(bodies)  # Inlined.
            yield from bodies


def split(program: TracedProgram, inputs: Set[int]) -> tuple[Set[int], list[int]]:
    """Return the variables that are sharded over devices, and the variables that are partial sums.

    `inputs` holds the sharded inputs. The product of a sharded and an unsharded array is sharded.
    The product of two sharded arrays is a partial sum on each device, as after the second of two
    tensor-parallel layers. Batched products, as in attention, are split along their batch axes and
    so have sharded results.
    """
    parts, summed = set(inputs), []
    for name, sources, outputs in program.equations:
        if name in _PRODUCTS and parts.issuperset(sources):
            summed += outputs
        elif not parts.isdisjoint(sources):
            parts.update(outputs)
    return parts, summed


def size(program: TracedProgram, var: int) -> int:
    """Return the size of a variable in bytes."""
    shape, itemsize = program.arrays[var]
    return math.prod(shape) * itemsize


def lifetimes(
    program: TracedProgram,
    samples: int,
    parts: Set[int],
    results: Mapping[int, int],
    ways: Mapping[int, int] = types.MappingProxyType({}),
) -> Lifetimes:
    """Return the lifetimes and sizes of the arrays of `program` that take memory.

    Args:
        program: A program traced with a batch of `samples`.
        samples: The batch size: a prime that divides no other size in the program. So the size of
            an array depends on the batch size if and only if `samples` divides the array's number
            of elements.
        parts: Inputs that are split over devices. They are gathered for operations that need them
            whole, and count as memory from the first to the last of these operations. Other inputs
            do not count.
        results: Maps each output that stays in memory to its bytes.
        ways: Maps each variable that stays sharded to the number of devices that share it.
    """
    stored, reads = _schedule(program, frozenset(parts))
    written = {v: i for i, equation in enumerate(program.equations) for v in equation.outputs}
    end = len(program.equations) + 1
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, sources in reads:
        for source in sources:
            first.setdefault(source, i)
            last[source] = i
    rows = []
    for var in stored:
        start = written.get(var, first.get(var, end))
        stop = max(last.get(var, start), start)
        # An elementwise operation can overwrite an input that is not used again.
        in_place = start < stop < end and program.equations[stop].name not in _OPAQUE
        bytes_ = size(program, var) / ways.get(var, 1)
        varies = math.prod(program.arrays[var][0]) % samples == 0
        sizes = (0, bytes_ / samples) if varies else (bytes_, 0)
        rows.append((start, stop + (not in_place), *sizes))
    rows += [(written.get(var, end) + 1, end + 1, bytes_, 0) for var, bytes_ in results.items()]
    columns = np.array(rows, np.float64).reshape(-1, 4).T
    return Lifetimes(columns[0].astype(int), columns[1].astype(int), columns[2], columns[3])


def peak(arrays: Lifetimes, batch: int) -> int:
    """Return the largest number of bytes in use at one time, for a batch of `batch` samples."""
    sizes = arrays.fixed + batch * arrays.each
    change = np.zeros(int(arrays.stop.max(initial=0)) + 2)
    np.add.at(change, arrays.start, sizes)
    np.add.at(change, arrays.stop, -sizes)
    return int(change.cumsum().max())


def _needed(equations: Sequence[Equation], outputs: Sequence[int]) -> list[Equation]:
    variables, needed = set(outputs), []
    for equation in reversed(equations):
        if not variables.isdisjoint(equation.outputs):
            variables.update(equation.inputs)
            needed.append(equation)
    return needed[::-1]


@functools.lru_cache(maxsize=4)
def _schedule(program: TracedProgram, parts: Set[int]) -> tuple[list[int], list[tuple[int, frozenset[int]]]]:
    """Return the variables that take memory, and which of them each equation reads.

    The second result holds pairs (number of the equation, variables).
    """
    whole, users = _needed_whole(program), _users(program)
    elements = lambda v: math.prod(program.arrays[v][0])
    sources = {v: frozenset([v]) for v in program.inputs}
    costly: set[int] = set()
    stored = [v for v in program.inputs if v in parts and v in whole]
    reads: list[tuple[int, frozenset[int]]] = []
    results = set(program.outputs)
    for i, (name, inputs, outputs) in enumerate(program.equations):
        if name in _ALIASES:
            for source, out in zip(inputs, outputs, strict=True):
                sources[out] = sources.get(source, frozenset())
                if source in costly:
                    costly.add(out)
            continue
        read = frozenset[int]().union(*(sources.get(v, ()) for v in inputs))
        out = outputs[0]
        if name not in _OPAQUE | _REDUCTIONS and len(outputs) == 1:
            grown = max((elements(v) for v in inputs if v >= 0), default=0) < elements(out)
            if name in _EXPENSIVE or (not grown and not costly.isdisjoint(inputs)):
                costly.add(out)
            if out not in whole and not (out in costly and users[out] > 1):
                sources[out] = read
                if out in results:
                    reads.append((i, read))
                continue
            costly.discard(out)
        for out in outputs:
            sources[out] = frozenset([out])
            stored.append(out)
        reads.append((i, read))
    return stored, reads


def _needed_whole(program: TracedProgram) -> set[int]:
    """Return the variables that matrix products, convolutions and similar operations read in full.

    The operations may read a variable directly or through an alias.
    """
    whole: set[int] = set()
    for name, inputs, outputs in reversed(program.equations):
        if name in _OPAQUE:
            whole.update(inputs)
        elif name in _ALIASES:
            whole.update(v for v, out in zip(inputs, outputs, strict=True) if out in whole)
    return whole


def _users(program: TracedProgram) -> Mapping[int, int]:
    """Return the number of equations that use each variable, directly or through an alias."""
    count: collections.Counter[int] = collections.Counter()
    for name, inputs, outputs in reversed(program.equations):
        if name in _ALIASES:
            for v, out in zip(inputs, outputs, strict=True):
                count[v] += count[out]
        else:
            count.update(set(inputs))
    return count


def _name(equation: core.JaxprEqn) -> str:
    name = equation.primitive.name
    batched = name == "dot_general" and equation.params["dimension_numbers"][1][0]
    return _BATCHED if batched else name


def _itemsize(aval: Any) -> int:
    try:
        return aval.dtype.itemsize
    except (AttributeError, TypeError, NotImplementedError):
        return 8  # A random key.
