"""Audit of a compiled program: copies, split matrix products, padding, exposed communication."""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launch.planner import compiling, hlo
from launch.planner.cycles import EXCHANGES, PRODUCTS
from launch.planner.hlo import HloProgram, Instruction

_COPIES = {"copy", "transpose"}
_GPU_PRODUCT = re.compile(r'custom_call_target="__cu(dnn\$conv|blas)')


class Audit(NamedTuple):
    """Audit of a compiled program: counts and bytes for one execution on one device."""

    products: int
    """Number of executed convolutions and matrix products; each loop iteration counts."""
    products_written: int
    """Number of convolutions and matrix products in the program before compilation. If `products`
    is larger, the compiler split some of them (a "windowed einsum" over parts of a weight). If it
    is smaller, the compiler merged some."""
    float32_products: list[str]
    """Names of convolutions and matrix products with only float32 operands, with the number of
    executions in brackets if above 1. They are slow on a TPU, because each takes several passes."""
    gathers: dict[str, int]
    """Bytes of the results of all-gathers, by dtype."""
    collectives: int
    """Number of executed collectives; each loop iteration counts."""
    exposed: Mapping[str, int]
    """Collectives that do not overlap with computation: number of executions by name. They are
    synchronous, or the program waits for their end right after their start."""
    copies: int
    """Number of executed copies and transpositions; each loop iteration counts."""
    copied_bytes: int
    """Bytes written by copies and transpositions."""
    written_bytes: int
    """Bytes written by all instructions."""
    padding_bytes: int
    """Bytes of padding that fill the written arrays up to full TPU tiles; 0 on GPUs."""


def audit(compiled: compiling.CompiledProgram) -> Audit:
    """Return the number of matrix products, copies and so on in a compiled program, as an Audit."""
    program = hlo.read(compiled.text)
    products = copies = copied = written = padded = 0
    gathers: collections.Counter[str] = collections.Counter()
    singles: collections.Counter[str] = collections.Counter()
    for instruction, times in program.run():
        inner = program.inside(instruction)
        for part in inner:
            if part.opcode in PRODUCTS or _GPU_PRODUCT.search(part.arguments):
                products += times
                if _is_float32(program, part):
                    singles[part.source] += times
        opcodes = {part.opcode for part in inner}
        if opcodes & _COPIES and opcodes <= _COPIES | {"bitcast", "parameter", "tuple"}:
            copies += times
            copied += times * sum(array.bytes for array in instruction.results)
        if instruction.opcode in ("all-gather", "all-gather-start"):
            largest = max(instruction.results, key=lambda array: array.bytes)
            gathers[largest.dtype] += times * largest.bytes
        if instruction.opcode not in ("parameter", "tuple", "bitcast", "get-tuple-element"):
            written += times * sum(array.bytes for array in instruction.results)
            padded += times * sum(array.padded_bytes for array in instruction.results)
    # Synchronous collectives, which have no separate start and end, never overlap.
    collectives = []
    for instructions, times in program.sequences():
        ends = {
            instruction.operands[0]: place
            for place, instruction in enumerate(instructions)
            if instruction.opcode.endswith("-done") and instruction.operands
        }
        for place, instruction in enumerate(instructions):
            opcode = instruction.opcode
            if opcode.startswith(EXCHANGES) and not opcode.endswith("-done"):
                between = instructions[place + 1 : ends.get(instruction.name, place)]
                overlaps = any(i.opcode in ("fusion", *PRODUCTS, "custom-call") for i in between)
                collectives.append((instruction.name, times, overlaps))
    return Audit(
        products=products,
        products_written=compiled.products,
        float32_products=[f"{source} ({n})" if n > 1 else source for source, n in singles.items()],
        gathers=dict(gathers),
        collectives=sum(times for _, times, _ in collectives),
        exposed={name: times for name, times, overlaps in collectives if not overlaps},
        copies=copies,
        copied_bytes=copied,
        written_bytes=written,
        padding_bytes=padded - written,
    )


def added(audits: Sequence[tuple[int, Audit]]) -> Audit:
    """Return the sum of several programs' audits, each multiplied by its number of executions.

    `audits` holds pairs (number of executions, audit of one execution).
    """

    def of_field(name: str) -> Any:
        values = [(times, getattr(part, name)) for times, part in audits]
        if name == "float32_products":
            return list(dict.fromkeys(product for _, products in values for product in products))
        if name not in ("gathers", "exposed"):
            return sum(times * n for times, n in values)
        counts = collections.Counter()
        for times, by_name in values:
            counts.update({key: times * n for key, n in by_name.items()})
        return dict(counts)

    return Audit(*map(of_field, Audit._fields))


def lines(audit: Audit) -> list[str]:
    """Format an audit as lines of text."""
    gib = lambda n: f"{n / 2**30:,.2f} GiB"
    split = audit.products - audit.products_written
    some = lambda names: ", ".join(names[:5]) + (f" and {len(names) - 5} more" * (len(names) > 5))
    text = [
        f"{audit.products:,} convolutions and matrix products, compiled from "
        f"{audit.products_written:,}" + (f": {split:,} more, so some are split" * (split > 0)),
        f"{audit.copies:,} copies and transpositions write {gib(audit.copied_bytes)} of the "
        f"{gib(audit.written_bytes)} that all instructions write; padding to full tiles adds "
        f"{gib(audit.padding_bytes)}",
    ]
    if audit.float32_products:
        text.append(f"convolutions and matrix products in float32: {some(audit.float32_products)}")
    if audit.gathers:
        text.append("all-gathered: " + ", ".join(f"{gib(n)} {t}" for t, n in audit.gathers.items()))
    if audit.collectives:
        exposed = (
            f"{sum(audit.exposed.values()):,} of {audit.collectives:,} collectives do not "
            "overlap with computation"
        )
        text.append(exposed + (f": {some([*audit.exposed])}" if audit.exposed else ""))
    return text


def _is_float32(program: HloProgram, product: Instruction) -> bool:
    shapes = {
        i.name: i.shape
        for instructions in program.computations.values()
        if product in instructions
        for i in instructions
    }
    dtypes = [hlo.arrays(shapes[name])[0].dtype for name in product.operands[:2] if name in shapes]
    return bool(dtypes) and set(dtypes) == {"f32"}
