"""Run a job with XManager, on this machine or on Vertex AI.

    pip install "xmanager>=0.8.5"
    python -m launch.xm --job=launch/jobs/quickstart_sweep.py --job.workdir=runs/sweep \\
        --executor=local
    python -m launch.xm --job=launch/jobs/quickstart_sweep.py --job.accelerator=a100:1 \\
        --job.image=IMAGE --job.workdir=gs://BUCKET/runs/sweep --executor=vertex

Each run of a sweep is a work unit of an XManager experiment. On Vertex AI, XManager 0.8.5 supports
only one of the accelerators in launch/accelerators.py: A100 GPUs with 40 GB, at most 8 on one
machine. For TPUs, for other GPUs and for more than one host, use `python -m launch.gke`. Vertex AI
mounts buckets under /gcs. job.env lists the environment variables of each run. Failed runs are not
restarted.
"""

import itertools
import shlex
import sys
from typing import Any

from absl import flags

from launch import gke
from launch import job as jobs
from launch.accelerators import Target
from launch.job import Job, Launcher

_EXECUTOR = flags.DEFINE_enum("executor", "local", ["local", "vertex"], "Run the job on this machine, or on Vertex AI.")


def launcher(job: Job, target: Target, groups: jobs.Groups) -> Launcher:
    """Return the launcher that submits runs as work units of an XManager experiment.

    A dry run prints the command lines of the runs.
    """
    del groups
    check(job, target, _EXECUTOR.value)
    folder = str if _EXECUTOR.value == "local" else lambda workdir: gke.folder(job, workdir)
    return Launcher(
        render=lambda run: shlex.join(["python", "-m", *jobs.command(run, folder(run.workdir))]),
        submit=lambda lines: _submit(job, target, lines),
        folder=folder,
    )


def check(job: Job, target: Target, executor: str) -> None:
    """Raise ValueError if XManager cannot start the job; `executor` is "local" or "vertex"."""
    if job.secrets:
        raise ValueError(
            "job.secrets is not supported by XManager: remove it and set its variables with "
            "job.env, readable for everyone who can see the job, or use launch.gke or launch.slurm"
        )
    if executor == "local":
        if "://" in job.workdir:
            raise ValueError(
                f"job.workdir is {job.workdir!r}, but --executor=local needs a folder on this "
                "machine: set --job.workdir=FOLDER, or use --executor=vertex for a bucket (gs://)"
            )
        return
    if target.name != "a100" or target.hosts > 1:
        raise ValueError(
            f"job.accelerator is {job.accelerator}: on Vertex, XManager supports only a100:1 to a100:8; use launch.gke"
        )
    for text in (*job.overrides, *job.flags, *itertools.chain(*job.sweep), *job.env):
        if "$(" in text:
            raise ValueError(
                f"{text!r} (in job.overrides, job.flags, job.sweep or job.env) holds '$(', which "
                "Vertex expands as a variable: use launch.gke"
            )
    gke.check(job)


def _submit(job: Job, target: Target, lines: list[str]) -> None:
    try:
        from xmanager import xm, xm_local  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'xmanager>=0.8.5', or use --dry_run") from error
    executor: Any
    if _EXECUTOR.value == "local":
        executor = xm_local.Local()
        package, first = xm.binary(executor.Spec(), path=sys.executable), 1
    else:
        needs = xm.JobRequirements(a100=target.devices_per_host)
        executor = xm_local.Vertex(requirements=needs)
        # The image's entry point is `python -m`.
        package, first = xm.container(executor.Spec(), image_path=job.image), 2
    with xm_local.create_experiment(experiment_title=job.name) as experiment:
        (executable,) = experiment.package([package])
        for run, line in zip(jobs.runs(job), lines, strict=True):
            arguments = shlex.split(line)[first:]
            folder = arguments[-1].removeprefix("--workdir=")
            variables = jobs.environment(job, target, folder)
            experiment.add(xm.Job(executable, executor, name=run.name, args=arguments, env_vars=variables))


if __name__ == "__main__":
    jobs.main(launcher)
