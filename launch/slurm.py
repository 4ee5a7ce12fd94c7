"""Run a job under Slurm, with one sbatch script per run.

    python -m launch.slurm --job=launch/jobs/base64_500m.py --job.accelerator=h100:64 \\
        --job.workdir=/shared/runs/base64 --job.slurm.setup="source .venv/bin/activate" --dry_run

prints the scripts; without --dry_run they are submitted. The workdir is a folder that all nodes
see, or a folder in a bucket (gs://BUCKET/... or s3://BUCKET/...) that the nodes can access. Each
node runs one process with all its GPUs.

Before the time limit, or when it is preempted, a run saves and is requeued. A run that crashes or
hangs, or finds its workdir in use, is requeued up to job.restarts times. The count is kept in
WORKDIR/crashes-JOBID, or, for a bucket, in NAME-crashes-JOBID in the folder of the submission. A
run that rejected its config, flags or data (exit code 2) is not requeued.

With job.image, commands run in that container (Pyxis), where the workdir and all folders in config,
flags and job.mounts are mounted; otherwise in the environment of job.slurm.setup. job.env are
environment variables with values, and job.secrets are names of variables of the submitting shell.
job.slurm.options are further options of sbatch, such as "--reservation=NAME".
"""

import shlex
from typing import NamedTuple

from diffusion_jax.config import ranges, settings
from launch import job as jobs
from launch import templates
from launch.accelerators import Target
from launch.job import Job, Launcher, Run


class Slurm(NamedTuple):
    """Fields of a job's group `slurm`."""

    partition: str
    account: str
    time: str
    """Time limit in sbatch's form, such as 24:00:00."""
    grace: ranges.Count
    """Seconds before the time limit at which a run saves."""
    setup: str
    """Shell command that activates the Python environment."""
    options: tuple[str, ...] = ()
    """Further options of sbatch."""


def launcher(job: Job, target: Target, groups: jobs.Groups) -> Launcher:
    """Return the launcher that runs jobs as sbatch scripts."""
    slurm = settings.read(Slurm, groups["slurm"], "slurm")
    check(job, slurm, target)

    def submit(scripts: list[str]) -> None:
        for script in scripts:
            jobs.pipe(["sbatch"], script, "run it on a login node")

    return Launcher(lambda run: render(job, slurm, target, run), submit)


def check(job: Job, slurm: Slurm, target: Target) -> None:
    """Raise ValueError for jobs that Slurm cannot start."""
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
    # Not --kill-on-bad-exit=1: srun returns the largest exit code, so the code of a killed process
    # would hide code 2 (bad input). After 60 s, --wait ends processes that are left over.
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
