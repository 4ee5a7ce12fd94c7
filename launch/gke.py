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

from typing import Any, NamedTuple

import yaml

from diffusion_jax import settings
from launch import job as jobs
from launch.accelerators import Target
from launch.job import Job, Launcher, Run

PORT = 55527
_WORKER, _MAIN = "worker", "main"
_BAD_INPUT, _PREEMPTED = 2, 143


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
    text = {"Dumper": _Plain, "sort_keys": False, "explicit_start": True}
    apply = ("kubectl", "apply", "-f", "-")
    return Launcher(
        render=lambda run: yaml.dump(render(job, gke, target, run), **text),
        submit=lambda sets: jobs.pipe(apply, "".join(sets), "install it, or apply --dry_run's"),
        folder=mounted,
    )


class _Plain(yaml.SafeDumper):
    """Writes a value again where it is repeated: people read this."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        return True


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
    """Where a folder of a bucket is in the container."""
    return workdir.replace("gs://", "/gcs/", 1)


def render(job: Job, gke: Gke, target: Target, run: Run) -> dict[str, Any]:
    """The JobSet of a run."""
    queue = {"kueue.x-k8s.io/queue-name": gke.queue} if gke.queue else {}
    # One slice is one node pool: its hosts must not be given to two jobs.
    pool = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    metadata: dict[str, Any] = {"name": run.name, "namespace": gke.namespace}
    metadata |= {"labels": {"app": job.name, **queue}}
    metadata |= {"annotations": pool} if target.is_tpu else {}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": _failure_policy(gke),
            "replicatedJobs": [
                {
                    "name": _WORKER,
                    "replicas": target.slices,
                    "template": {"spec": _job(job, gke, target, run)},
                }
            ],
        },
    }


def _failure_policy(gke: Gke) -> dict[str, Any]:
    """All processes start again together: JAX cannot take one back."""
    by_rule = {"onJobFailureReasons": ["PodFailurePolicy"]}
    bad = {"onJobFailureMessagePatterns": [f"exit code {_BAD_INPUT} "]}
    return {
        "maxRestarts": gke.restarts,
        "rules": [
            {"name": "badInput", "action": "FailJobSet", **by_rule, **bad},
            {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts", **by_rule},
        ],
    }


def _job(job: Job, gke: Gke, target: Target, run: Run) -> dict[str, Any]:
    """A slice, or all hosts with GPUs: a pod on each host."""
    known = {"containerName": _MAIN, "operator": "In", "values": [_BAD_INPUT, _PREEMPTED]}
    gone = {"type": "DisruptionTarget", "status": "True"}
    return {
        "parallelism": target.hosts,
        "completions": target.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": known},
                {"action": "FailJob", "onPodConditions": [gone]},
            ]
        },
        "template": {
            "metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}},
            "spec": _pod(job, gke, target, run),
        },
    }


def _pod(job: Job, gke: Gke, target: Target, run: Run) -> dict[str, Any]:
    bucket = run.workdir.removeprefix("gs://").split("/")[0]
    options = {"bucketName": bucket, "mountOptions": "implicit-dirs"}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": gke.grace,
        "nodeSelector": _nodes(gke, target),
        "containers": [_container(job, gke, target, run, bucket)],
        "volumes": [
            {"name": "bucket", "csi": {
                "driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": options}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }  # fmt: skip
    if gke.service_account:
        pod["serviceAccountName"] = gke.service_account
    if gke.spot:
        spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
        pod["tolerations"] = [{**spot, "effect": "NoSchedule"}]
    return pod


def _nodes(gke: Gke, target: Target) -> dict[str, str]:
    prefix = "cloud.google.com/gke-"
    spot = {f"{prefix}spot": "true"} if gke.spot else {}
    if not target.is_tpu:
        return {f"{prefix}accelerator": target.kind.pool, **spot}
    slice_of = {f"{prefix}tpu-accelerator": target.kind.pool}
    return slice_of | {f"{prefix}tpu-topology": target.topology, **spot}


def _container(job: Job, gke: Gke, target: Target, run: Run, bucket: str) -> dict[str, Any]:
    resource = "google.com/tpu" if target.is_tpu else "nvidia.com/gpu"
    count = {resource: target.devices_per_host}
    return {
        "name": _MAIN,
        "image": job.image,
        "command": ["python", "-m"],
        "args": jobs.command(run, mounted(run.workdir)),
        "env": [*_joining(target, run), *(_secret(name, gke) for name in job.secrets)],
        "resources": {"requests": count, "limits": count},
        "volumeMounts": [
            {"name": "bucket", "mountPath": f"/gcs/{bucket}"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _joining(target: Target, run: Run) -> list[dict[str, Any]]:
    """Who the others are. On TPUs GKE says so itself, to JAX."""
    if target.is_tpu:
        return []
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    first = f"{run.name}-{_WORKER}-0-0.{run.name}:{PORT}"
    return [
        {"name": "JAX_COORDINATOR_ADDRESS", "value": first},
        {"name": "JAX_NUM_PROCESSES", "value": str(target.hosts)},
        {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}},
    ]


def _secret(variable: str, gke: Gke) -> dict[str, Any]:
    reference = {"name": gke.secret, "key": variable}
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


if __name__ == "__main__":
    jobs.main(launcher)
