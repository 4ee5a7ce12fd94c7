"""Where a train step's time goes on a TPU, by its compiler's estimate: no chip has run it."""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh

from launch import accelerators
from launch.planner import audit, blocks, compiling, cycles, estimate
from launch.planner.audit import Audit
from launch.planner.blocks import Block, Measured
from launch.planner.cycles import Cost
from launch.planner.systems import Model


class Profile(NamedTuple):
    """A step of one device."""

    kind: str
    how: str
    """What was compiled: the whole program, or its blocks."""
    cycles: dict[str, float]
    """By kind of work, dearest first."""
    layers: dict[str, float]
    """By part of the network; names of a level's blocks are one."""
    dearest: list[Cost]
    flops: float
    """That the model asks for, nothing computed twice."""
    seconds: float
    """That compiling took."""
    unknown: int
    """Kernels that count for nothing."""
    audit: Audit

    @property
    def total(self) -> float:
        """Cycles of a step, communication between devices left out in a sum of blocks."""
        return sum(self.cycles.values())

    @property
    def clock(self) -> float:
        """Cycles a second."""
        return accelerators.KINDS[self.kind].peak / cycles.FLOP_PER_CYCLE[self.kind]

    @property
    def mfu(self) -> float:
        """The implied model FLOP utilization of the whole step."""
        return self.flops / (self.total * cycles.FLOP_PER_CYCLE[self.kind])

    @property
    def busy(self) -> float:
        """The same without the update of the parameters: what the planner calls arithmetic."""
        work = self.total - self.cycles.get(cycles.OPTIMIZER, 0.0)
        return self.flops / (work * cycles.FLOP_PER_CYCLE[self.kind])

    @property
    def update(self) -> float:
        """Seconds of the update of the parameters."""
        return self.cycles.get(cycles.OPTIMIZER, 0.0) / self.clock

    def summary(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "how": self.how,
            "cycles": self.cycles,
            "layers": self.layers,
            "dearest": [tuple(row) for row in self.dearest],
            "mfu": self.mfu,
            "compile_seconds": self.seconds,
            "unknown_kernels": self.unknown,
            "audit": self.audit._asdict(),
        }


def check(kind: str) -> None:
    """ValueError for accelerators whose compiler estimates no cycles."""
    if kind not in cycles.FLOP_PER_CYCLE:
        raise ValueError(
            f"--profile reads the cycles that the TPU compiler estimates, and there are none for "
            f"{kind}: choose from {', '.join(cycles.FLOP_PER_CYCLE)}"
        )


def of_blocks(
    model: Model, mesh: AbstractMesh, kind: str, say: Callable[[str], None] = lambda text: None
) -> Profile:
    """The blocks of a step, each compiled once and counted as often as it is called."""
    if mesh.shape["tensor"] > 1:
        raise ValueError(
            "mesh.tensor splits blocks over devices, and --profile --fast compiles them for one: "
            "leave --fast out, or set --config.mesh.tensor=1"
        )
    parts = blocks.record(model, estimate.local_batch(model, mesh))
    passes = estimate.passes(model, mesh)
    rows = []
    for place, block in enumerate(parts, 1):
        say(f"{place} of {len(parts)}: {block.label}")
        rows.append((block, blocks.measure(block, kind)))
    say("the update of the parameters")
    return total(rows, blocks.measure_update(model, mesh, kind), passes, kind)


def total(
    rows: Sequence[tuple[Block, Measured]], update: Measured, passes: int, kind: str
) -> Profile:
    """The sum over all calls of all blocks, and the update."""
    kinds, layers = collections.Counter(), collections.Counter()
    counted = [(passes * len(block.names), found) for block, found in rows]
    for times, found in [*counted, (1, update)]:
        for name, n in found.cycles.items():
            kinds[name] += times * n  # pyright: ignore[reportArgumentType]
    for block, found in rows:
        for name in block.names:
            layers[cycles.level(name)] += passes * found.total  # pyright: ignore[reportArgumentType]
    layers[blocks.UPDATE] += update.total  # pyright: ignore[reportArgumentType]
    dearest = sorted(
        (
            row._replace(cycles=times * row.cycles, what=f"{times} x {found.label}: {row.what}")
            for times, found in [*counted, (1, update)]
            for row in found.dearest
        ),
        reverse=True,
    )
    return Profile(
        kind=kind,
        how=f"the sum of {len(rows)} blocks and the update, each compiled alone",
        cycles=dict(kinds.most_common()),
        layers=dict(layers.most_common()),
        dearest=dearest[: blocks.DEAREST],
        flops=sum(times * found.flops for times, found in counted),
        seconds=sum(found.seconds for _, found in rows) + update.seconds,
        unknown=sum(times * found.unknown for times, found in counted),
        audit=audit.added([(times, found.audit) for times, found in [*counted, (1, update)]]),
    )


def of_program(program: compiling.Program, model: Model, mesh: AbstractMesh, kind: str) -> Profile:
    """A whole train step that was compiled for this mesh."""
    parts = blocks.record(model, estimate.local_batch(model, mesh))
    work = sum(len(block.names) * blocks.work(block) for block in parts)
    work *= estimate.passes(model, mesh) / mesh.shape["tensor"]
    found = blocks.measured(program, kind, "the whole program", work)
    order = lambda counts: dict(sorted(counts.items(), key=lambda item: -item[1]))
    return Profile(
        kind=kind,
        how="the whole program",
        cycles=order(found.cycles),
        layers=order({name or "other": n for name, n in found.layers.items()}),
        dearest=list(found.dearest),
        flops=work,
        seconds=found.seconds,
        unknown=found.unknown,
        audit=found.audit,
    )


def table(profile: Profile) -> list[tuple[str, str]]:
    """Rows for people: a name, and a text."""
    million = lambda n: f"{n / 1e6:,.1f} M" if n >= 1e5 else f"{n / 1e3:,.1f} k"
    shares = lambda counts: ", ".join(
        f"{name} {100 * n / profile.total:.0f} %"
        for name, n in list(counts.items())[:12]
        if n > 0.005 * profile.total
    )
    rows = [
        ("compiler's estimate", f"{million(profile.total)} cycles a step, "
                                f"{1e3 * profile.total / profile.clock:,.1f} ms at "
                                f"{profile.clock / 1e9:.2f} GHz: {100 * profile.mfu:.1f} % MFU. It "
                                f"is {profile.how}; compiling took {profile.seconds:,.0f} s. No "
                                "chip ran it"),
        ("by kind", shares(profile.cycles)),
        ("by layer", shares(profile.layers)),
        *(("dearest" * (not i), f"{million(row.cycles)} {row.kind}: {row.what}")
          for i, row in enumerate(profile.dearest)),
    ]  # fmt: skip
    if profile.unknown:
        rows.append(("not counted", f"{profile.unknown} kernels that have no estimate"))
    return [*rows, *(("audit", line) for line in audit.lines(profile.audit))]
