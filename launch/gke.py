"""Run a job on Google Kubernetes Engine, with one JobSet per run.

    python -m launch.gke --job=launch/jobs/base64_500m.py --job.image=IMAGE \\
        --job.workdir=gs://BUCKET/runs/base64 \\
        --job.overrides="('data.path=gs://BUCKET/laion64',)" --dry_run > jobset.yaml
    python -m launch.gke --job=launch/jobs/base64_500m.py --job.image=IMAGE \\
        --job.workdir=gs://BUCKET/runs/base64 \\
        --job.overrides="('data.path=gs://BUCKET/laion64',)"

The first command prints the manifests, the second passes them to kubectl. Both print a table of the
runs. The cluster needs JobSet. Training and evaluation write to the bucket of the workdir directly;
for other commands the Cloud Storage FUSE driver mounts it at /gcs/BUCKET.

A run that SIGTERM ended (a preemption, exit code 143) is always restarted. A run that failed
otherwise, or found its workdir or port in use, is restarted up to job.restarts times. A run that
rejected its config, flags or data (exit code 2) is not restarted.

job.secrets are names of environment variables: "HF_TOKEN" is the key HF_TOKEN of the Kubernetes
secret job.gke.secret, whose contents this command never sees. job.env are variables with values.
Buckets in paths of config and flags that begin with /gcs/BUCKET are mounted too. job.gke.patch is
YAML that is merged into the manifest.
"""

from typing import Annotated, Any, NamedTuple

import yaml

from diffusion_jax.config import ranges, settings
from launch import job as jobs
from launch import templates
from launch.accelerators import Target
from launch.job import Job, Launcher, Run


class Gke(NamedTuple):
    """Fields of a job's group `gke`."""

    namespace: str
    service_account: str
    """Kubernetes service account that may read and write the bucket; "" for the default."""
    queue: str
    """Name of a Kueue queue, or ""."""
    secret: str
    """Kubernetes secret with the values of job.secrets."""
    spot: bool
    grace: ranges.Count
    """Seconds between SIGTERM and SIGKILL, in which a run saves."""
    patch: str = ""
    """YAML that is merged into the manifest: reservations, annotations, ports, limits."""
    restarts: Annotated[int, "[0, inf)", (-1,)] = -1
    """Maximum number of restarts; -1 for job.restarts, which applies to all launchers."""


def launcher(job: Job, target: Target, groups: jobs.Groups) -> Launcher:
    """Return the launcher that runs jobs as JobSets."""
    gke = settings.read(Gke, groups["gke"], "gke")
    check(job)
    if not target.kind.pool:
        raise ValueError(f"GKE has no {target.name}: use launch.slurm on a cluster that has it")
    apply = ("kubectl", "apply", "-f", "-")
    return Launcher(
        render=lambda run: render(job, gke, target, run),
        submit=lambda sets: jobs.pipe(apply, "".join(sets), "install it, or use --dry_run"),
        folder=lambda workdir: folder(job, workdir),
    )


def check(job: Job) -> None:
    """Raise ValueError for jobs that GKE cannot start."""
    if not job.image:
        raise ValueError(
            "job.image is empty: build one with launch/Dockerfile, push it, and name it with "
            "--job.image=REGISTRY/NAME:TAG"
        )
    if not job.workdir.startswith("gs://"):
        raise ValueError(
            f"job.workdir is {job.workdir!r}, but other hosts do not see a local folder, and it is "
            "lost with its machine: choose a folder in a bucket, gs://BUCKET/..."
        )


def folder(job: Job, workdir: str) -> str:
    """Return the path of a workdir for the job's command: the URL, or the path of its mount."""
    accepts_url = job.command.rpartition(".")[2] in jobs.IN_BUCKETS
    return workdir if accepts_url else workdir.replace("gs://", "/gcs/", 1)


def render(job: Job, gke: Gke, target: Target, run: Run) -> str:
    """Return the JobSet of a run as YAML."""
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
    """Merge a patch into a manifest.

    Mappings are merged by key, and lists of mappings with a "name" by this name. Other values in
    the patch replace those in the manifest.
    """
    if isinstance(manifest, dict) and isinstance(patch, dict):
        return manifest | {k: merged(manifest.get(k), value) for k, value in patch.items()}
    have_names = lambda rows: (
        isinstance(rows, list) and all(isinstance(row, dict) and "name" in row for row in rows)
    )
    if have_names(manifest) and have_names(patch):
        by_name = {row["name"]: row for row in manifest}
        return [*merged(by_name, {row["name"]: row for row in patch}).values()]
    return patch


def _patch(gke: Gke) -> dict[str, Any]:
    try:
        patch = yaml.safe_load(gke.patch)
    except yaml.YAMLError as error:
        raise ValueError(f"job.gke.patch is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(patch, dict):
        raise ValueError(f"job.gke.patch is {gke.patch!r}: write a mapping, {{spec: {{...}}}}")
    return patch


if __name__ == "__main__":
    jobs.main(launcher)
