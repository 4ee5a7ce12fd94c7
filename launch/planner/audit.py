"""What a compiled program does that costs time and computes nothing, on a TPU or a GPU."""

import collections
import re
from collections.abc import Sequence
from typing import NamedTuple

from launch.planner import compiling, hlo
from launch.planner.cycles import EXCHANGES, PRODUCTS
from launch.planner.hlo import Instruction, Program

_COPIES = {"copy", "transpose"}
_GPU_PRODUCT = re.compile(r'custom_call_target="__cu(dnn\$conv|blas)')


class Audit(NamedTuple):
    """Findings, all of one run of the program on one device."""

    products: int
    """Convolutions and matrix products; those in loops count as often as they run."""
    products_written: int
    """Those of the program before it was compiled: fewer, where the compiler split some (a
    "windowed einsum" over the parts of a weight), more, where it merged."""
    float32_products: list[str]
    """Those whose operands are all float32: a TPU takes several passes for each."""
    gathers: dict[str, int]
    """Bytes of gathered arrays, by dtype."""
    collectives: int
    exposed: list[str]
    """Those during which nothing is computed: not asynchronous, or waited for at once."""
    copies: int
    copied_bytes: int
    """Copies and transpositions, and what they write."""
    written_bytes: int
    """By all instructions,"""
    padding_bytes: int
    """and what fills up the tiles of that; 0 on GPUs."""


def audit(compiled: compiling.Program) -> Audit:
    """The findings of a compiled program."""
    program = hlo.read(compiled.text)
    products = copies = copied = written = padded = collectives = 0
    gathers: collections.Counter[str] = collections.Counter()
    singles: collections.Counter[str] = collections.Counter()
    for instruction, times in program.run():
        inner = program.inside(instruction)
        for part in inner:
            if part.opcode in PRODUCTS or _GPU_PRODUCT.search(part.rest):
                products += times
                if _is_float32(program, part):
                    singles[part.source] += times
        opcodes = {part.opcode for part in inner}
        if opcodes & _COPIES and opcodes <= _COPIES | {"bitcast", "parameter", "tuple"}:
            copies += times
            copied += times * sum(array.bytes for array in instruction.results)
        if instruction.opcode.startswith(EXCHANGES) and not instruction.opcode.endswith("-done"):
            collectives += times
            if instruction.opcode.startswith("all-gather"):
                largest = max(instruction.results, key=lambda array: array.bytes)
                gathers[largest.dtype] += times * largest.bytes
        if instruction.opcode not in ("parameter", "tuple", "bitcast", "get-tuple-element"):
            written += times * sum(array.bytes for array in instruction.results)
            padded += times * sum(array.padded_bytes for array in instruction.results)
    return Audit(
        products=products,
        products_written=compiled.products,
        float32_products=[f"{source} ({n})" if n > 1 else source for source, n in singles.items()],
        gathers=dict(gathers),
        collectives=collectives,
        exposed=exposed(program),
        copies=copies,
        copied_bytes=copied,
        written_bytes=written,
        padding_bytes=padded - written,
    )


def added(audits: Sequence[tuple[int, Audit]]) -> Audit:
    """Of programs that run so many times; padding is that of the mean."""
    numbers = lambda name: sum(times * getattr(found, name) for times, found in audits)
    gathers = collections.Counter()
    for times, found in audits:
        gathers.update({dtype: times * n for dtype, n in found.gathers.items()})
    texts = lambda name: list(dict.fromkeys(t for _, found in audits for t in getattr(found, name)))
    return Audit(
        products=numbers("products"),
        products_written=numbers("products_written"),
        float32_products=texts("float32_products"),
        gathers=dict(gathers),
        collectives=numbers("collectives"),
        exposed=texts("exposed"),
        copies=numbers("copies"),
        copied_bytes=numbers("copied_bytes"),
        written_bytes=numbers("written_bytes"),
        padding_bytes=numbers("padding_bytes"),
    )


def lines(found: Audit) -> list[str]:
    """The findings for people."""
    gib = lambda n: f"{n / 2**30:,.2f} GiB"
    split = found.products - found.products_written
    some = lambda names: ", ".join(names[:5]) + (f" and {len(names) - 5} more" * (len(names) > 5))
    text = [
        f"{found.products:,} convolutions and matrix products of {found.products_written:,} that "
        "were written" + (f": {split:,} more, so some are split" if split > 0 else ""),
        f"{found.copies:,} copies and transpositions write {gib(found.copied_bytes)} of "
        f"{gib(found.written_bytes)}; filling up tiles adds {gib(found.padding_bytes)}",
    ]
    if found.float32_products:
        text.append(f"products in float32: {some(found.float32_products)}")
    if found.gathers:
        text.append("gathered: " + ", ".join(f"{gib(n)} {t}" for t, n in found.gathers.items()))
    if found.collectives:
        behind = f"{len(found.exposed)} of {found.collectives} collectives hide behind nothing"
        text.append(behind + (f": {some(found.exposed)}" if found.exposed else ""))
    return text


def exposed(program: Program) -> list[str]:
    """The collectives behind which nothing is hidden, by name."""
    found = []
    for instructions in program.computations.values():
        started: dict[str, int] = {}
        for place, instruction in enumerate(instructions):
            if instruction.opcode in EXCHANGES:
                found.append(instruction.name)
            elif instruction.opcode.startswith(EXCHANGES) and instruction.opcode.endswith("-start"):
                started[instruction.name] = place
            elif instruction.opcode.endswith("-done") and instruction.operands[0] in started:
                between = instructions[started[instruction.operands[0]] + 1 : place]
                if not any(i.opcode in ("fusion", *PRODUCTS, "custom-call") for i in between):
                    found.append(instruction.operands[0])
    return found


def _is_float32(program: Program, product: Instruction) -> bool:
    shapes = {
        i.name: i.shape
        for instructions in program.computations.values()
        if product in instructions
        for i in instructions
    }
    dtypes = [hlo.arrays(shapes[name])[0].dtype for name in product.operands[:2] if name in shapes]
    return bool(dtypes) and set(dtypes) == {"f32"}
