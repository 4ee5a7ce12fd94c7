"""Scaling on paper: what the planner predicts for 1 to 512 devices, as docs/scaling.md.

python -m launch.scaling > docs/scaling.md
"""

import importlib
import itertools
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import app, flags
from jax.sharding import AbstractMesh

from diffusion_jax import cli
from diffusion_jax.machine import sharding
from launch.accelerators import KINDS, Target
from launch.planner import compiling, estimate, systems
from launch.planner.estimate import Traced

CONFIGS = ("base64_500m", "base64_2b", "sr256_400m", "sr256_600m", "sr1024_600m", "sd2_512_base")
_KINDS = ("h100", "v5p")
DEVICES = (1, 8, 16, 32, 64, 128, 256, 512)
_TORUS = {1: (1, 1, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8),
          256: (4, 8, 8), 512: (8, 8, 8)}  # fmt: skip
_MFU = flags.DEFINE_float("mfu", 0.4, "Model FLOP utilization of one device.")
_HEAD = """# Scaling on paper

Predicted, not measured: no accelerator was at hand. This page is what
`python -m launch.scaling > docs/scaling.md` prints.

The batch is the recipe's, whatever the number of devices; where a device's share does not fit its
memory, it is worked on in micro batches. Parameters are spread over all devices (`fsdp`), or over
eight and repeated (`replica` x `fsdp`), whichever is faster. Arithmetic runs at {mfu:.0f} % of the
peak of every device, the update at the bandwidth of its memory, communication at that of the
links, without latency. Attention is XLA's own, which keeps all scores: where cudnn's is used
(`attention_impl`), or rematerialization (`remat`), larger parts fit, and communicate less often. Of
the percentages, samples/s a device relative to one device, the first holds if no communication is
hidden behind arithmetic, the second if all is that can be. Real runs lie between, and lose more to
latency and to waiting, which is not modelled. A share of less than 8 to 16 samples lowers the
utilization itself, which is not modelled either.
"""
_TAIL = """\
NeMo gives 91 to 95 % for Imagen at 16 nodes of 8 GPUs against one node. Predicted for 128 H100s
against 8, nothing hidden, are {found}: what NeMo measured is at that end or a little below it, so
plan with the first percentage rather than the second. For Stable Diffusion 2 at 512 pixels, with
32 samples a GPU whatever their number, it measured 98 % (A100) and 88 % (H100) at 16 nodes, 93 %
and 79 % at 64. MLPerf's fastest runs of that model keep the batch nearly the same and lose more:
on H100 110 images/s a GPU at 64 GPUs, 73 at 512 and 48 at 1,024; on TPU v5p 86.6 a chip at 8
chips, 77.3 at 64 and 28.0 at 512. There a device has 2 to 16 samples: small shares end linear
scaling before the links do.
"""


class Point(NamedTuple):
    """The best mesh of a number of devices."""

    mesh: AbstractMesh
    accumulate: int
    step: estimate.Step


def main(argv: list[str]) -> None:
    """Traces each model once and prints the page."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
    compiling.prepare(1)
    print(_HEAD.format(mfu=100 * _MFU.value))
    found = []
    for name in CONFIGS:
        config = importlib.import_module(f"configs.{name}").get_config()
        with cli.bad_input():
            traced = estimate.trace(systems.read(config.to_dict()))
        rows = {kind: curve(traced, kind, _MFU.value) for kind in _KINDS}
        print(section(name, traced, rows), flush=True)
        if not name.startswith("sd"):
            found.append(f"{100 * _kept(rows['h100'], 8, 128):.0f} % ({name})")
    print("## Beside measurements")
    print(textwrap.fill(_TAIL.format(found=", ".join(found)), 100))


def section(name: str, traced: Traced, rows: Mapping[str, list[Point]]) -> str:
    """A model's table."""
    batch = traced.model.run.batch_size
    lines = [f"## {name}", f"{traced.flops / 1e12:.3f} TFLOP a sample, batch {batch:,}.", ""]
    titles = [f"{kind}: mesh | ms arithmetic, communication | %" for kind in _KINDS]
    lines += [f"| devices | share | {' | '.join(titles)} |", "|" + "---|" * 8]
    for i, devices in enumerate(DEVICES):
        cells = [_cells(points[i], points[0], devices) for points in rows.values()]
        lines.append(f"| {devices} | {batch // devices:,} | {' | '.join(cells)} |")
    ends = ", ".join(f"{kind} {_end(points)}" for kind, points in rows.items())
    lines += ["", f"Linear to within 10 %, nothing hidden, up to this number: {ends}.", ""]
    return "\n".join(lines)


def curve(traced: Traced, kind: str, mfu: float) -> list[Point]:
    """The best mesh for each number of devices; the smallest step, nothing hidden."""
    return [best(traced, _target(kind, devices), mfu) for devices in DEVICES]


def best(traced: Traced, target: Target, mfu: float) -> Point:
    """The mesh and the number of micro batches that take least time and fit."""
    devices = target.devices
    shapes = {(1, devices), (max(1, devices // 8), min(8, devices))}
    points = [_point(traced, target, replica, fsdp, mfu) for replica, fsdp in sorted(shapes)]
    return min((p for p in points if p), key=lambda point: point.step.exposed)


def _point(traced: Traced, target: Target, replica: int, fsdp: int, mfu: float) -> Point | None:
    mesh = AbstractMesh((replica, fsdp, 1), sharding.AXES)
    model = traced.model
    largest = estimate.largest_batch(traced, mesh, estimate.USABLE * target.kind.memory)
    batch = model.run.batch_size
    for accumulate in itertools.takewhile(lambda n: n * target.devices <= batch, _powers()):
        if batch // accumulate <= largest:
            optimizer = model.optimizer._replace(accumulate=accumulate)
            changed = traced._replace(model=model._replace(optimizer=optimizer))
            found = estimate.collectives(changed, mesh)
            step = estimate.step_time(changed, mesh, target, mfu, found)
            return Point(mesh, accumulate, step)
    return None


def _powers() -> Any:
    return (2**n for n in itertools.count())


def _target(kind: str, devices: int) -> Target:
    return Target(kind, _TORUS[devices] if KINDS[kind].torus else (devices,))


def _cells(point: Point, one: Point, devices: int) -> str:
    replica, fsdp = point.mesh.shape["replica"], point.mesh.shape["fsdp"]
    mesh = f"{replica} x {fsdp}" + (f", {point.accumulate} parts" if point.accumulate > 1 else "")
    step = point.step
    share = [100 * one.step.exposed / (devices * s) for s in (step.exposed, step.hidden)]
    times = f"{1e3 * (step.arithmetic + step.update):,.0f}, {1e3 * step.communication:,.0f}"
    return f"{mesh} | {times} | {share[0]:.0f}, {share[1]:.0f}"


def _end(points: list[Point]) -> int:
    """The most devices each of which does at least 90 % of what one alone does."""
    return max(devices for devices in DEVICES if _kept(points, 1, devices) >= 0.9)


def _kept(points: list[Point], few: int, many: int) -> float:
    """The speed of each of many devices over that of each of few, nothing hidden."""
    one, other = (points[DEVICES.index(devices)].step.exposed for devices in (few, many))
    return few * one / (many * other)


if __name__ == "__main__":
    cli.run(main)
