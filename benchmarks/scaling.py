"""Weak scaling: a config's train step on 1, 2, 4, ... nodes, as a table and a figure.

    python -m benchmarks.scaling --config=configs/base64_500m.py --workdir=runs/scaling

The config's batch_size is that of all nodes, of which fewer take their share, so that a device
always works on the same number of samples. Weights and data are random: see benchmarks.train_step.
The mesh needs an axis of -1, and optimizer.micro_batch rather than accumulate if several passes
are needed. Under several processes a node is a process; otherwise --devices_per_node says what
counts as one, and that such as JAX_NUM_CPU_DEVICES=8 makes eight of one computer.

--workdir gets scaling.csv, written anew after each number of nodes, and scaling.png: samples/s,
what perfectly linear scaling from the first line would give, the speed-up over that line and the
efficiency, which is the speed-up by the number of nodes relative to it.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import flags
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from benchmarks import measure, step
from diffusion_jax import cli
from diffusion_jax.evaluate import figures
from diffusion_jax.evaluate.figures import Line
from diffusion_jax.machine import sharding
from diffusion_jax.train import optimizer
from launch.planner.systems import Model

flags.adopt_module_key_flags(measure)
flags.adopt_module_key_flags(step)
_CONFIG = cli.define_config()
_NODES = flags.DEFINE_list("nodes", [], "Numbers of nodes; 1, 2, 4, ... and all.")
_PER_NODE = flags.DEFINE_integer(
    "devices_per_node", None, "Devices that count as a node; those of a process.", lower_bound=1
)


def main(argv: list[str]) -> None:
    """Compiles and measures one number of nodes after the other."""
    step.no_arguments(argv)
    cli.start()
    with cli.bad_input():
        model, _ = step.read(_CONFIG.value.to_dict())
        per_node = _PER_NODE.value or jax.local_device_count()
        measured = cases(model, nodes_of(_NODES.value, jax.device_count(), per_node), per_node)
    rows: list[dict[str, Any]] = []
    for nodes, mesh, case in measured:
        if any(device.process_index == jax.process_index() for device in mesh.devices.flat):
            timing = step.run(case, mesh)
            rows.append(row(nodes, case, timing, mesh.size, rows))
            measure.say(rows[-1])
        if jax.process_count() > 1:  # The others wait until their nodes are needed.
            multihost_utils.sync_global_devices(f"{nodes} nodes")
        if jax.process_index() == 0:
            measure.write("scaling.csv", table(rows))
    if jax.process_index() == 0:
        measure.write("scaling.png", figures.save(figure(rows), "png"))


def nodes_of(names: Sequence[str], devices: int, per_node: int) -> list[int]:
    """The numbers of nodes to measure; ValueError for such as are not there."""
    most = devices // per_node
    if devices % per_node:
        raise ValueError(f"--devices_per_node={per_node} does not divide {devices} devices")
    if not all(name.isdigit() and 1 <= int(name) <= most for name in names):
        raise ValueError(f"--nodes={','.join(names)}: give numbers from 1 to {most}, as 1,2,4")
    powers = [2**n for n in range(most.bit_length())]
    return sorted({int(name) for name in names} or {*powers, most})


def cases(model: Model, numbers: Sequence[int], per_node: int) -> list[tuple[int, Mesh, Model]]:
    """A mesh and the model with its share of the batch for each number of nodes, all checked."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    rows = []
    for nodes in numbers:
        batch, rest = divmod(model.run.batch_size * nodes * per_node, len(devices))
        if rest:
            raise ValueError(
                f"batch_size {model.run.batch_size} is that of all {len(devices)} devices, which "
                "it does not divide over: take a multiple"
            )
        mesh = sharding.make_mesh(*model.mesh, devices=devices[: nodes * per_node])
        if mesh.size != nodes * per_node:
            raise ValueError(
                f"mesh {dict(mesh.shape)} uses {mesh.size} of {nodes * per_node} devices: set one "
                "size to -1, such as --config.mesh.fsdp=-1"
            )
        run = model.run._replace(batch_size=batch)
        settings = optimizer.for_mesh(model.optimizer, batch, mesh)
        rows.append((nodes, mesh, model._replace(run=run, optimizer=settings)))
    return rows


def row(
    nodes: int, model: Model, timing: step.Timing, devices: int, before: Sequence[Mapping]
) -> dict[str, Any]:
    """A line of the table; the first of `before`, or this one, is what it is compared with."""
    batch = model.run.batch_size
    rate = batch / timing.median
    first = before[0] if before else {"nodes": nodes, "samples_per_second": rate}
    linear = first["samples_per_second"] * nodes / first["nodes"]
    return {
        "nodes": nodes,
        "devices": devices,
        "batch": batch,
        "micro_batches": model.optimizer.accumulate,
        "samples_per_second": rate,
        "perfect_linear": linear,
        "speed_up": rate / first["samples_per_second"],
        "efficiency": rate / linear,
        "step_ms": 1e3 * timing.median,
        "mfu": timing.utilization(devices),
        **measure.machine(),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV, with a line of names."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def figure(rows: Sequence[Mapping[str, Any]]) -> figures.Plot:
    """Samples/s by devices beside perfectly linear scaling, with the efficiency at each point."""
    devices = [row["devices"] for row in rows]
    labels = [f"{100 * row['efficiency']:.0f} %" for row in rows]
    lines = [
        Line("perfect linear", devices, [row["perfect_linear"] for row in rows]),
        Line("measured", devices, [row["samples_per_second"] for row in rows], True, labels),
    ]
    return figures.Plot(lines, f"devices ({rows[0]['device']})", "samples/s")


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    cli.run(main)
