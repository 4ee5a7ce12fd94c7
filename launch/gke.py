"""Runs a job on Google Kubernetes Engine, as one JobSet for each run.

    python -m launch.gke --job=launch/jobs/base64_500m.py --job.image=IMAGE \\
        --job.workdir=gs://BUCKET/runs/base64 \\
        --job.overrides="('data.path=gs://BUCKET/laion64',)" --dry_run > jobset.yaml
    python -m launch.gke --job=launch/jobs/base64_500m.py --job.image=IMAGE \\
        --job.workdir=gs://BUCKET/runs/base64 \\
        --job.overrides="('data.path=gs://BUCKET/laion64',)"

The first prints the manifests, the second gives them to kubectl; both print a table of the runs.
The cluster needs JobSet and the Cloud Storage FUSE driver: the bucket of the workdir is mounted at
/gcs/BUCKET, and must have a hierarchical namespace, in which a folder is renamed as one.

A run that SIGTERM ended (a preemption; exit code 143) is started again however often that happens,
one that fails otherwise job.gke.restarts times, and one that refused its config, flags or data
(exit code 2) not at all. job.secrets are environment variables: "HF_TOKEN" is key HF_TOKEN of the
Kubernetes secret job.gke.secret, whose contents this command never sees.
"""

from typing import NamedTuple

from diffusion_jax import settings
from launch import job as jobs
from launch import templates
from launch.accelerators import Target
from launch.job import Job, Launcher, Run


class Gke(NamedTuple):
    """A job's group `gke`."""

    namespace: str
    service_account: str
    """The Kubernetes account that may read and write the bucket; "" for the default."""
    queue: str
    """A queue of Kueue's, or ""."""
    secret: str
    spot: bool
    restarts: int
    grace: int
    """Seconds to save in after SIGTERM."""


def launcher(job: Job, target: Target, groups: jobs.Groups) -> Launcher:
    """A JobSet for each run."""
    gke = settings.read(Gke, groups["gke"], "gke")
    check(job)
    apply = ("kubectl", "apply", "-f", "-")
    return Launcher(
        render=lambda run: render(job, gke, target, run),
        submit=lambda sets: jobs.pipe(apply, "".join(sets), "install it, or apply --dry_run's"),
        folder=mounted,
    )


def check(job: Job) -> None:
    """ValueError for what the cluster could not start."""
    if not job.image:
        raise ValueError(
            "job.image is empty: build one with launch/Dockerfile, push it, and name it with "
            "--job.image=REGISTRY/NAME:TAG"
        )
    if not job.workdir.startswith("gs://"):
        raise ValueError(
            f"job.workdir is {job.workdir!r}, a folder that ends with its machine and that other "
            "hosts do not see: choose one in a bucket, gs://BUCKET/..."
        )


def mounted(workdir: str) -> str:
    """The path of a bucket's folder in the container."""
    return workdir.replace("gs://", "/gcs/", 1)


def render(job: Job, gke: Gke, target: Target, run: Run) -> str:
    """The JobSet of a run, YAML."""
    bucket = run.workdir.removeprefix("gs://").split("/")[0]
    arguments = jobs.command(run, mounted(run.workdir))
    values = {"job": job, "gke": gke, "target": target, "run": run}
    return templates.fill("gke.yaml", bucket=bucket, arguments=arguments, **values)


if __name__ == "__main__":
    jobs.main(launcher)
