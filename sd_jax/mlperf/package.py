"""A submission as MLCommons' package checker reads it: ten logs, the system, the code.

ORG/systems/PLATFORM.json
ORG/results/PLATFORM/stable_diffusion/result_0.txt ... result_9.txt
ORG/benchmarks/stable_diffusion/implementations/PLATFORM/   the code, and its hash
"""

import hashlib
import json
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffusion_jax.machine import files
from diffusion_jax.machine.log import MANIFEST
from diffusion_jax.weights import pretrained
from sd_jax.mlperf import mllog, rules
from sd_jax.mlperf.mllog import Event

STATUS = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "research": "Research, Development, or Internal (RDI)",
}
"""The availability of a system: as the log says it, and as its description does."""
FIELDS = (
    "submitter", "division", "status", "system_name", "number_of_nodes",
    "host_processors_per_node", "host_processor_model_name", "host_processor_core_count",
    "host_processor_vcpu_count", "host_processor_frequency", "host_processor_caches",
    "host_processor_interconnect", "host_memory_capacity", "host_storage_type",
    "host_storage_capacity", "host_networking", "host_networking_topology",
    "host_memory_configuration", "accelerators_per_node", "accelerator_model_name",
    "accelerator_host_interconnect", "accelerator_frequency", "accelerator_on-chip_memories",
    "accelerator_memory_configuration", "accelerator_memory_capacity", "accelerator_interconnect",
    "accelerator_interconnect_topology", "cooling", "hw_notes", "framework",
    "other_software_stack", "operating_system", "sw_notes",
)  # fmt: skip
"""Of a system's description, all of which the checker wants."""
_CODE = ("diffusion_jax", "sd_jax", "configs", "launch")
_ALIKE = ("submission_org", "submission_platform", "submission_division", "submission_status")


def write(
    out: pathlib.Path, results: Sequence[pathlib.Path], system: Mapping[str, Any]
) -> tuple[pathlib.Path, list[str]]:
    """The submission of these logs, and the fields of its system that nobody filled in yet.

    `system` are fields that logs and manifests do not hold. ValueError for logs that are no
    submission, before anything is written.
    """
    logs = {path: mllog.read(path) for path in results}
    header = check(logs)
    org, platform = header["submission_org"], header["submission_platform"]
    folder, texts = out / org, {}
    for i, path in enumerate(results):
        name = f"results/{platform}/{rules.NAME}/result_{i}.txt"
        texts[name] = path.read_bytes()
    code = f"benchmarks/{rules.NAME}/implementations/{platform}"
    texts |= {f"{code}/{name}": content for name, content in _sources()}
    described = {field: "" for field in FIELDS} | _known(header, results[0]) | dict(system)
    described["sw_notes"] = described["sw_notes"] or f"code sha256 {_digest(texts, code)}"
    texts[f"systems/{platform}.json"] = json.dumps(described, indent=1).encode() + b"\n"
    for name, content in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, content)
    return folder, [field for field, value in described.items() if not value]


def check(logs: Mapping[pathlib.Path, Sequence[Event]]) -> dict[str, str]:
    """What all logs say of the submission; ValueError where they are none together."""
    if len(logs) != rules.RUNS:
        raise ValueError(f"a submission has {rules.RUNS} runs, and these are {len(logs)}")
    header = {key: _same(logs, key) for key in _ALIKE}
    if "none" in (header["submission_org"], header["submission_platform"]):
        raise ValueError(
            "the runs do not say whose they are: sd_jax.mlperf takes --org=NAME --platform=NAME"
        )
    if header["submission_status"] not in STATUS:
        raise ValueError(
            f"submission_status is {header['submission_status']!r}: it must be one of "
            f"{', '.join(STATUS)}"
        )
    seeds = Counter(seed for events in logs.values() for seed in values(events, "seed"))
    if doubled := [seed for seed, count in seeds.items() if count > 1]:
        raise ValueError(
            f"two of the runs have the seed {doubled[0]}: the rules want one of its own for each "
            "(sd_jax.mlperf draws it from the system without --seed)"
        )
    return header


def values(events: Sequence[Event], key: str) -> list[Any]:
    """What a log says under a key."""
    return [event.value for event in events if event.key == key]


def _same(logs: Mapping[pathlib.Path, Sequence[Event]], key: str) -> str:
    said = {path: values(events, key) for path, events in logs.items()}
    if missing := [path for path, found in said.items() if not found]:
        raise ValueError(f"{missing[0]} says no {key}: it is no whole log of a run")
    all_said = {str(found[-1]): path for path, found in said.items()}
    if len(all_said) > 1:
        (a, first), (b, second) = list(all_said.items())[:2]
        raise ValueError(f"{key} is {a} in {first} and {b} in {second}: a submission has one")
    return next(iter(all_said))


def _known(header: Mapping[str, str], result: pathlib.Path) -> dict[str, Any]:
    """The fields that the log says, and the manifest beside it."""
    known = {
        "submitter": header["submission_org"],
        "system_name": header["submission_platform"],
        "division": header["submission_division"],
        "status": STATUS[header["submission_status"]],
    }
    manifest = result.parent / MANIFEST
    if not manifest.exists():
        return known
    run = pretrained.read_json(manifest)["runs"][-1]
    devices, versions = run["devices"], run["versions"]
    return known | {
        "number_of_nodes": str(devices["processes"]),
        "accelerators_per_node": str(devices["count"] // devices["processes"]),
        "accelerator_model_name": devices["kind"],
        "framework": f"JAX {versions['jax']}",
        "other_software_stack": ", ".join(f"{name} {v}" for name, v in versions.items()),
    }


def _sources() -> Iterator[tuple[str, bytes]]:
    """The code that ran, as it is here."""
    root = pathlib.Path(__file__).parents[2]
    paths = [path for folder in _CODE for path in sorted((root / folder).rglob("*"))]
    for path in [*paths, root / "requirements.txt", root / "README.md", root / "docs/mlperf.md"]:
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(root)), path.read_bytes()


def _digest(texts: Mapping[str, bytes], below: str) -> str:
    whole = hashlib.sha256()
    for name, content in texts.items():
        if name.startswith(below):
            whole.update(name.removeprefix(below).encode() + hashlib.sha256(content).digest())
    return whole.hexdigest()
