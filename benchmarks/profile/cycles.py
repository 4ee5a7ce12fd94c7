"""The TPU compiler's estimates of a program's cycles, by instruction and kind of work.

The compiler, libtpu, writes `estimated_cycles` into compiled programs. These estimates come from a
model of the TPU core and its memory, not from measurements. libtpu gives no estimates for Pallas
kernels; pallas.py estimates attention kernels.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from benchmarks.profile import hlo
from benchmarks.profile.hlo import HloProgram, Instruction

# bfloat16 FLOP per cycle of one JAX device. A v5e has four matrix units of 128 x 128, a v5p has
# eight (in two cores), and a v6e and half a v7x chip (one JAX device) have four of 256 x 256. With
# the peak rates in launch/accelerators.py, these give clocks of 1.5, 1.75, 1.75 and 2.2 GHz.
FLOP_PER_CYCLE: Mapping[str, int] = {"v5e": 2**17, "v5p": 2**18, "v6e": 2**19, "v7x": 2**19}
KINDS = ("matrix unit", "attention kernel", "norm", "softmax", "copies", "optimizer", "collectives", "elementwise")
MATRIX_UNIT, KERNEL, NORM, SOFTMAX, COPIES, OPTIMIZER, COLLECTIVES, ELEMENTWISE = KINDS
PRODUCTS = {"convolution", "dot"}
EXCHANGES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "send")
"""Opcodes of communication. A "send" is communication between TPU slices."""
_LAYOUT = {
    "copy",
    "transpose",
    "reshape",
    "convert",
    "slice",
    "pad",
    "tuple",
    "bitcast",
    "get-tuple-element",
    "constant",
    "parameter",
    "broadcast",
}
_MOVES = {"concatenate", "pad", "dynamic-update-slice", "dynamic-slice", "gather", "scatter", "slice"}
_ARITHMETIC = {"add", "multiply", "subtract", "divide", "exponential", "reduce", "rsqrt", "tanh"}


class Cost(NamedTuple):
    """Estimated cycles of an instruction, summed over all its executions."""

    cycles: float
    kind: str
    """Kind of work, one of KINDS."""
    layer: str
    """Part of the network that the instruction belongs to; "" if unknown."""
    description: str
    """Name, result and source of the instruction, for the user."""


def costs(text: str, kernel_cycles: Callable[[Instruction], float | None]) -> Iterator[Cost]:
    """Yield the cost of each instruction of a compiled program.

    `text` is the compiled program as printed by XLA. `kernel_cycles` estimates the cycles of a
    Pallas kernel, or returns None if it cannot. Instructions without an estimate are left out.
    """
    program = hlo.read(text)
    for instruction, times in program.run():
        match = re.search(r'estimated_cycles":"(\d+)"', instruction.arguments)
        cycles = float(match[1]) if match else 0.0
        if is_kernel(instruction):
            cycles = kernel_cycles(instruction) or 0.0
        if cycles:
            result = instruction.shape.partition("{")[0].lstrip("(")
            source = "/".join(_scopes(instruction.source))
            description = f"{instruction.name}, {result}, {source}"
            dominant, part = kind(program, instruction), layer(instruction.source)
            yield Cost(cycles * times, dominant, part, description)


def is_kernel(instruction: Instruction) -> bool:
    """Return whether an instruction is a Pallas kernel."""
    return 'custom_call_target="tpu_custom_call"' in instruction.arguments


def kind(program: HloProgram, instruction: Instruction) -> str:
    """Return the kind of work (one of KINDS) that takes most of an instruction's time."""
    opcode, source = instruction.opcode, instruction.source
    inside = program.inside(instruction)
    opcodes = {inner.opcode for inner in inside} | {opcode}
    if is_kernel(instruction):
        return KERNEL
    if opcodes & PRODUCTS:  # On v5e, such a fusion may also sum gradients.
        return MATRIX_UNIT
    if opcode.startswith(EXCHANGES) or opcodes & set(EXCHANGES):
        return COLLECTIVES
    if opcodes - {"fusion"} <= _LAYOUT or (opcodes & _MOVES and not opcodes & _ARITHMETIC):
        return COPIES
    if "jvp(" not in source and re.search(r"(^|/)(update|jit\(_?where\)|average)", source):
        return OPTIMIZER
    exponentials = (inner.source for inner in inside if inner.opcode == "exponential")
    if any("norm" in name for name in (source, *exponentials)):  # SiLU is part of a norm.
        return NORM
    exponential = "exponential" in opcodes and "erf" not in opcodes  # GELU's gradient has both.
    return SOFTMAX if exponential or "splash" in source else ELEMENTWISE


def layer(source: str) -> str:
    """Return the part of the network that an operation belongs to; "" if unknown.

    `source` is the operation's name in jax. For example,
    jit(train_step)/transpose(jvp(UNet))/down_1_0_res/conv1/... belongs to down_1_res.
    """
    match = re.search(r"jvp\(\w+\)+/(\w+)", source)
    return level(match[1]) if match else ""


def level(name: str) -> str:
    """Return a module's name without its number within a level of the network.

    For example, down_1_0_res becomes down_1_res, so that equal modules of a level are added up.
    """
    return re.sub(r"^(\w+?_\d+)_\d+", r"\1", name)


def _scopes(source: str) -> list[str]:
    """Split an operation's name into module names, without transformations such as jvp(...)."""
    wrapped = r"\b(jvp|transpose|jit|remat|checkpoint|rematted_computation|vmap|custom_vjp_call)\("
    while source != (source := re.sub(wrapped + r"([^()]*)\)", r"\2", source)):
        pass
    names = [name for name in source.split("/") if name not in ("", "checkpoint")]
    return names[1:]  # The first name is the jitted function.
