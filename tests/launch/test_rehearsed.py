"""Jobs are rehearsed before they are submitted. A fake sbatch records the scripts."""

import os
import re
import subprocess
import sys

import pytest

from tests.launch.launching import SWEEP, flags

SBATCH = '#!/bin/sh\ncat >> "$TAKEN"\n'


def launch(folder, *arguments):
    """Run launch.slurm with a fake sbatch. Return the process and the submitted script."""
    (folder / "bin").mkdir()
    program, taken = folder / "bin" / "sbatch", folder / "taken.sh"
    program.write_text(SBATCH)
    program.chmod(0o755)
    environ = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "TAKEN": str(taken)}
    fields = flags(f"accelerator=h100:8 workdir={folder}/runs")
    whole = [sys.executable, "-m", "launch.slurm", SWEEP, *fields, *arguments]
    ended = subprocess.run(whole, env=environ, capture_output=True, text=True, timeout=600)
    return ended, taken.read_text() if taken.exists() else ""


@pytest.mark.slow
def test_a_run_is_rehearsed_and_then_submitted(tmp_path):
    ended, taken = launch(tmp_path, "--job.sweep=((),)")
    assert ended.returncode == 0, ended.stderr
    assert "parameters     3,323,889 trained, 0 frozen\n" in ended.stderr
    assert f"workdir        {tmp_path}/runs/0: a new run\n" in ended.stderr
    assert "mesh: replica 1, fsdp 8, tensor 1" in ended.stderr  # The mesh for eight GPUs.
    assert " of 80.0 GB per device, estimated: " in ended.stderr and "warning:" not in ended.stderr
    assert taken.count("#!/bin/bash") == 1 and "imagen_jax.train" in taken
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("sampler.name=heun(wrong=1)", "error: sampler.name.* heun .*wrong"),
        ("batch_size=4000000", "error: a training step needs about .* a device has 80.0 GB: "),
    ],
)
def test_a_run_whose_rehearsal_fails_is_not_submitted(tmp_path, change, reason):
    ended, taken = launch(tmp_path, f"--job.sweep=(('{change}',),)")
    assert ended.returncode == 2 and taken == ""
    assert len(re.findall(f"^error: the rehearsal of quickstart-0 fails: {reason}", ended.stderr, re.MULTILINE)) == 1


@pytest.mark.slow
def test_a_run_with_data_on_another_machine_is_submitted_without_rehearsal(tmp_path):
    ended, taken = launch(tmp_path, "--job.sweep=(('data.source=webdataset','data.path=/nowhere/x.tar'),)")
    assert ended.returncode == 0 and "imagen_jax.train" in taken
    assert "quickstart-0 is not rehearsed: this machine cannot access /nowhere" in ended.stderr
