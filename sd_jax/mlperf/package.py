"""Write an MLPerf submission of ten runs, in the layout that MLCommons' package checker expects.

ORG is the submitter, and PLATFORM is the name of the computer system:

ORG/systems/PLATFORM.json   the description of the system, with a hash of the code
ORG/results/PLATFORM/stable_diffusion/result_0.txt ... result_9.txt   the logs
ORG/benchmarks/stable_diffusion/implementations/PLATFORM/   the code
"""

import hashlib
import json
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffusion_jax import files
from diffusion_jax.logs.run_log import MANIFEST
from diffusion_jax.weights import pretrained
from sd_jax.mlperf import mllog, rules
from sd_jax.mlperf.mllog import Event

STATUS = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "research": "Research, Development, or Internal (RDI)",
}
"""MLPerf's wording of a system's availability, keyed by the value of submission_status in logs."""
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
"""The fields of a system's description, all of which MLCommons' package checker requires."""
_CODE = ("diffusion_jax", "sd_jax", "configs", "launch")
_ALIKE = ("submission_org", "submission_platform", "submission_division", "submission_status")


def write(
    out: pathlib.Path, results: Sequence[pathlib.Path], system: Mapping[str, Any]
) -> tuple[pathlib.Path, list[str]]:
    """Write an MLPerf submission of ten runs: the logs, the system's description and the code.

    Args:
        out: The folder to write to. The submission is a folder in it, named after the submitter.
        results: The paths of the logs of the runs.
        system: Fields of the system's description. They override the fields that are read from the
            first log and from the manifest in the log's folder.

    Returns:
        The folder of the submission, and the names of the fields of the system's description that
        are still empty.

    Raises:
        ValueError: If the logs do not form a submission (see `check`). Then nothing is written.
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
    described = {field: "" for field in FIELDS} | _logged_fields(header, results[0]) | dict(system)
    described["sw_notes"] = described["sw_notes"] or f"code sha256 {_digest(texts, code)}"
    texts[f"systems/{platform}.json"] = json.dumps(described, indent=1).encode() + b"\n"
    for name, content in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, content)
    return folder, [field for field, value in described.items() if not value]


def check(logs: Mapping[pathlib.Path, Sequence[Event]]) -> dict[str, str]:
    """Return the header fields that all logs of a submission must share, such as submission_org.

    `logs` maps the path of each log to its events.

    Raises:
        ValueError: If there are not exactly ten logs with different seeds, or a field is missing,
            invalid or differs between logs.
    """
    if len(logs) != rules.RUNS:
        raise ValueError(
            f"a submission needs the logs of {rules.RUNS} runs, not of {len(logs)}: name "
            f"{rules.RUNS} runs"
        )
    header = {key: _same(logs, key) for key in _ALIKE}
    if "none" in (header["submission_org"], header["submission_platform"]):
        raise ValueError(
            "the logs do not name the submitter or the system: run sd_jax.mlperf with --org=NAME "
            "and --platform=NAME"
        )
    if header["submission_status"] not in STATUS:
        raise ValueError(
            f"submission_status in the logs is {header['submission_status']!r}, but must be one of "
            f"{', '.join(STATUS)}: run sd_jax.mlperf with one of these as --status"
        )
    seeds = Counter(seed for events in logs.values() for seed in values(events, "seed"))
    if doubled := [seed for seed, count in seeds.items() if count > 1]:
        raise ValueError(
            f"two of the runs have the seed {doubled[0]}, but MLPerf's rules require different "
            "seeds: run sd_jax.mlperf without --seed, so that each run draws a random seed"
        )
    return header


def values(events: Sequence[Event], key: str) -> list[Any]:
    """Return the values of the events with this key, in the order of the log."""
    return [event.value for event in events if event.key == key]


def _same(logs: Mapping[pathlib.Path, Sequence[Event]], key: str) -> str:
    logged = {path: values(events, key) for path, events in logs.items()}
    if missing := [path for path, of_log in logged.items() if not of_log]:
        raise ValueError(
            f"{missing[0]} has no event {key}, so it is not the complete log of a run: name "
            "another log"
        )
    paths = {str(of_log[-1]): path for path, of_log in logged.items()}
    if len(paths) > 1:
        (a, first), (b, second) = list(paths.items())[:2]
        raise ValueError(
            f"{key} is {a} in {first}, but {b} in {second}: name logs of the same submission"
        )
    return next(iter(paths))


def _logged_fields(header: Mapping[str, str], result: pathlib.Path) -> dict[str, Any]:
    """Return the fields of the system's description that a run has recorded.

    They come from `header`, the shared fields of the logs, and from the manifest in the folder of
    the log `result`.
    """
    fields = {
        "submitter": header["submission_org"],
        "system_name": header["submission_platform"],
        "division": header["submission_division"],
        "status": STATUS[header["submission_status"]],
    }
    manifest = result.parent / MANIFEST
    if not manifest.exists():
        return fields
    run = pretrained.read_json(manifest)["runs"][-1]
    devices, versions = run["devices"], run["versions"]
    return fields | {
        "number_of_nodes": str(devices["processes"]),
        "accelerators_per_node": str(devices["count"] // devices["processes"]),
        "accelerator_model_name": devices["kind"],
        "framework": f"JAX {versions['jax']}",
        "other_software_stack": ", ".join(f"{name} {v}" for name, v in versions.items()),
    }


def _sources() -> Iterator[tuple[str, bytes]]:
    root = pathlib.Path(__file__).parents[2]
    paths = [path for folder in _CODE for path in sorted((root / folder).rglob("*"))]
    texts = ("requirements.txt", "README.md", "docs/mlperf.md", "docs/lab/mlperf.md")
    for path in [*paths, *(root / name for name in texts)]:
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(root)), path.read_bytes()


def _digest(texts: Mapping[str, bytes], below: str) -> str:
    whole = hashlib.sha256()
    for name, content in texts.items():
        if name.startswith(below):
            whole.update(name.removeprefix(below).encode() + hashlib.sha256(content).digest())
    return whole.hexdigest()
