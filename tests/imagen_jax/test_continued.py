"""The training command with --continue_from: other settings, and an added LoRA."""

import shutil

import numpy as np
import pytest

from diffusion_jax import runs
from diffusion_jax.logs import run_log
from tests import processes
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import TINY

pytestmark = pytest.mark.slow


def continue_run(trained, workdir, *arguments, devices=1):
    """Run the command that continues `trained` in `workdir` from its last step, 12."""
    flags = f"--workdir={workdir}", f"--continue_from={trained}"
    return commands.run("train", *TINY, *flags, *arguments, devices=devices)


@pytest.mark.gate
def test_continuing_prints_the_changes_and_repeats_the_steps_after_a_kill(trained, tmp_path):
    workdir = tmp_path / "run"
    changes = "--config.steps=14", "--config.batch_size=16", "--config.optimizer.lr=5e-4"
    first = continue_run(trained, workdir, *changes, devices=2)
    assert first.code == 0, first.err
    lines = dict(line.split(maxsplit=1) for line in first.out.splitlines())
    assert lines["continues"] == f"{trained}@12"
    for change in ("batch_size 8 -> 16", "optimizer.lr 0.002 -> 0.0005", "steps 12 -> 14"):
        assert change in lines["changes"].split("; ")
    assert "the position in the data (sample 96)" in lines["keeps"]
    losses = lambda: [
        (line["step"], line["loss"]) for line in run_log.read_metrics(workdir / run_log.METRICS) if "loss" in line
    ]
    before = losses()
    assert [step for step, _ in before] == list(range(1, 15))
    # As if the first start had been killed before its first checkpoint was complete.
    shutil.rmtree(workdir / runs.CHECKPOINTS)
    commands.succeed("train", *TINY, *changes, f"--workdir={workdir}", devices=2, before=commands.skip_rehearsal)
    assert losses() == before
    (lineage,) = [run_log.read_lineage(workdir)]
    assert lineage and (lineage["run"], lineage["step"]) == (str(trained), 12)


def test_continuing_from_a_lora_file_is_an_error_that_names_the_command_to_convert_it(tmp_path):
    file = tmp_path / "lora.safetensors"
    file.touch()
    ended = continue_run(file, tmp_path / "run")
    assert ended.code == 2 and f"--continue_from={file} is a file" in ended.err
    assert "weights convert --lora=FILE --to=RUN" in ended.err
    assert len([line for line in ended.err.splitlines() if line.startswith("error")]) == 1


def test_two_processes_continue_a_run_as_one_process_does(trained, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    changes = "--config.steps=14", "--config.batch_size=16"
    ended = continue_run(trained, one, *changes, devices=2)
    assert ended.code == 0, ended.err
    group = processes.Group(
        tmp_path / "output", 2, "train", *TINY, f"--workdir={two}", f"--continue_from={trained}", *changes
    )
    assert group.end() == [0, 0], group.printed()
    assert run_log.read_lineage(two) == run_log.read_lineage(one)
    rows = [run_log.read_metrics(workdir / run_log.METRICS) for workdir in (one, two)]
    losses = [[row["loss"] for row in some if "loss" in row] for some in rows]
    assert len(losses[0]) == 14 and losses[1][:12] == losses[0][:12]
    # Two processes add up the gradients in another order.
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
