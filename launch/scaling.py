"""Print docs/lab/scaling.md, the page with the planner's predicted scaling for 1 to 512 devices.

python -m launch.scaling > docs/lab/scaling.md
"""

import importlib
from collections.abc import Mapping
from typing import NamedTuple

from absl import flags

from diffusion_jax import cli
from launch import templates
from launch.accelerators import KINDS, Target
from launch.planner import choice, compiling, estimate, tasks
from launch.planner.choice import MeshChoice
from launch.planner.estimate import TracedModel

CONFIGS = ("base64_500m", "base64_2b", "sr256_400m", "sr256_600m", "sr1024_600m", "sd2_512_base")
_KINDS = ("h100", "v5p")
DEVICES = (1, 8, 16, 32, 64, 128, 256, 512)
_TORUS = {1: (1, 1, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8),
          256: (4, 8, 8), 512: (8, 8, 8)}  # fmt: skip
_MFU = flags.DEFINE_float("mfu", 0.4, "Assumed model FLOP utilization of one device.", 1e-3, 1.0)


class Section(NamedTuple):
    """Content of one model's section of the page."""

    cost: str
    """Text that gives the TFLOP per sample and the global batch size."""
    rows: list[tuple[int, str, list[str]]]
    """Rows of the table: (devices, samples per device, cells for each kind of accelerator)."""
    ends: str
    """Text that gives, for each kind of accelerator, the largest number of devices on which each
    device reaches at least 90 % of the samples/s of a single device."""


def main() -> None:
    """Print docs/lab/scaling.md. The train step of each model is traced only once."""
    compiling.prepare(1)
    sections, efficiencies = {}, []
    for name in CONFIGS:
        config = importlib.import_module(f"configs.{name}").get_config()
        with cli.bad_input():
            traced = estimate.trace(tasks.read(config.to_dict()))
        curves = {kind: curve(traced, kind, _MFU.value) for kind in _KINDS}
        sections[name] = section(traced, curves)
        if not name.startswith("sd"):
            efficiencies.append(f"{100 * _efficiency(curves['h100'], 8, 128):.0f} % ({name})")
    mfu = f"{100 * _MFU.value:.0f}"
    values = {"kinds": _KINDS, "sections": sections, "efficiencies": efficiencies}
    print(templates.fill("scaling.md", mfu=mfu, **values), end="")


def section(traced: TracedModel, curves: Mapping[str, list[MeshChoice]]) -> Section:
    """Return a model's section of the page.

    `curves` maps each kind of accelerator to the result of `curve`.
    """
    batch = traced.model.run.batch_size
    rows = []
    for i, devices in enumerate(DEVICES):
        cells = [_cells(points[i], points[0], devices) for points in curves.values()]
        rows.append((devices, f"{batch // devices:,}", cells))
    cost = f"{traced.flops / 1e12:.3f} TFLOP per sample, batch {batch:,}."
    ends = ", ".join(f"{kind} {_linear_up_to(points)}" for kind, points in curves.items())
    return Section(cost, rows, ends)


def curve(traced: TracedModel, kind: str, mfu: float) -> list[MeshChoice]:
    """Return the fastest mesh and micro batch for each number of devices in DEVICES.

    `kind` is the accelerator, and `mfu` the assumed model FLOP utilization. Raises ValueError if
    the model does not fit into the memory of one of these numbers of devices.
    """
    return [best(traced, _target(kind, devices), mfu) for devices in DEVICES]


def best(traced: TracedModel, target: Target, mfu: float) -> MeshChoice:
    """Return the mesh and micro batch with the fastest step among those that fit into memory.

    Parameters are sharded over all devices, or over groups of eight. Step times assume that no
    communication overlaps with arithmetic. Raises ValueError if nothing fits.
    """
    shapes = {(1, target.devices), (max(1, target.devices // 8), min(8, target.devices))}
    fastest = choice.best(traced, target, mfu, sorted(shapes))
    if fastest is None:
        raise ValueError(
            f"no mesh and micro batch fit into the memory of {target.devices} {target.name}: "
            "choose more devices, or a smaller model"
        )
    return fastest


def _target(kind: str, devices: int) -> Target:
    return Target(kind, _TORUS[devices] if KINDS[kind].torus else (devices,))


def _cells(point: MeshChoice, one: MeshChoice, devices: int) -> str:
    replica, fsdp = point.mesh.shape["replica"], point.mesh.shape["fsdp"]
    mesh = f"{replica} x {fsdp}" + (f", {point.accumulate} parts" if point.accumulate > 1 else "")
    step = point.step
    share = [100 * one.step.exposed / (devices * s) for s in (step.exposed, step.hidden)]
    times = f"{1e3 * (step.arithmetic + step.update):,.0f}, {1e3 * step.communication:,.0f}"
    return f"{mesh} | {times} | {share[0]:.0f}, {share[1]:.0f}"


def _linear_up_to(points: list[MeshChoice]) -> int:
    """Return the largest number of devices that scales linearly to within 10 %.

    On this number, each device reaches at least 90 % of the samples/s of a single device.
    """
    return max(devices for devices in DEVICES if _efficiency(points, 1, devices) >= 0.9)


def _efficiency(points: list[MeshChoice], few: int, many: int) -> float:
    """Return samples/s per device on `many` devices, relative to `few` devices.

    Step times assume that no communication overlaps with arithmetic.
    """
    seconds_few, seconds_many = (points[DEVICES.index(n)].step.exposed for n in (few, many))
    return few * seconds_few / (many * seconds_many)


if __name__ == "__main__":
    cli.run(main)
