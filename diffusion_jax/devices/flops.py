"""Count the floating-point operations of a traced program's matrix products and convolutions."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend import core


def count(jaxpr: core.Jaxpr) -> int:
    """Return the FLOPs of a program's matrix products and convolutions.

    A multiplication with the addition of its result counts as two operations.
    Multiplications with padding count. Multiplications with the zeros between dilated pixels do
    not. So each of the two backward convolutions of a strided convolution counts as much as the
    forward convolution, as is usual in papers. The body of a `scan` counts once per iteration. The
    body of a `while` counts only once, because its number of iterations is unknown. For a `cond`,
    only the costliest branch counts. Operations that an attention kernel recomputes in its backward
    pass do not count.
    """
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: core.JaxprEqn) -> int:
    name = equation.primitive.name
    if name == "dot_general":
        return _of_dot(equation)
    if name == "conv_general_dilated":
        return _of_convolution(equation)
    if name.startswith(("dot_product_attention_fwd", "dot_product_attention_bwd")):
        return _of_cudnn(equation)
    if equation.params.get("name") == "recomputed":
        return 0
    inside = [count(jaxpr) for jaxpr in subjaxprs(equation)]
    if name == "cond":
        return max(inside)
    if name == "pallas_call":
        # Splash attention: its backward kernel has five products, one of them recomputed.
        work = sum(inside) * math.prod(equation.params["grid_mapping"].grid)
        return work * 4 // 5 if "dkv" in equation.params["name"] else work
    return sum(inside) * _times(name, equation.params)


def _times(name: str, params: Mapping[str, Any]) -> int:
    """Return how many times an equation runs its inner programs, summed over all devices."""
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
    taps = math.prod(kernel) // outputs  # Window size x input channels per output value.
    zeros = math.prod(equation.params["lhs_dilation"])
    return 2 * math.prod(_shape(equation.outvars[0])) * taps // zeros


def _of_cudnn(equation: core.JaxprEqn) -> int:
    """Count cuDNN's attention: two products forward, and four backward."""
    queries, keys = _shape(equation.invars[0]), _shape(equation.invars[1])
    products = 2 if "fwd" in equation.primitive.name else 4
    return products * 2 * math.prod(queries) * keys[1]


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def subjaxprs(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yield the inner programs of an equation such as jit, scan, cond or custom_vjp."""
    for value in equation.params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            inner: Any = getattr(item, "jaxpr", item)  # A ClosedJaxpr has a jaxpr.
            if isinstance(inner, core.Jaxpr):
                yield inner
