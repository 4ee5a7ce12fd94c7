"""Runs a job through XManager, which keeps a record of experiments: here, or on Vertex AI.

    pip install "xmanager>=0.8.5"
    python -m launch.xm --job=launch/jobs/quickstart_sweep.py --job.workdir=runs/sweep \\
        --executor=local
    python -m launch.xm --job=launch/jobs/quickstart_sweep.py --job.accelerator=a100:1 \\
        --job.image=IMAGE --job.workdir=gs://BUCKET/runs/sweep --executor=vertex

Each run of a sweep is a work unit. XManager 0.8.5 finds machines for no other of our accelerators
than A100s with 40 GB, at most 8 of one machine, and its Kubernetes executor mounts no bucket for
the workdir: `python -m launch.gke` is for TPUs, other GPUs and several hosts. Vertex mounts buckets
under /gcs by itself.
"""

import shlex
import sys
from typing import Any

from absl import app, flags

from diffusion_jax import cli
from launch import job as jobs
from launch.accelerators import Target
from launch.gke import mounted
from launch.job import Job, Run

_EXECUTOR = flags.DEFINE_enum("executor", "local", ["local", "vertex"], "Where it runs.")


def main(argv: list[str]) -> None:
    """Checks, renders, prints or submits."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
    with cli.bad_input():
        job, target, _ = jobs.read()
        check(job, target, _EXECUTOR.value)
        runs = jobs.runs(job)
        commands = [arguments(run, _EXECUTOR.value) for run in runs]
        jobs.check_commands([command[1:] for command in commands])
    print(jobs.table(runs), file=sys.stderr)
    if jobs.DRY_RUN.value:
        print("\n".join(shlex.join(["python", *command]) for command in commands))
        return
    with cli.bad_input(ImportError):
        _submit(job, target, runs, commands)


def check(job: Job, target: Target, executor: str) -> None:
    """ValueError for what XManager could not start."""
    if job.secrets:
        raise ValueError("job.secrets: XManager keeps none; set them where the run starts")
    if executor == "local":
        if "://" in job.workdir:
            raise ValueError(f"job.workdir is {job.workdir!r}: give a folder of this machine")
        return
    if target.name != "a100" or target.hosts > 1:
        raise ValueError(
            f"job.accelerator is {job.accelerator}: XManager finds machines on Vertex for a100:1 "
            "to a100:8 alone; use launch.gke"
        )
    if not job.image:
        raise ValueError("job.image is empty: build and push one, see launch/Dockerfile")
    if not job.workdir.startswith("gs://"):
        raise ValueError(f"job.workdir is {job.workdir!r}: choose one in a bucket, gs://BUCKET/...")


def arguments(run: Run, executor: str) -> list[str]:
    """What follows `python`."""
    folder = run.workdir if executor == "local" else mounted(run.workdir)
    return ["-m", *jobs.with_workdir(run, folder)]


def _submit(job: Job, target: Target, runs: list[Run], commands: list[list[str]]) -> None:
    try:
        from xmanager import xm, xm_local  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'xmanager>=0.8.5', or use --dry_run") from error
    executor: Any
    if _EXECUTOR.value == "local":
        executor = xm_local.Local()
        package = xm.binary(executor.Spec(), path=sys.executable)
    else:
        needs = xm.JobRequirements(a100=target.devices_per_host)
        executor = xm_local.Vertex(requirements=needs)
        # The image's entry point is `python -m`.
        package = xm.container(executor.Spec(), image_path=job.image)
        commands = [command[1:] for command in commands]
    with xm_local.create_experiment(experiment_title=job.name) as experiment:
        (executable,) = experiment.package([package])
        for run, command in zip(runs, commands, strict=True):
            experiment.add(xm.Job(executable, executor, name=run.name, args=command))


if __name__ == "__main__":
    flags.mark_flag_as_required("job")
    cli.run(main)
