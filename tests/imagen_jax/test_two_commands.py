"""Commands in two processes train and draw like in one process."""

import json
import shutil

import numpy as np
import pytest

from diffusion_jax import exits, runs
from diffusion_jax.logs import run_log
from diffusion_jax.weights import restore
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import TINY
from tests.processes import Group

PICTURES = ("--prompt=a red seven on gray paper", "--num_images=8", "--guidance=3")


@pytest.mark.gate
@pytest.mark.slow
def test_two_processes_resume_a_run_of_one_process_with_the_same_losses(interrupted, uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(interrupted.workdir, workdir)
    first, last = restore.steps(workdir / runs.CHECKPOINTS)[-2:]
    shutil.rmtree(workdir / runs.CHECKPOINTS / str(last))
    run = (f"--workdir={workdir}", f"--config.steps={interrupted.steps}")
    group = Group(tmp_path, 2, "train", *TINY, *run, before=commands.skip_rehearsal)
    assert group.end() == [0, 0], group.printed()
    manifest = json.loads((workdir / run_log.MANIFEST).read_text())["runs"][-1]
    assert (manifest["first_step"], manifest["devices"]["processes"]) == (first, 2)
    assert restore.steps(workdir / runs.CHECKPOINTS) == [first, last]
    paths = uninterrupted, workdir
    expected, actual = (run_log.read_metrics(path / run_log.METRICS)[first:] for path in paths)
    assert [line["step"] for line in actual] == list(range(first + 1, last + 1))
    for name in ("step", "loss", "grad_norm"):
        columns = [[line[name] for line in lines] for lines in (actual, expected)]
        np.testing.assert_allclose(*columns, rtol=1e-4)  # Batch sums have another order.


@pytest.mark.gate
@pytest.mark.slow
def test_two_processes_draw_the_same_pictures_as_one(trained, tmp_path):
    drawn = []
    for count in (1, 2):
        out = tmp_path / f"pictures_{count}"
        out.mkdir()
        group = Group(tmp_path, count, "sample", f"--out={out}/PROCESS", *PICTURES, f"--workdir={trained}")
        assert group.end() == [0] * count, group.printed()
        assert sum(path.is_file() for path in out.rglob("*")) == 10  # Only process 0 writes files.
        drawn.append(commands.drawn(out / "0"))
    (expected_lines, expected), (lines, images) = drawn
    assert len(images) == 8 and images.std() > 5
    np.testing.assert_allclose(images, expected, atol=1)  # Rounding to uint8.
    assert lines == expected_lines


@pytest.mark.gate
@pytest.mark.slow
def test_an_invalid_config_ends_both_processes_with_exit_code_2(tmp_path):
    group = Group(tmp_path, 2, "train", *TINY, "--workdir=nowhere", "--config.batch_size=3")
    assert group.end() == [2, 2]
    assert "error: batch_size 3 is not divisible by" in group.printed()


@pytest.mark.slow
def test_a_workdir_in_use_is_an_error_until_its_process_is_killed(tmp_path):
    workdir = tmp_path / "run"
    run = ("train", *TINY, f"--workdir={workdir}", "--config.save_every=1")
    first = Group(tmp_path / "first", 1, *run, "--config.steps=1000000")
    # A save waits for the previous one, so that of step 1 is complete.
    first.wait_for_step(workdir, 3)
    pid = first.processes[0].pid
    for count in (1, 2):
        second = Group(tmp_path / f"second_{count}", count, *run)
        assert second.end() == [exits.BUSY] * count
        assert f"error: {workdir} is being written by process {pid} on" in second.printed()
    assert first.processes[0].is_alive()
    first.processes[0].kill()
    first.end()
    reached = restore.steps(workdir / runs.CHECKPOINTS)[-1]
    third = Group(tmp_path / "third", 1, *run, f"--config.steps={reached + 2}")
    assert third.end() == [0], third.printed()
    assert restore.steps(workdir / runs.CHECKPOINTS)[-1] == reached + 2
    assert not list(workdir.glob("writer-*"))
