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
data (exit code 2) is not requeued. A training run whose workdir is a folder is not requeued either
if it started three times in a row without saving a new checkpoint.

If job.image is set, commands run in this container image (with Pyxis). The workdir and all folders
in the config, the flags and job.mounts are mounted. If job.image is empty, commands run in the
environment that job.slurm.setup activates. job.env lists environment variables with values
(NAME=VALUE). job.secrets lists names of variables that must be set in the shell that submits the
job. job.slurm.options lists additional sbatch options, such as "--reservation=NAME".
"""

import math
import re
import shlex
from typing import NamedTuple

from diffusion_jax.config import ranges, settings
from launch import job as jobs
from launch import templates
from launch.accelerators import Target
from launch.job import Job, JobRun, Launcher

_TIMES = {
    r"(\d+)": (60,),
    r"(\d+):(\d+)": (60, 1),
    r"(\d+):(\d+):(\d+)": (3600, 60, 1),
    r"(\d+)-(\d+)": (86400, 3600),
    r"(\d+)-(\d+):(\d+)": (86400, 3600, 60),
    r"(\d+)-(\d+):(\d+):(\d+)": (86400, 3600, 60, 1),
}
"""Forms of sbatch's time limit. Keys: regular expressions. Values: the seconds in the unit of each
number that the expression matches."""
_OPTIONS = {
    r"-a|--arr": "all tasks would share one workdir; use job.sweep, which gives each run its own",
    r"-t|--time(?!-)": "set job.slurm.time instead",
    r"--sig": "set job.slurm.grace instead",
}
"""Options that job.slurm.options must not hold. Keys: regular expressions. Values: advice for the
error message."""


class Slurm(NamedTuple):
    """Settings for Slurm: the group `slurm` of a job file."""

    partition: str
    """Partition to submit to; "" for the cluster's default."""
    account: str
    """Account that is charged for the job; "" for the user's default."""
    time: str
    """Time limit in sbatch's form, such as 24:00:00."""
    grace: ranges.Count
    """Number of seconds before the time limit at which a run saves a checkpoint and is requeued."""
    setup: str
    """Shell commands to run before the job's command, such as "source .venv/bin/activate"."""
    options: tuple[str, ...] = ()
    """Additional sbatch options, such as "--reservation=NAME"."""


def launcher(job: Job, target: Target, groups: jobs.Groups) -> Launcher:
    """Return the launcher that renders runs as sbatch scripts and submits them with sbatch."""
    slurm = settings.read(Slurm, groups["slurm"], "slurm")
    check(job, slurm, target)

    def submit(scripts: list[str]) -> None:
        for script in scripts:
            advice = "run this command on a login node, or print the scripts with --dry_run"
            jobs.pipe(["sbatch"], script, advice)

    note = reading(slurm.time)
    return Launcher(lambda run: render(job, slurm, target, run), submit, note=note)


def check(job: Job, slurm: Slurm, target: Target) -> None:
    """Raise ValueError if Slurm cannot start the job.

    The job needs valid sbatch options, a time limit longer than the grace period, GPUs, and a
    workdir that is an absolute path or, if the command can write to buckets, a URL.
    """
    for option in slurm.options:
        if not option.startswith("-"):
            raise ValueError(f"job.slurm.options holds {option!r}: write --NAME=VALUE")
        for pattern, advice in _OPTIONS.items():
            if re.search(rf"(?:^|\s)(?:{pattern})", option):
                raise ValueError(f"job.slurm.options holds {option!r}: {advice}")
    limit = seconds(slurm.time)
    if slurm.grace >= limit:
        raise ValueError(
            f"{reading(slurm.time)}, which is not longer than job.slurm.grace={slurm.grace} s: the "
            "run would be requeued before its first step; write hours as 5:00:00, or choose a "
            "smaller job.slurm.grace"
        )
    if target.is_tpu:
        raise ValueError(f"job.accelerator is {job.accelerator}: choose GPUs for Slurm, such as h100:64")
    is_url = "://" in job.workdir and job.command.rpartition(".")[2] in jobs.IN_BUCKETS
    if not job.workdir.startswith("/") and not is_url:
        raise ValueError(
            f"job.workdir is {job.workdir!r}: give the absolute path of a folder that all nodes "
            "can access, such as /shared/runs/NAME"
        )


def seconds(time: str) -> float:
    """Convert a time limit in one of sbatch's forms to seconds, or to infinity for no limit.

    Raises ValueError for other forms.
    """
    if time.lower() in ("", "infinite", "unlimited"):
        return math.inf
    for form, sizes in _TIMES.items():
        if match := re.fullmatch(form, time, re.ASCII):
            parts = zip(match.groups(), sizes, strict=True)
            return sum(int(number) * size for number, size in parts) or math.inf
    raise ValueError(
        f"job.slurm.time is {time!r}: write HOURS:MINUTES:SECONDS, such as 24:00:00, or DAYS-HOURS, such as 2-12"
    )


def reading(time: str) -> str:
    """Describe how sbatch reads a time limit, such as "job.slurm.time=90 means 1 h 30 min 0 s"."""
    limit = seconds(time)
    if limit == math.inf:
        return "job.slurm.time sets no limit; the partition may have one"
    minutes, rest = divmod(int(limit), 60)
    return f"job.slurm.time={time} means {minutes // 60} h {minutes % 60} min {rest} s"


def render(job: Job, slurm: Slurm, target: Target, run: JobRun) -> str:
    """Return the sbatch script of a run.

    Raises ValueError if a folder to mount has ":" or "," in its name, at which Pyxis splits names.
    """
    image = []
    if job.image:
        workdir = [] if "://" in run.workdir else [run.workdir]
        folders = dict.fromkeys([*workdir, *jobs.folders(job, run)])
        if unclear := [folder for folder in folders if re.search("[:,]", folder)]:
            raise ValueError(
                f"{unclear[0]} cannot be mounted: its name contains ':' or ',', at which Pyxis "
                "splits names; rename the folder"
            )
        mounts = ",".join(f"{folder}:{folder}" for folder in folders)
        image = ["--container-image", job.image, *(["--container-mounts", mounts] if mounts else [])]
    # With --kill-on-bad-exit=1, the exit codes of killed processes would hide code 2 (bad input),
    # because srun returns the largest code. Instead, --wait=60 ends the remaining processes 60 s
    # after the first one exits.
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=60", *image, "python", "-m"]
    line = shlex.join([*srun, *jobs.command(run, run.workdir)])
    variables = jobs.environment(job, target, run.workdir)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    prefix = f"{run.name}-crashes-" if "://" in run.workdir else f"{run.workdir}/crashes-"
    crashes = shlex.quote(prefix) + '"$SLURM_JOB_ID"'
    watch = "" if "://" in run.workdir or not jobs.trains(job) else shlex.quote(run.workdir)
    values = {"job": job, "slurm": slurm, "target": target, "run": run}
    return templates.fill("slurm.sh", srun=line, exports=exports, crashes=crashes, workdir=watch, **values)


if __name__ == "__main__":
    jobs.main(launcher)
