"""Runs a job under Slurm, as one sbatch script for each run.

    python -m launch.slurm --job=launch/jobs/base64_500m.py --job.accelerator=h100:64 \\
        --job.workdir=/shared/runs/base64 --job.slurm.setup="source .venv/bin/activate" --dry_run

prints the scripts; without --dry_run they go to sbatch. The workdir is a folder that all nodes see,
or in a bucket, gs://BUCKET/... or s3://BUCKET/..., whose credentials they have.
A node runs one process with all its GPUs. Before the time limit, and when it is preempted, a run
saves; it is put into the queue again then, and goes on. One that crashes or hangs, or whose workdir
another run still holds, is put there job.restarts times (of which WORKDIR/crashes-JOBID keeps the
count, or for a bucket NAME-crashes-JOBID where sbatch was called), one that refused its config,
flags or data (exit code 2) never. With job.image the commands run in that container (Pyxis), which
sees the workdir and every folder that config, flags or job.mounts name, else in what
job.slurm.setup prepares. job.env are environment variables, job.secrets those of the shell that
submits. job.slurm.options are further options of sbatch, such as "--reservation=NAME".
"""

import shlex
from typing import NamedTuple

from diffusion_jax.config import ranges, settings
from launch import job as jobs
from launch import templates
from launch.accelerators import Target
from launch.job import Job, Launcher, Run


class Slurm(NamedTuple):
    """A job's group `slurm`."""

    partition: str
    account: str
    time: str
    """The time limit in sbatch's form, such as 24:00:00."""
    grace: ranges.Count
    """Seconds to save in, before the time is up."""
    setup: str
    """A line of shell that makes `python` the right one."""
    options: tuple[str, ...] = ()
    """Further options of sbatch."""


def launcher(job: Job, target: Target, groups: jobs.Groups) -> Launcher:
    """An sbatch script for each run."""
    slurm = settings.read(Slurm, groups["slurm"], "slurm")
    check(job, slurm, target)

    def submit(scripts: list[str]) -> None:
        for script in scripts:
            jobs.pipe(["sbatch"], script, "run it on a login node")

    return Launcher(lambda run: render(job, slurm, target, run), submit)


def check(job: Job, slurm: Slurm, target: Target) -> None:
    """ValueError for what the cluster could not start."""
    for option in slurm.options:
        if not option.startswith("-") or "\n" in option:
            raise ValueError(f"job.slurm.options holds {option!r}: write --NAME=VALUE")
    if target.is_tpu:
        raise ValueError(f"job.accelerator is {job.accelerator}: Slurm has GPUs, such as h100:64")
    is_url = "://" in job.workdir and job.command.rpartition(".")[2] in jobs.IN_BUCKETS
    if not job.workdir.startswith("/") and not is_url:
        raise ValueError(
            f"job.workdir is {job.workdir!r}: give a folder that all nodes see, from / on, such as "
            "/shared/runs/NAME"
        )


def render(job: Job, slurm: Slurm, target: Target, run: Run) -> str:
    """The sbatch script of a run."""
    image = []
    if job.image:
        own = [] if "://" in run.workdir else [run.workdir]
        seen = dict.fromkeys([*own, *jobs.folders(job, run)])
        mounts = ",".join(f"{folder}:{folder}" for folder in seen)
        image = [
            "--container-image",
            job.image,
            *(["--container-mounts", mounts] if mounts else []),
        ]
    # Were the others killed at the first failure, their code would hide that of bad input.
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=60", *image, "python", "-m"]
    line = shlex.join([*srun, *jobs.command(run, run.workdir)])
    variables = jobs.environment(job, target, run.workdir)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    counted = f"{run.name}-crashes-" if "://" in run.workdir else f"{run.workdir}/crashes-"
    crashes = shlex.quote(counted) + '"$SLURM_JOB_ID"'
    values = {"job": job, "slurm": slurm, "target": target, "run": run}
    return templates.fill("slurm.sh", srun=line, exports=exports, crashes=crashes, **values)


if __name__ == "__main__":
    jobs.main(launcher)
