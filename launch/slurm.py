"""Run a job under Slurm, with one sbatch script per run.

    python -m launch.slurm --job=launch/jobs/base64_500m.py --job.accelerator=h100:64 \\
        --job.workdir=/shared/runs/base64 --job.slurm.setup="source .venv/bin/activate" --dry_run

This command prints the scripts; without --dry_run it submits them. The workdir is a folder that all
nodes can access, on a shared disk or in a bucket (gs://BUCKET/... or s3://BUCKET/...). Each node
runs one process, which uses all GPUs of the node.

A run that is preempted or nears its time limit saves a checkpoint and is requeued. A run that
crashes or hangs, or finds its workdir in use, is requeued up to job.restarts times. The file
WORKDIR/crashes-JOBID counts these restarts; if the workdir is in a bucket, the file is
NAME-crashes-JOBID in the folder where sbatch was called. A run that rejected its config, flags or
data (exit code 2) is not requeued.

If job.image is set, commands run in this container image (with Pyxis). The workdir and all folders
in the config, the flags and job.mounts are mounted. Otherwise commands run in the environment that
job.slurm.setup activates. job.env lists environment variables with values (NAME=VALUE). job.secrets
lists names of variables that must be set in the shell that submits the job. job.slurm.options lists
more options of sbatch, such as "--reservation=NAME".
"""

import shlex
from typing import NamedTuple

from diffusion_jax.config import ranges, settings
from launch import job as jobs
from launch import templates
from launch.accelerators import Target
from launch.job import Job, Launcher, Run


class Slurm(NamedTuple):
    """Settings for Slurm: the group `slurm` of a job file."""

    partition: str
    account: str
    time: str
    """Time limit in sbatch's form, such as 24:00:00."""
    grace: ranges.Count
    """A run saves a checkpoint and is requeued this many seconds before its time limit."""
    setup: str
    """Shell command that activates the Python environment."""
    options: tuple[str, ...] = ()
    """More options of sbatch, such as "--reservation=NAME"."""


def launcher(job: Job, target: Target, groups: jobs.Groups) -> Launcher:
    """Return the launcher that renders runs as sbatch scripts and submits them with sbatch."""
    slurm = settings.read(Slurm, groups["slurm"], "slurm")
    check(job, slurm, target)

    def submit(scripts: list[str]) -> None:
        for script in scripts:
            jobs.pipe(["sbatch"], script, "run it on a login node")

    return Launcher(lambda run: render(job, slurm, target, run), submit)


def check(job: Job, slurm: Slurm, target: Target) -> None:
    """Raise ValueError if Slurm cannot start the job.

    The job needs valid sbatch options, GPUs, and a workdir that is an absolute path or a URL.
    """
    for option in slurm.options:
        if not option.startswith("-") or "\n" in option:
            raise ValueError(f"job.slurm.options holds {option!r}: write --NAME=VALUE")
    if target.is_tpu:
        raise ValueError(
            f"job.accelerator is {job.accelerator}: choose GPUs for Slurm, such as h100:64"
        )
    is_url = "://" in job.workdir and job.command.rpartition(".")[2] in jobs.IN_BUCKETS
    if not job.workdir.startswith("/") and not is_url:
        raise ValueError(
            f"job.workdir is {job.workdir!r}: give the absolute path of a folder that all nodes "
            "see, such as /shared/runs/NAME"
        )


def render(job: Job, slurm: Slurm, target: Target, run: Run) -> str:
    """Return the sbatch script of a run."""
    image = []
    if job.image:
        workdir = [] if "://" in run.workdir else [run.workdir]
        folders = dict.fromkeys([*workdir, *jobs.folders(job, run)])
        mounts = ",".join(f"{folder}:{folder}" for folder in folders)
        image = [
            "--container-image",
            job.image,
            *(["--container-mounts", mounts] if mounts else []),
        ]
    # With --kill-on-bad-exit=1, the exit codes of killed processes would hide code 2 (bad input),
    # because srun returns the largest code. Instead, --wait=60 ends the remaining processes 60 s
    # after the first one exits.
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=60", *image, "python", "-m"]
    line = shlex.join([*srun, *jobs.command(run, run.workdir)])
    variables = jobs.environment(job, target, run.workdir)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    prefix = f"{run.name}-crashes-" if "://" in run.workdir else f"{run.workdir}/crashes-"
    crashes = shlex.quote(prefix) + '"$SLURM_JOB_ID"'
    values = {"job": job, "slurm": slurm, "target": target, "run": run}
    return templates.fill("slurm.sh", srun=line, exports=exports, crashes=crashes, **values)


if __name__ == "__main__":
    jobs.main(launcher)
