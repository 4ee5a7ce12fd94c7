"""Manifests for GKE, checked against the schema of JobSet: commands, nodes, restarts.

The schema is from the custom resource definition of kubernetes-sigs/jobset (Apache-2.0, August
2026), which includes those of Job and Pod, without its descriptions.
"""

import gzip
import json
import pathlib

import jsonschema
import pytest
import yaml

from diffusion_jax import exits
from diffusion_jax.devices import tuning
from tests.launch.launching import BASE, SCALING, SWEEP, flags, printed, refused

ROOT = pathlib.Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
TPU = " ".join(setting.value for setting in tuning.SETTINGS["tpu"])
THERE = flags("image=registry/name:tag workdir=gs://bucket/runs/base64")
H100 = "--job.accelerator=h100:8"


def strict(schema):
    """Return the schema, changed to reject fields that it does not name."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(gzip.decompress((FIXTURES / "jobset_schema.json.gz").read_bytes()))
    # Kubernetes checks metadata, which the definition does not describe.
    schema["properties"]["metadata"] = {}
    return jsonschema.Draft202012Validator(strict(schema))


@pytest.fixture(scope="module")
def rendered(validator):
    """Return a function that renders arguments of the command as valid manifests and a table."""

    def render(*arguments, **options):
        text, table = printed("gke", *arguments, **options)
        manifests = list(yaml.safe_load_all(text))
        for manifest in manifests:
            validator.validate(manifest)
        return manifests, table

    return render


@pytest.fixture(scope="module")
def tpu(rendered):
    spot = "accelerator=v6e:16x16*2 gke.spot=true gke.queue=team secrets=('HF_TOKEN',) overrides=('optimizer.lr=2e-4',)"
    ((manifest,), _) = rendered(BASE, *THERE, *flags(spot), before=None)
    return manifest


def parts(manifest):
    """Return the worker, its job, its pod and its container."""
    (worker,) = manifest["spec"]["replicatedJobs"]
    job = worker["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    return worker, job, pod, container


def test_the_schema_rejects_misspelt_fields(tpu, validator):
    for path in (("spec", "failurePolcy"), ("spec", "replicatedJobs", 0, "template", "spec", "x")):
        wrong = json.loads(json.dumps(tpu))
        place = wrong
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = {}
        with pytest.raises(jsonschema.ValidationError, match=path[-1]):
            validator.validate(wrong)


def test_a_tpu_job_has_one_pod_per_host_in_each_slice(tpu):
    worker, job, pod, container = parts(tpu)
    assert (worker["replicas"], job["parallelism"], job["completions"]) == (2, 64, 64)
    assert job["completionMode"] == "Indexed"
    nodes = {"tpu-accelerator": "tpu-v6e-slice", "tpu-topology": "16x16", "spot": "true"}
    assert pod["nodeSelector"] == {f"cloud.google.com/gke-{name}": value for name, value in nodes.items()}
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    (toleration,) = pod["tolerations"]
    assert toleration["key"] == "cloud.google.com/gke-spot"
    assert tpu["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    topology = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert tpu["metadata"]["annotations"] == topology


def test_the_container_runs_the_command_with_an_unmounted_bucket_as_workdir(tpu):
    _, job, pod, container = parts(tpu)
    config = ["--config=configs/base64_500m.py", "--config.optimizer.lr=2e-4"]
    assert container["command"] == ["python", "-m"]
    assert container["args"] == ["imagen_jax.train", *config, "--workdir=gs://bucket/runs/base64"]
    assert container["image"] == "registry/name:tag"
    assert [m["name"] for m in container["volumeMounts"]] == [v["name"] for v in pod["volumes"]]
    assert [volume["name"] for volume in pod["volumes"]] == ["shm"]
    assert "metadata" not in job["template"]


def test_a_manifest_refers_to_a_secret_without_containing_its_value(tpu):
    *_, container = parts(tpu)
    assert container["env"] == [
        {"name": "LIBTPU_INIT_ARGS", "value": TPU},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "imagen-sd-jax", "key": "HF_TOKEN"}}},
    ]


def outcome(manifest, code):
    """Return the action of Kubernetes and JobSet after a pod ends with this exit code."""
    job = parts(manifest)[1]
    rules = enumerate(job["podFailurePolicy"]["rules"])
    matched = [i for i, rule in rules if code in rule.get("onExitCodes", {"values": []})["values"]]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    if matched:
        reason, rule = "PodFailurePolicy", f"matching FailJob rule at index {matched[0]}"
        message = f"Container main for pod default/p failed with exit code {code} {rule}"
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(p in message for p in patterns):
            return rule["action"]
    return "RestartJobSet"


def test_preemptions_do_not_count_failures_restart_and_bad_input_fails(tpu):
    assert outcome(tpu, 143) == "RestartJobSetAndIgnoreMaxRestarts"
    assert outcome(tpu, 2) == "FailJobSet"
    assert outcome(tpu, 1) == outcome(tpu, 134) == outcome(tpu, exits.BUSY) == "RestartJobSet"
    assert tpu["spec"]["failurePolicy"]["maxRestarts"] == 10
    assert (parts(tpu)[1]["backoffLimit"], parts(tpu)[2]["restartPolicy"]) == (0, "Never")


@pytest.fixture(scope="module")
def sweep(rendered):
    return rendered(SWEEP, *THERE, "--job.accelerator=h100:64")


def test_gpu_pods_have_the_coordinators_address_and_their_index(sweep):
    worker, job, pod, container = parts(sweep[0][1])
    assert (worker["replicas"], job["completions"]) == (1, 8)
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    memory, first, number, which = container["env"]
    assert memory == {"name": "XLA_CLIENT_MEM_FRACTION", "value": "0.9"}
    assert first["name"] == "JAX_COORDINATOR_ADDRESS"
    assert first["value"] == "quickstart-1-worker-0-0.quickstart-1:55527"
    assert number == {"name": "JAX_NUM_PROCESSES", "value": "8"}
    path = which["valueFrom"]["fieldRef"]["fieldPath"]
    assert which["name"] == "JAX_PROCESS_ID" and "job-completion-index" in path


def test_a_sweep_gives_one_manifest_per_run_and_a_table(sweep):
    manifests, table = sweep
    assert [m["metadata"]["name"] for m in manifests] == [f"quickstart-{i}" for i in range(3)]
    for i, manifest in enumerate(manifests):
        assert parts(manifest)[3]["args"][2:] == [f"--config.seed={i}", f"--workdir=gs://bucket/runs/base64/{i}"]
    assert table == "".join(f"quickstart-{i}  gs://bucket/runs/base64/{i}  seed={i}\n" for i in range(3))


def test_env_mounts_and_patch_are_merged_into_the_manifest(rendered):
    patch = """
      metadata: {labels: {team: images}}
      spec:
        replicatedJobs:
        - name: worker
          template: {spec: {template: {
            metadata: {annotations: {gke-gcsfuse/memory-limit: 4Gi}},
            spec: {
              nodeSelector: {cloud.google.com/reservation-name: ours},
              containers: [{name: main, ports: [{containerPort: 55527}],
                            env: [{name: TPU_LOG, value: "1"}]}]}}}}
    """
    more = flags("restarts=3 flags=('--only=$(HOME)',) overrides=('data.path=/gcs/pictures/laion/*.tar',)")
    env = "--job.env=('LIBTPU_INIT_ARGS=--a=true --b=2', 'A=$(B) $$ $C')"
    ((manifest,), _) = rendered(BASE, *THERE, *more, env, f"--job.gke.patch={patch}")
    _, job, pod, container = parts(manifest)
    env = {row["name"]: row["value"] for row in container["env"]}
    assert (env["LIBTPU_INIT_ARGS"], env["TPU_LOG"]) == (f"--a=true --b=2 {TPU}", "1")
    # Kubernetes replaces $$ by $, and $(NAME) by a variable.
    assert (env["A"], container["args"][-2]) == ("$$(B) $$$$ $$C", "--only=$$(HOME)")
    assert container["ports"] == [{"containerPort": 55527}]
    # Fields that the patch does not set are kept.
    assert container["args"][0] == "imagen_jax.train"
    assert pod["nodeSelector"]["cloud.google.com/reservation-name"] == "ours"
    assert len(pod["nodeSelector"]) == 3
    annotations = {"gke-gcsfuse/volumes": "true", "gke-gcsfuse/memory-limit": "4Gi"}
    assert job["template"]["metadata"]["annotations"] == annotations
    assert manifest["metadata"]["labels"] == {"app": "base64-500m", "team": "images"}
    mounted = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    buckets = {v["name"]: v["csi"]["volumeAttributes"]["bucketName"] for v in pod["volumes"] if "csi" in v}
    assert "/gcs/bucket" not in mounted
    assert buckets[mounted["/gcs/pictures"]] == "pictures"
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 3


def test_the_image_contains_the_benchmarks_that_gke_can_run(rendered):
    ((manifest,), _) = rendered(SCALING, *THERE)
    worker, job, pod, container = parts(manifest)
    assert (worker["replicas"], job["completions"]) == (1, 8)
    assert container["args"][0] == "benchmarks.scaling"
    assert container["args"][-1] == "--workdir=/gcs/bucket/runs/base64"
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/gcs/bucket"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert volume["csi"]["volumeAttributes"]["bucketName"] == "bucket"
    assert job["template"]["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    recipe = (ROOT / "launch" / "Dockerfile").read_text().splitlines()
    copied = {line.split()[1] for line in recipe if line.startswith("COPY ")}
    assert copied >= {"diffusion_jax", "imagen_jax", "sd_jax", "configs", "launch", "benchmarks"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--job.workdir=gs://b/r",), "job.image is empty: build an image with launch"),
        (("--job.image=i", "--job.workdir=runs/x"), "'runs/x': choose a folder in a bucket of"),
        (("--job.image=i",), "job.workdir is empty: give a folder with"),
        ((*THERE, "--job.accelerator=h10:8"), "did you mean 'h100'?"),
        ((*THERE, "--job.acelerator=h100:8"), "unknown config field acelerator: did you mean"),
        ((*THERE, "--job.name=Base"), "job.name is 'Base': use at most 40 lower-case letters"),
        ((*THERE, H100, "--job.overrides=('mesh.fsdp=3',)"), "fsdp=3, tensor=1 does not fit 8 devices: 3 does not"),
        ((*THERE, H100, "--job.sweep=((), ('mesh.fsdp=4',))"), "fsdp=4, tensor=1 uses 4 of the target's 8 devices"),
        ((*THERE, "--job.accelerator=h100:24"), "batch_size 4096 is not divisible by replica 1 x fsdp 24 = 24"),
        ((*THERE, "--job.gke.patch=[1]"), "job.gke.patch is '[1]': write a mapping"),
        ((*THERE, "--job.gke.patch={a: [}"), "job.gke.patch is not YAML"),
        (("--job=launch/jobs/scalin.py",), "'launch/jobs/scalin.py': did you mean launch/jobs/scaling.py?"),
        ((*THERE, "--job.config=nope.py:2"), "job.config is 'nope.py:2': there is no such file"),
    ],
)
def test_invalid_gke_jobs_are_errors_that_say_how_to_fix_them(arguments, message):
    assert message in refused("gke", BASE, *arguments)


def test_an_invalid_override_in_a_sweep_is_an_error():
    sweep = "--job.sweep=(('seed=1',), ('optimizer.lrr=1',), ('seed=2',))"
    message = "unknown config field optimizer.lrr: did you mean optimizer.lr?"
    assert message in refused("gke", BASE, *THERE, sweep, before=None)
