"""Runs a job under Slurm, as one sbatch script for each run.

    python -m launch.slurm --job=launch/jobs/base64_500m.py --job.accelerator=h100:64 \\
        --job.workdir=/shared/runs/base64 --job.slurm.setup="source .venv/bin/activate" --dry_run

prints the scripts; without --dry_run they go to sbatch. The workdir is a folder that all nodes see.
A node runs one process with all its GPUs. Before the time limit, and when it is preempted, a run
saves; it is put into the queue again then, and goes on. With job.image the commands run in that
container (Pyxis), else in what job.slurm.setup prepares. job.secrets are environment variables of
the shell that submits.
"""

import shlex
import subprocess
import sys
from typing import NamedTuple

from absl import app, flags

from diffusion_jax import cli, settings
from launch import job as jobs
from launch.accelerators import Target
from launch.job import Job, Run


class Slurm(NamedTuple):
    """A job's group `slurm`."""

    partition: str
    account: str
    time: str
    """As sbatch takes it, such as 24:00:00."""
    grace: int
    """Seconds to save in, before the time is up."""
    setup: str
    """A line of shell that makes `python` the right one."""


def main(argv: list[str]) -> None:
    """Checks, renders, prints or submits."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
    with cli.bad_input():
        job, target, groups = jobs.read()
        slurm = settings.read(Slurm, groups["slurm"], "slurm")
        check(job, target)
        runs = jobs.runs(job)
        scripts = [render(job, slurm, target, run) for run in runs]
        jobs.check_commands([jobs.with_workdir(run, run.workdir) for run in runs])
        for run in runs:
            jobs.check_mesh(run, target)
    print(jobs.table(runs), file=sys.stderr)
    if jobs.DRY_RUN.value:
        print("\n".join(scripts), end="")
        return
    with cli.bad_input():
        for script in scripts:
            _submit(script)


def check(job: Job, target: Target) -> None:
    """ValueError for what the cluster could not start."""
    if target.is_tpu:
        raise ValueError(f"job.accelerator is {job.accelerator}: Slurm has GPUs, such as h100:64")
    if not job.workdir.startswith("/"):
        raise ValueError(
            f"job.workdir is {job.workdir!r}: give a folder that all nodes see, from / on, such as "
            "/shared/runs/NAME"
        )


def render(job: Job, slurm: Slurm, target: Target, run: Run) -> str:
    """The sbatch script of a run."""
    options = {
        "job-name": run.name,
        "nodes": target.hosts,
        "ntasks-per-node": 1,
        "gpus-per-node": target.devices_per_host,
        "time": slurm.time,
        "signal": f"B:USR1@{slurm.grace}",
        "partition": slurm.partition,
        "account": slurm.account,
        "output": f"{run.name}-%j.log",
        "open-mode": "append",
    }
    given = [f"#SBATCH --{name}={value}" for name, value in options.items() if value != ""]
    image = ["--container-image", job.image, "--container-mounts", _mount(run)] if job.image else []
    command = ["srun", "--kill-on-bad-exit=1", *image, "python", "-m"]
    line = shlex.join([*command, *jobs.with_workdir(run, run.workdir)])
    needed = [f': "${{{name}:?is not set where sbatch was called}}"' for name in job.secrets]
    parts = [
        "#!/bin/bash",
        *given,
        "#SBATCH --requeue",
        "",
        *needed,
        *([slurm.setup] if slurm.setup else []),
        f"export JAX_LOCAL_DEVICE_IDS={','.join(map(str, range(target.devices_per_host)))}",
        "",
        "# Near the time limit the run is told to save, and queued again once it has (code 143).",
        "out_of_time=",
        "trap 'out_of_time=1; scancel --signal=TERM \"$SLURM_JOB_ID.0\"' USR1",
        f"{line} &",
        "run=$!",
        "wait $run; code=$?",
        '[ -n "$out_of_time" ] && { wait $run; code=$?; }  # The trap ended the first wait alone.',
        '[ -n "$out_of_time" ] && [ $code -eq 143 ] && scontrol requeue "$SLURM_JOB_ID"',
        "exit $code",
        "",
    ]
    return "\n".join(parts)


def _mount(run: Run) -> str:
    return f"{run.workdir}:{run.workdir}"


def _submit(script: str) -> None:
    try:
        subprocess.run(["sbatch"], input=script, text=True, check=True)
    except FileNotFoundError as error:
        raise ValueError("there is no sbatch here: run it on a login node") from error
    except subprocess.CalledProcessError as error:
        raise ValueError("sbatch refused the script; see above") from error


if __name__ == "__main__":
    flags.mark_flag_as_required("job")
    cli.run(main)
