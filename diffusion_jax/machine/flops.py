"""The floating-point operations of a traced program: matrix products and convolutions."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend import core


def count(jaxpr: core.Jaxpr) -> int:
    """Two for each multiply-add of a dense matrix product or convolution, whatever its type.

    Taps that fall on padding count, zeros between dilated pixels do not: so a strided convolution
    costs as much backwards as forwards, and the numbers are those that papers give. Loops count as
    often as they run (a `while` once, since nobody knows), and of branches the costliest. What a
    kernel of attention computes again backwards does not count.
    """
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: core.JaxprEqn) -> int:
    name = equation.primitive.name
    if name == "dot_general":
        return _of_dot(equation)
    if name == "conv_general_dilated":
        return _of_convolution(equation)
    if equation.params.get("name") == "recomputed":
        return 0
    inside = [count(jaxpr) for jaxpr in subjaxprs(equation)]
    if name == "cond":
        return max(inside)
    if name == "pallas_call":
        # Splash attention, whose backward kernel has five products, the first for the second time.
        work = sum(inside) * math.prod(equation.params["grid_mapping"].grid)
        return work * 4 // 5 if "dkv" in equation.params["name"] else work
    return sum(inside) * _times(name, equation.params)


def _times(name: str, params: Mapping[str, Any]) -> int:
    """How often an equation runs its programs, over all devices."""
    if name == "scan":
        return params["length"]
    return params["mesh"].size if name == "shard_map" else 1


def _of_dot(equation: core.JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = _shape(equation.invars[0])
    return 2 * math.prod(_shape(equation.outvars[0])) * math.prod(left[i] for i in contracted)


def _of_convolution(equation: core.JaxprEqn) -> int:
    kernel = _shape(equation.invars[1])
    outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    taps = math.prod(kernel) // outputs  # Of one output: its window, and the channels in it.
    zeros = math.prod(equation.params["lhs_dilation"])
    return 2 * math.prod(_shape(equation.outvars[0])) * taps // zeros


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def subjaxprs(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The programs that an equation runs: those of jit, scan, cond, custom_vjp and the like."""
    for value in equation.params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            inner: Any = getattr(item, "jaxpr", item)  # Of a ClosedJaxpr.
            if isinstance(inner, core.Jaxpr):
                yield inner
