"""Weak scaling: the measured numbers of nodes, the table and the figure."""

import csv

import jax
import pytest

from benchmarks import scaling, step
from configs import quickstart
from diffusion_jax.evaluate import figures
from launch.planner import tasks
from tests.imagen_jax import commands

TINY = ("--config=configs/quickstart.py", "--config.unet.embed_dim=32", "--config.unet.cond_dim=32")


@pytest.mark.parametrize(
    ("names", "devices", "per_node", "nodes"),
    [((), 8, 1, [1, 2, 4, 8]), ((), 48, 8, [1, 2, 4, 6]), (("4", "1"), 64, 8, [1, 4])],
)
def test_default_node_counts_are_powers_of_two_and_all_nodes(names, devices, per_node, nodes):
    assert scaling.nodes_of(names, devices, per_node) == nodes


@pytest.mark.parametrize(
    ("names", "per_node", "message"),
    [
        (("1", "9"), 1, "--nodes=1,9: give numbers from 1 to 8, such as 1,2,4"),
        (("two",), 1, "--nodes=two: give numbers"),
        ((), 3, "--devices_per_node=3 does not divide 8 devices"),
    ],
)
def test_invalid_node_counts_are_one_line_errors(names, per_node, message):
    with pytest.raises(ValueError, match=message):
        scaling.nodes_of(names, 8, per_node)


@pytest.fixture(scope="module")
def model():
    config = quickstart.get_config().to_dict()
    config["optimizer"]["micro_batch"] = 4
    return tasks.read(config)


def test_the_batch_per_device_is_equal_for_every_node_count(model):
    cases = scaling.cases(model, [1, 2, 4], per_node=2)
    shares = [(n, mesh.size, m.run.batch_size, m.optimizer.micro_batch) for n, mesh, m in cases]
    assert shares == [(1, 2, 16, 4), (2, 4, 32, 4), (4, 8, 64, 4)]
    assert [*cases[1][1].devices.flat] == jax.devices()[:4]


def test_a_batch_or_mesh_that_does_not_fit_is_an_error_before_compiling(model):
    with pytest.raises(ValueError, match=r"batch_size 12 cannot be split evenly over 8 devices:"):
        scaling.cases(model._replace(run=model.run._replace(batch_size=12)), [1], 1)
    fixed = model._replace(mesh=model.mesh._replace(fsdp=2))
    with pytest.raises(ValueError, match=r"uses 2 of 4 devices: set one size to -1"):
        scaling.cases(fixed, [2, 4], 2)


def test_the_table_gives_speed_up_and_efficiency_relative_to_the_first_row(model):
    timing = lambda ms: step.Timing([ms / 1e3] * 3, 0.0, 0.0, 0.0, 1e9, 0.5)
    rows = []
    for nodes, batch, ms in [(2, 16, 10), (4, 32, 12.5)]:
        case = model._replace(run=model.run._replace(batch_size=batch))
        rows.append(scaling.row(nodes, case, timing(ms), 8 * nodes, rows))
    text = scaling.table(rows)
    first, second = csv.DictReader(text.splitlines())
    assert [*first][:4] == ["nodes", "devices", "batch", "micro_batches"]
    columns = ("samples_per_second", "perfect_linear", "speed_up", "efficiency", "step_ms")
    assert [float(first[name]) for name in columns] == pytest.approx([1600, 1600, 1, 1, 10])
    # Twice the samples in 12.5 ms: 2560/s instead of 3200/s.
    assert [float(second[name]) for name in columns] == pytest.approx([2560, 3200, 1.6, 0.8, 12.5])
    linear, measured = scaling.figure(rows).lines
    assert (linear.y, measured.y) == ([1600, 3200], [1600, 2560])
    assert measured.labels == ["100 %", "80 %"]
    assert figures.save(scaling.figure(rows), "png").startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_scaling_command_measures_1_2_4_and_8_devices(tmp_path):
    fields = commands.config_flags("batch_size=16 optimizer.micro_batch=1")
    measured = ("--devices_per_node=1", "--steps=2", "--warmup=1", f"--workdir={tmp_path}")
    ended = commands.run("benchmarks.scaling", *TINY, *fields, *measured)
    assert ended.code == 0, ended.err
    rows = list(csv.DictReader((tmp_path / "scaling.csv").read_text().splitlines()))
    assert [int(row["devices"]) for row in rows] == [1, 2, 4, 8]
    assert [int(row["batch"]) for row in rows] == [2, 4, 8, 16]
    assert {row["micro_batches"] for row in rows} == {"2"}
    assert len((tmp_path / "scaling.txt").read_text().splitlines()) == 4
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["cached", "images"])
def test_train_step_measures_stable_diffusion_without_weights(inputs, tmp_path):
    fields = ("--config=configs/sd_quickstart.py", *commands.config_flags("unet.width=32 unet.num_heads=1"))
    measured = ("--batch=2", f"--inputs={inputs}", "--steps=1", "--warmup=0", f"--workdir={tmp_path}")
    ended = commands.run("benchmarks.train_step", *fields, *measured, devices=1)
    assert ended.code == 0, ended.err
    line = (tmp_path / "train_step.txt").read_text()
    assert ended.out == line and f'"inputs": "{inputs}"' in line
