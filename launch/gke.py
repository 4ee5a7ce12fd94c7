"""Runs a job on Google Kubernetes Engine, as one JobSet for each run.

    python -m launch.gke --job=launch/jobs/base64_500m.py --job.image=IMAGE \\
        --job.workdir=gs://BUCKET/runs/base64 \\
        --job.overrides="('data.path=gs://BUCKET/laion64',)" --dry_run > jobset.yaml
    python -m launch.gke --job=launch/jobs/base64_500m.py --job.image=IMAGE \\
        --job.workdir=gs://BUCKET/runs/base64 \\
        --job.overrides="('data.path=gs://BUCKET/laion64',)"

The first prints the manifests, the second gives them to kubectl; both print a table of the runs.
The cluster needs JobSet. Trainings and evaluations write into the bucket of the workdir themselves;
for other commands the Cloud Storage FUSE driver mounts it at /gcs/BUCKET.

A run that SIGTERM ended (a preemption; exit code 143) is started again however often that happens,
one that fails otherwise, or finds its workdir or port still taken, job.restarts times, and one that
refused its config, flags or data (exit code 2) not at all. job.secrets are environment variables:
"HF_TOKEN" is key HF_TOKEN of the Kubernetes secret job.gke.secret, whose contents this command
never sees; job.env are variables with their values. Paths of config and flags that begin with
/gcs/BUCKET mount that bucket too, and job.gke.patch is YAML merged into the manifest.
"""

from typing import Annotated, Any, NamedTuple

import yaml

from diffusion_jax.config import ranges, settings
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
    grace: ranges.Count
    """Seconds to save in after SIGTERM."""
    patch: str = ""
    """YAML that is merged into the manifest: reservations, annotations, ports, limits."""
    restarts: Annotated[int, "[0, inf)", (-1,)] = -1
    """job.restarts, which is that of all launchers, where this is -1."""


def launcher(job: Job, target: Target, groups: jobs.Groups) -> Launcher:
    """A JobSet for each run."""
    gke = settings.read(Gke, groups["gke"], "gke")
    check(job)
    if not target.kind.pool:
        raise ValueError(f"GKE has no {target.name}: launch.slurm runs on any cluster's")
    apply = ("kubectl", "apply", "-f", "-")
    return Launcher(
        render=lambda run: render(job, gke, target, run),
        submit=lambda sets: jobs.pipe(apply, "".join(sets), "install it, or apply --dry_run's"),
        folder=lambda workdir: folder(job, workdir),
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


def folder(job: Job, workdir: str) -> str:
    """What a job's command is given for a folder in a bucket: its URL, else where it is mounted."""
    is_enough = job.command.rpartition(".")[2] in jobs.IN_BUCKETS
    return workdir if is_enough else workdir.replace("gs://", "/gcs/", 1)


def render(job: Job, gke: Gke, target: Target, run: Run) -> str:
    """The JobSet of a run, YAML."""
    workdir = folder(job, run.workdir)
    arguments = jobs.command(run, workdir)
    mounts = [path for path in (workdir, *jobs.folders(job, run)) if path.startswith("/gcs/")]
    buckets = list(dict.fromkeys(path.split("/")[2] for path in mounts))
    restarts = job.restarts if gke.restarts < 0 else gke.restarts
    text = templates.fill(
        "gke.yaml", buckets=buckets, arguments=arguments, restarts=restarts, job=job, gke=gke,
        target=target, run=run, variables=jobs.environment(job, target, workdir),
    )  # fmt: skip
    if not gke.patch:
        return text
    return "---\n" + yaml.safe_dump(merged(yaml.safe_load(text), _patch(gke)), sort_keys=False)


def merged(manifest: Any, patch: Any) -> Any:
    """A manifest with a patch laid over it: mappings by key, lists of named things by name.

    Anything else in the patch stands in the place of what was there.
    """
    if isinstance(manifest, dict) and isinstance(patch, dict):
        return manifest | {k: merged(manifest.get(k), value) for k, value in patch.items()}
    named = lambda rows: (
        isinstance(rows, list) and all(isinstance(row, dict) and "name" in row for row in rows)
    )
    if named(manifest) and named(patch):
        by_name = {row["name"]: row for row in manifest}
        return [*merged(by_name, {row["name"]: row for row in patch}).values()]
    return patch


def _patch(gke: Gke) -> dict[str, Any]:
    try:
        patch = yaml.safe_load(gke.patch)
    except yaml.YAMLError as error:
        raise ValueError(f"job.gke.patch is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(patch, dict):
        raise ValueError(f"job.gke.patch is {gke.patch!r}: write a mapping, {{spec: {{...}}}}")
    return patch


if __name__ == "__main__":
    jobs.main(launcher)
