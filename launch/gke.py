"""Run a job on Google Kubernetes Engine, with one JobSet per run.

    python -m launch.gke --job=launch/jobs/base64_500m.py --job.image=IMAGE \\
        --job.workdir=gs://BUCKET/runs/base64 \\
        --job.overrides="('data.path=gs://BUCKET/laion64',)" --dry_run > jobset.yaml
    python -m launch.gke --job=launch/jobs/base64_500m.py --job.image=IMAGE \\
        --job.workdir=gs://BUCKET/runs/base64 \\
        --job.overrides="('data.path=gs://BUCKET/laion64',)"

The first command prints the Kubernetes manifests, the second submits them with kubectl. Both print
a table of the runs. JobSet must be installed on the cluster. Training, sampling and evaluation
write directly to the bucket that contains the workdir. For other commands, the Cloud Storage FUSE
driver mounts this bucket at /gcs/BUCKET.

A preempted run (ended by SIGTERM, exit code 143) is always restarted. A run that rejected its
config, flags or data (exit code 2) is not restarted. A run that failed for another reason, for
example because its workdir or port was in use, is restarted up to job.restarts times.

job.secrets lists names of environment variables. Kubernetes reads their values from the secret
job.gke.secret: the variable HF_TOKEN gets the value of the key HF_TOKEN. This command never sees
these values. job.env lists variables with values (NAME=VALUE). If a path in the config or the flags
begins with /gcs/BUCKET, this bucket is mounted too. job.gke.patch is YAML that is merged into the
manifest.
"""

from typing import Annotated, Any, NamedTuple

import yaml

from diffusion_jax.config import ranges, settings
from launch import job as jobs
from launch import templates
from launch.accelerators import Target
from launch.job import Job, JobRun, Launcher


class Gke(NamedTuple):
    """Settings for Google Kubernetes Engine: the group `gke` of a job file."""

    namespace: str
    """Kubernetes namespace in which the runs are created."""
    service_account: str
    """Kubernetes service account that may read and write the bucket; "" for the default."""
    queue: str
    """Name of the Kueue queue that admits the job; "" for no queue."""
    secret: str
    """Name of the Kubernetes secret that holds the values of job.secrets."""
    spot: bool
    """Whether to use spot machines, which cost less but can be preempted at any time."""
    grace: ranges.Count
    """Seconds between SIGTERM and SIGKILL, during which a run saves a checkpoint."""
    patch: str = ""
    """YAML to merge into the manifest, for example annotations or limits; "" for none."""
    restarts: Annotated[int, ranges.Interval("[0, inf)"), (-1,)] = -1
    """Maximum number of restarts on GKE; -1 for the value of job.restarts."""


def launcher(job: Job, target: Target, groups: jobs.Groups) -> Launcher:
    """Return the launcher that renders runs as JobSet manifests and submits them with kubectl."""
    gke = settings.read(Gke, groups["gke"], "gke")
    check(job)
    if not target.kind.pool:
        raise ValueError(
            f"job.accelerator is {job.accelerator}, which GKE does not offer: use launch.slurm "
            f"on a cluster with {target.name}"
        )
    apply = ("kubectl", "apply", "-f", "-")
    return Launcher(
        render=lambda run: render(job, gke, target, run),
        submit=lambda sets: jobs.pipe(apply, "".join(sets), "install it, or only print the manifests with --dry_run"),
        folder=lambda workdir: folder(job, workdir),
    )


def check(job: Job) -> None:
    """Raise ValueError unless the job has a container image and a workdir in a gs:// bucket."""
    if not job.image:
        raise ValueError(
            "job.image is empty: build an image with launch/Dockerfile, push it, and name it with "
            "--job.image=REGISTRY/NAME:TAG"
        )
    if not job.workdir.startswith("gs://"):
        raise ValueError(
            f"job.workdir is {job.workdir!r}: choose a folder in a bucket of Google Cloud Storage, "
            "such as gs://BUCKET/runs/NAME, which all hosts can access and which outlasts them"
        )


def folder(job: Job, workdir: str) -> str:
    """Return the --workdir of the job's command, for a workdir in a gs:// bucket.

    Commands that can write to buckets get the URL. Other commands get the path under which the
    bucket is mounted, /gcs/BUCKET/...
    """
    accepts_url = job.command.rpartition(".")[2] in jobs.IN_BUCKETS
    return workdir if accepts_url else workdir.replace("gs://", "/gcs/", 1)


def render(job: Job, gke: Gke, target: Target, run: JobRun) -> str:
    """Return the JobSet manifest of a run as YAML."""
    workdir = folder(job, run.workdir)
    arguments = jobs.command(run, workdir)
    mounts = [path for path in (workdir, *jobs.folders(job, run)) if path.startswith("/gcs/")]
    buckets = list(dict.fromkeys(path.split("/")[2] for path in mounts))
    restarts = job.restarts if gke.restarts < 0 else gke.restarts
    text = templates.fill(
        "gke.yaml",
        buckets=buckets,
        arguments=arguments,
        restarts=restarts,
        job=job,
        gke=gke,
        target=target,
        run=run,
        variables=jobs.environment(job, target, workdir),
    )
    if not gke.patch:
        return text
    return "---\n" + yaml.safe_dump(merged(yaml.safe_load(text), _patch(gke)), sort_keys=False)


def merged(manifest: Any, patch: Any) -> Any:
    """Return a Kubernetes manifest with a patch merged into it.

    Mappings are merged key by key. If all items of two lists have a "name", items with equal names
    are merged, and all other items are kept. Any other value in the patch replaces the manifest's
    value.
    """
    if isinstance(manifest, dict) and isinstance(patch, dict):
        return manifest | {k: merged(manifest.get(k), value) for k, value in patch.items()}
    have_names = lambda rows: isinstance(rows, list) and all(isinstance(row, dict) and "name" in row for row in rows)
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
        raise ValueError(f"job.gke.patch is {gke.patch!r}: write a mapping, such as {{spec: {{...}}}}")
    return patch


if __name__ == "__main__":
    jobs.main(launcher)
