"""Describe a machine and check its accelerators. Attach the report to bug reports.

    python -m diffusion_jax.doctor
    python -m diffusion_jax.doctor --json

The report holds JAX's description of the machine, the package versions, and the devices with their
memory. It lists the environment variables of JAX and XLA, and the settings that this project adds
to them, with reasons. It gives the speed of a matrix product and a convolution, and the peak speed
that the manufacturer states (devices/hardware.py). It compares each operation of the models with a
reference (devices/checks.py). Its last line names the checks that failed or are slow.

The command takes about a minute, writes nothing and uses no network.
"""

import json
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import jax
import yaml
from absl import flags

import diffusion_jax
from diffusion_jax import cli
from diffusion_jax.devices import checks, hardware, tuning
from diffusion_jax.logs import run_log

_JSON = flags.DEFINE_bool("json", False, "Print the report as JSON.")
_PACKAGES = (
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "ml_collections",
    "tensorflow",
    "tensorflow-cpu",
)


def main() -> None:
    """Examine the machine and print the report."""
    set_here = tuning.missing(tuning.local_kinds(), os.environ)
    cli.start()
    report = examine(set_here)
    if jax.process_index() == 0:
        print(json.dumps(report, indent=1) if _JSON.value else text(report))


def examine(set_here: Sequence[tuning.Setting] = ()) -> dict[str, Any]:
    """Run all checks, and return the report: a dict that `text` formats.

    `set_here` holds the settings that this process added to the environment.
    """
    first = jax.local_devices()[0]
    return {
        "jax": str(jax.print_environment_info(return_string=True)).splitlines(),
        "host": _host(),
        "git": run_log.git_commit(pathlib.Path(__file__)),
        "versions": {"imagen-sd-jax": diffusion_jax.__version__}
        | {name: version for name in _PACKAGES if (version := run_log.version(name))},
        "environment": tuning.variables(),
        "set_here": {f"{s.variable}: {s.value}": s.reason for s in set_here},
        "devices": _devices(),
        "checks": checks.on(first),
        "rates": checks.rates(first),
    }


def text(report: dict[str, Any]) -> str:
    """Format the report of `examine`, with one line per check and a summary at the end."""
    subjects = {k: value for k, value in report.items() if k not in ("jax", "checks")}
    description = yaml.safe_dump(subjects, sort_keys=False, width=1000)
    rows = [_line(row) for row in report["checks"]]
    wrong = [row["check"] for row in report["checks"] if row["verdict"] != "right"]
    end = f"failed or slow checks: {', '.join(wrong)}" if wrong else "all checks are right"
    return "\n".join([*report["jax"], "", description, *rows, "", end])


def _line(row: dict[str, Any]) -> str:
    numbers = [f"{name} {row[name]}" for name in ("error", "ms", "gb_per_s") if name in row]
    return f"{row['check']:<36} {row['verdict']:<6} {', '.join(numbers)}".rstrip()


def _devices() -> list[dict[str, Any]]:
    rows = []
    for device in jax.devices():
        row = {"id": device.id, "kind": device.device_kind, "process": device.process_index}
        memory = hardware.memory(device) if device in jax.local_devices() else None
        if memory:
            row |= {"memory_used": _gib(memory.used), "memory": _gib(memory.limit)}
        rows.append(row)
    return rows


def _host() -> dict[str, Any]:
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        "python": sys.executable,
        "cpus": os.cpu_count(),
        "memory": _gib(os.sysconf("SC_PHYS_PAGES") * page),
        "memory_free": _gib(os.sysconf("SC_AVPHYS_PAGES") * page),
        "disk_free": _gib(shutil.disk_usage(".").free),
    }


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


if __name__ == "__main__":
    cli.run(main)
