"""Profile of a train step on a TPU, from the compiler's estimates: nothing runs on a TPU."""

import collections
import sys
from collections.abc import Callable, Sequence

from jax.sharding import AbstractMesh

from benchmarks.profile import blocks, cycles
from benchmarks.profile.blocks import NetworkBlock, Profile
from diffusion_jax.devices import sharding
from diffusion_jax.train import optimizer
from launch import accelerators
from launch.accelerators import Target
from launch.planner import compiling
from launch.planner.tasks import PlannedTask


def check(kind: str) -> None:
    """Raise ValueError if the compiler for this kind of accelerator does not estimate cycles."""
    if kind not in cycles.FLOP_PER_CYCLE:
        raise ValueError(
            f"a profile needs the TPU compiler's estimates of cycles, which it does not make for "
            f"{kind}: choose a target from {', '.join(cycles.FLOP_PER_CYCLE)}"
        )


def of(model: PlannedTask, target: Target, whole: bool) -> Profile:
    """Compile a train step for a TPU slice, and return its profile.

    The step is compiled as a whole program or, by default, block by block. Lines on stderr tell
    how far the blocks are. Raises ValueError if the mesh does not suit the target or the blocks.
    """
    mesh = accelerators.mesh_over(model.mesh, target.devices)
    if whole:
        compiled, _ = compiling.analyse(model, target, mesh)
        assert compiled.program is not None  # It exists for TPUs, which `check` demands.
        return of_program(compiled.program, model, mesh, target.name)
    report = lambda text: print(f"  {text}", file=sys.stderr, flush=True)
    return of_blocks(model, mesh, target.name, report)


def of_blocks(
    model: PlannedTask, mesh: AbstractMesh, kind: str, report: Callable[[str], None] = lambda text: None
) -> Profile:
    """Return the profile of a train step as the sum of its blocks and the parameter update.

    Each distinct block is compiled once, and its estimates count once per call. Before each block
    is compiled, `report` is called with a line of text. Raises ValueError if the mesh's tensor axis
    is larger than 1.
    """
    if mesh.shape["tensor"] > 1:
        raise ValueError(
            "mesh.tensor splits blocks over devices, but each block is compiled for one device: "
            "add --whole, or set mesh.tensor=1"
        )
    samples, passes = _micro_batch(model, mesh)
    parts, rows = blocks.record(model, samples), []
    for i, block in enumerate(parts, 1):
        report(f"{i} of {len(parts)}: {block.label}")
        rows.append((block, blocks.measure(block, kind)))
    report("the update of the parameters")
    return total(rows, blocks.measure_update(model, mesh, kind), passes, kind)


def total(rows: Sequence[tuple[NetworkBlock, Profile]], update: Profile, passes: int, kind: str) -> Profile:
    """Add up the estimates of all block calls and of the parameter update; return the profile.

    `rows` holds each distinct block with its estimates. `passes` is the number of micro batches per
    step; all blocks run once per micro batch.
    """
    kinds, layers = collections.Counter(), collections.Counter()
    calls = [(passes * len(block.names), part) for block, part in rows]
    for times, part in [*calls, (1, update)]:
        for name, n in part.cycles.items():
            kinds[name] += times * n  # pyright: ignore[reportArgumentType]
    for block, part in rows:
        for name in block.names:
            layers[cycles.level(name)] += passes * part.total  # pyright: ignore[reportArgumentType]
    layers[blocks.UPDATE] += update.total  # pyright: ignore[reportArgumentType]
    costliest = sorted(
        (
            row._replace(cycles=times * row.cycles, description=f"{times} x {part.label}: {row.description}")
            for times, part in [*calls, (1, update)]
            for row in part.costliest
        ),
        reverse=True,
    )
    return Profile(
        kind=kind,
        label=f"the sum of {len(rows)} blocks and the update, each compiled separately",
        cycles=dict(kinds.most_common()),
        layers=dict(layers.most_common()),
        costliest=costliest[: blocks.COSTLIEST],
        flops=sum(times * part.flops for times, part in calls),
        temporary=None,
        seconds=sum(part.seconds for _, part in rows) + update.seconds,
        unknown=sum(times * part.unknown for times, part in calls),
    )


def of_program(program: compiling.CompiledProgram, model: PlannedTask, mesh: AbstractMesh, kind: str) -> Profile:
    """Return the profile of a whole train step, compiled for this mesh."""
    samples, passes = _micro_batch(model, mesh)
    parts = blocks.record(model, samples)
    work = sum(len(block.names) * blocks.work(block) for block in parts)
    work *= passes / mesh.shape["tensor"]
    step = blocks.measured(program, kind, "the whole program", work)
    order = lambda counts: dict(sorted(counts.items(), key=lambda item: -item[1]))
    layers = order({name or "other": n for name, n in step.layers.items()})
    return step._replace(cycles=order(step.cycles), layers=layers)


def _micro_batch(model: PlannedTask, mesh: AbstractMesh) -> tuple[int, int]:
    """Return (samples per device and pass, passes per step)."""
    passes = optimizer.num_passes(model.optimizer, model.run.batch_size, mesh)
    return model.run.batch_size // (sharding.batch_ways(mesh) * passes), passes


def table(profile: Profile) -> list[tuple[str, str]]:
    """Format a profile as a table, with rows (name, text)."""
    million = lambda n: f"{n / 1e6:,.1f} M" if n >= 1e5 else f"{n / 1e3:,.1f} k"
    shares = lambda counts: ", ".join(
        f"{name} {100 * n / profile.total:.0f} %" for name, n in list(counts.items())[:12] if n > 0.005 * profile.total
    )
    rows = [
        (
            "compiler's estimate",
            f"{million(profile.total)} cycles per step, "
            f"{1e3 * profile.total / profile.clock:,.1f} ms at "
            f"{profile.clock / 1e9:.2f} GHz: {100 * profile.mfu:.1f} % MFU. It "
            f"covers {profile.label}; compiling took {profile.seconds:,.0f} s. "
            "Nothing was measured",
        ),
        ("by kind", shares(profile.cycles)),
        ("by layer", shares(profile.layers)),
        *(
            ("most cycles" * (not i), f"{million(row.cycles)} {row.kind}: {row.description}")
            for i, row in enumerate(profile.costliest)
        ),
    ]
    if profile.unknown:
        rows.append(("not counted", f"{profile.unknown} kernels without an estimate"))
    return rows
