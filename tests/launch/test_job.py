"""Flags that all launchers share."""

import pytest

from tests.imagen_jax import commands


@pytest.mark.parametrize("launcher", ["gke", "slurm", "xm"])
def test_the_help_of_launchers_describes_job_and_dry_run(launcher):
    text = commands.run(f"launch.{launcher}", "--help", devices=1).out
    assert "--job: Job file, such as launch/jobs/scaling.py." in text
    assert "--[no]dry_run: Print what would be submitted, and exit." in text
