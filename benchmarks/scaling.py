"""Measure weak scaling of a config's train step over 1, 2, 4, ... nodes.

    python -m benchmarks.scaling --config=configs/base64_500m.py --workdir=runs/scaling

The config's batch_size is the batch size for all nodes. Fewer nodes get a proportionally smaller
batch, so each device always has the same number of samples. Weights and data are random, as in
benchmarks.train_step. One axis of the mesh must be -1. If a step needs several passes, set
optimizer.micro_batch. By default, the devices of each process count as one node.
--devices_per_node sets another number of devices, for example to try the command with
JAX_NUM_CPU_DEVICES=8 on one computer.

The command writes the table scaling.csv and the plot scaling.png to --workdir, and updates the
table after each number of nodes. The first row is the baseline. Each row has the measured
samples/s, the samples/s of perfectly linear scaling, the speed-up over the baseline, and the
efficiency (measured samples/s divided by perfectly linear samples/s).
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
from diffusion_jax.devices import sharding
from diffusion_jax.evaluate import figures
from diffusion_jax.evaluate.figures import Line
from launch.planner.tasks import PlannedTask

flags.adopt_module_key_flags(measure)
flags.adopt_module_key_flags(step)
_CONFIG = cli.define_config()
_NODES = flags.DEFINE_list("nodes", [], "Numbers of nodes to measure; default: powers of two, and all.")
_PER_NODE = flags.DEFINE_integer(
    "devices_per_node", None, "Devices per node; default: those of a process.", lower_bound=1
)


def main() -> None:
    """Measure the train step on each number of nodes, and write the table and the plot."""
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
        if jax.process_count() > 1:  # Processes without devices in this mesh wait here.
            multihost_utils.sync_global_devices(f"{nodes} nodes")
        if jax.process_index() == 0:
            measure.write("scaling.csv", table(rows))
    if jax.process_index() == 0:
        measure.write("scaling.png", figures.save(figure(rows), "png"))


def nodes_of(names: Sequence[str], devices: int, per_node: int) -> list[int]:
    """Return the node counts to measure, in ascending order.

    These are the counts in `names` or, if it is empty, the powers of two up to the total, and the
    total itself. `names` is the value of --nodes, `devices` the number of all devices, and
    `per_node` the number of devices per node. Raises ValueError if --nodes is
    invalid, or --devices_per_node does not divide the number of devices.
    """
    max_nodes = devices // per_node
    if devices % per_node:
        raise ValueError(f"--devices_per_node={per_node} does not divide {devices} devices: choose a divisor")
    if not all(name.isdigit() and 1 <= int(name) <= max_nodes for name in names):
        raise ValueError(f"--nodes={','.join(names)}: give numbers from 1 to {max_nodes}, such as 1,2,4")
    powers = [2**n for n in range(max_nodes.bit_length())]
    return sorted({int(name) for name in names} or {*powers, max_nodes})


def cases(model: PlannedTask, numbers: Sequence[int], per_node: int) -> list[tuple[int, Mesh, PlannedTask]]:
    """Return (number of nodes, mesh, model) for each measurement.

    The model's batch size is proportional to the number of nodes. Raises ValueError if the batch
    cannot be split evenly over all devices, or a mesh does not use all devices of its nodes.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    rows = []
    for nodes in numbers:
        batch, remainder = divmod(model.run.batch_size * nodes * per_node, len(devices))
        if remainder:
            raise ValueError(
                f"batch_size {model.run.batch_size} cannot be split evenly over {len(devices)} "
                f"devices: choose a multiple of {len(devices)}"
            )
        mesh = sharding.make_mesh(*model.mesh, devices=devices[: nodes * per_node])
        if mesh.size != nodes * per_node:
            raise ValueError(
                f"mesh {dict(mesh.shape)} uses {mesh.size} of {nodes * per_node} devices: set one "
                "size to -1, such as --config.mesh.fsdp=-1"
            )
        run = model.run._replace(batch_size=batch)
        sharding.check_batch(batch, model.optimizer.micro_batch, mesh)
        rows.append((nodes, mesh, model._replace(run=run)))
    return rows


def row(nodes: int, model: PlannedTask, timing: step.Timing, devices: int, before: Sequence[Mapping]) -> dict[str, Any]:
    """Return the row of the table for one number of nodes.

    `before` holds the earlier rows. The baseline of the speed-up and the efficiency is the first
    row of the table, which is this row if `before` is empty.
    """
    batch = model.run.batch_size
    rate = batch / timing.median
    first = before[0] if before else {"nodes": nodes, "samples_per_second": rate}
    linear = first["samples_per_second"] * nodes / first["nodes"]
    return {
        "nodes": nodes,
        "devices": devices,
        "batch": batch,
        "micro_batches": timing.passes,
        "samples_per_second": rate,
        "perfect_linear": linear,
        "speed_up": rate / first["samples_per_second"],
        "efficiency": rate / linear,
        "step_ms": 1e3 * timing.median,
        "mfu": timing.utilization(devices),
        **measure.machine(),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows as CSV with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def figure(rows: Sequence[Mapping[str, Any]]) -> figures.Plot:
    """Plot measured and perfectly linear samples/s over devices; labels give the efficiency."""
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
