"""Parser for the text form (HLO) of XLA's compiled programs, with execution counts."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"(?:to_apply|called_computations|branch_computations|true_computation|false_computation)"
    r"=\{?((?:%?[\w.\-]+(?:, )?)+)\}?"
)
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "iota"}
_SIZES = re.compile(r"\b[a-z]\w*\[([\d,]*)\]")


class Instruction(NamedTuple):
    """One HLO instruction of a compiled program."""

    name: str
    shape: str
    """Shape of the result, as a string such as "bf16[8,128]{1,0}"."""
    opcode: str
    arguments: str
    """Operands and attributes, as a string."""

    @property
    def source(self) -> str:
        """Name of the JAX operation that this instruction computes; "" if the compiler added it."""
        match = re.search(r'op_name="([^"]*)"', self.arguments)
        return match[1] if match else ""

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results this instruction reads."""
        return re.findall(r"%([\w.\-]+)", self.arguments.partition("), ")[0])


class HloProgram(NamedTuple):
    """Compiled program: its computations (lists of instructions) by name."""

    computations: Mapping[str, Sequence[Instruction]]
    entry: str
    """Name of the main computation."""

    def run(self) -> Iterator[tuple[Instruction, int]]:
        """Yield (instruction, number of executions) in program order.

        Loops, calls and conditionals are expanded. A fusion counts as one instruction.
        """
        return self._run(self.entry, 1)

    def inside(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions inside a fusion or asynchronous call.

        For any other instruction, return a list with only this instruction.
        """
        called = re.search(r"calls=%?([\w.\-]+)", instruction.arguments)
        if not called or called[1] not in self.computations:
            return [instruction]
        return [i for inner in self.computations[called[1]] for i in self.inside(inner)]

    def _run(self, name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for instruction in self.computations[name]:
            for body, turns in self._bodies(instruction):
                yield from self._run(body, times * turns)
            if instruction.opcode not in ("while", "call", "conditional"):
                yield instruction, times

    def _bodies(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Return (name, executions) for each computation that an instruction runs.

        The list is empty unless the instruction is a loop, a call or a conditional.
        """
        if instruction.opcode == "while":
            match = re.search(r"body=%?([\w.\-]+)", instruction.arguments)
            return [(match[1], self._turns(instruction))] if match else []
        if instruction.opcode in ("call", "conditional"):
            lists = _CALLED.findall(instruction.arguments)
            names = [name for names in lists for name in re.findall(r"[\w.\-]+", names)]
            return [(name, 1) for name in names if name in self.computations]
        return []

    def _turns(self, loop: Instruction) -> int:
        """Return the number of iterations of a loop that counts from 0; 1 if unknown.

        XLA writes the number as an attribute of the loop. In libtpu's programs, only the loop's
        condition contains the number.
        """
        if match := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.arguments):
            return int(match[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.arguments)
        inside = self.computations.get(condition[1], ()) if condition else ()
        limits = {i.name: i.arguments.partition(")")[0] for i in inside if i.opcode == "constant"}
        for i in inside:
            if i.opcode == "compare" and "direction=LT" in i.arguments and i.operands[-1] in limits:
                return int(limits[i.operands[-1]])
        return 1


def read(text: str) -> HloProgram:
    """Parse a compiled program, as printed by `compiled.as_text()`.

    Raises ValueError if the text has no ENTRY computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    # An instruction with kernel metadata spans several lines: join them.
    for line in re.sub(r"\{\n(.*)\n\}\}", r"{\1}}", text).splitlines():
        header = None if line.startswith(" ") else _HEADER.match(line)
        if header:
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line == "}":
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(Instruction(*match.groups()[1:]))
    if not entry:
        raise ValueError("the text is not a compiled program: no line starts with ENTRY")
    return HloProgram(computations, entry)


def sizes(shapes: str) -> list[tuple[int, ...]]:
    """Return the sizes of each array in a text such as "(bf16[8,128]{1,0}, f32[])"."""
    return [tuple(int(n) for n in found.split(",") if n) for found in _SIZES.findall(shapes)]


def num_bytes(shapes: str) -> int:
    """Return the bytes of all arrays in a text such as "(bf16[8,128]{1,0}, f32[])"."""
    found = re.findall(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", shapes)
    bits = ((int(width or 8), count) for _, width, count in found)
    return sum(max(width, 8) // 8 * math.prod(int(n) for n in count.split(",") if n) for width, count in bits)


def bytes_moved(text: str) -> tuple[int, int]:
    """Count the bytes that a compiled program's instructions read and write, and its copies.

    Each instruction reads its operands and writes its result once. Returns (bytes, instructions
    that only copy or transpose).
    """
    program, moved, copies = read(text), 0, 0
    for name, instructions in program.computations.items():
        sizes = {i.name: num_bytes(i.shape) for i in instructions}
        for i in instructions if name == program.entry else ():
            if i.opcode in _FREE:
                continue
            moved += sizes[i.name] + sum(sizes.get(operand, 0) for operand in set(i.operands))
            kinds = {inner.opcode for inner in program.inside(i)} - _FREE
            copies += kinds <= {"copy", "transpose", "copy-start", "copy-done"}
    return moved, copies
