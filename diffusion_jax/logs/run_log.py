"""Write and read the metrics and the manifest of a run."""

import contextlib
import datetime
import itertools
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
from absl import logging
from jaxtyping import UInt8

from diffusion_jax import files
from diffusion_jax.devices import tuning
from diffusion_jax.files import remote, untrusted
from diffusion_jax.files.manifest import MANIFEST, read_lineage, read_manifest
from diffusion_jax.logs import events, goodput, weights_and_biases
from diffusion_jax.task import LEVELS

METRICS = "metrics.jsonl"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class MetricWriter:
    """Writer of a run's metrics: metrics.jsonl, and TensorBoard's event files through CLU.

    If the config names a project in log.wandb, the metrics and images are also sent to Weights &
    Biases. metrics.jsonl holds one JSON object per line, with `step` first. NaN and infinities
    become null. Only process 0 writes. Each line is flushed to the operating system at once.
    """

    def __init__(self, workdir: str | os.PathLike[str], config: Mapping[str, Any], resumed_from: int = 0) -> None:
        """Open the files, and remove the metrics of steps after `resumed_from`.

        TensorBoard shows `config` as hparams.
        """
        self._opened, self._file = contextlib.ExitStack(), None
        names = (METRICS, events.FOLDER) if jax.process_index() == 0 else ()
        self._mirror = remote.Mirror(files.path(workdir), *names)
        self._opened.enter_context(contextlib.closing(self._mirror))
        folder = self._mirror.local
        self._path = folder / METRICS
        if jax.process_index() == 0:
            if self._path.exists():
                lines = read_sound_metrics(self._path)
                kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= resumed_from]
                files.write_whole(self._path, "".join(kept))
            self._file = self._path.open("a", encoding="utf-8")
            self._opened.enter_context(self._file)
        self._events = self._opened.enter_context(events.writing(folder / events.FOLDER, resumed_from))
        self._events.write_hparams(events.hparams(config))
        self._trackers: list[Any] = [self._events]
        project = config.get("log", {}).get("wandb", "")
        if project and jax.process_index() == 0:
            tracker = weights_and_biases.writing(project, workdir, folder, config)
            self._trackers.append(self._opened.enter_context(tracker))

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write the scalars of a step, keyed by name."""
        values = {name: float(value) for name, value in scalars.items()}
        if self._file:
            with files.named(self._path):
                self._file.write(metrics_line(step, values))
                self._file.flush()
        for tracker in self._trackers:
            tracker.write_scalars(step, values)
        self._events.flush()

    def write_images(self, step: int, images: Mapping[str, UInt8[np.ndarray, "N H W 3"]]) -> None:
        """Write the images of a step, keyed by name.

        They go to TensorBoard, and to Weights & Biases if the run uses it.
        """
        for tracker in self._trackers:
            tracker.write_images(step, images)
        self._events.flush()

    def flush(self) -> None:
        """Block until all metrics are uploaded, if the workdir is in a bucket.

        Without this call, the metrics are uploaded in the background every few seconds.
        """
        self._mirror.send()

    def close(self) -> None:
        """Close the files."""
        with files.named(self._path):
            self._opened.close()


def metrics_line(step: int, scalars: Mapping[str, float]) -> str:
    """Return the JSON text of one line of metrics.jsonl."""
    finite = {name: v if math.isfinite(v) else None for name, v in scalars.items()}
    return json.dumps({"step": step, **finite}) + "\n"


def noise_level_means(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean loss per range of noise levels: {"loss/sigma_0.1_to_0.3": 0.2, ...}.

    For each range, metrics["level_loss"] holds the sum of the losses of the range's samples, and
    metrics["level_count"] the number of these samples. Ranges without samples are left out. If the
    metrics lack these two keys, the result is {}.
    """
    if "level_loss" not in metrics:
        return {}
    edges = ("0", *map(str, LEVELS), "inf")
    names = [f"loss/sigma_{a}_to_{b}" for a, b in itertools.pairwise(edges)]
    rows = zip(names, metrics["level_loss"], metrics["level_count"], strict=True)
    return {name: float(total / count) for name, total, count in rows if count}


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the parsed lines of a metrics.jsonl file. An incomplete last line is ignored.

    Raises:
        ValueError: A complete line is damaged.
    """
    return read_more_metrics(path, b"", [])[1]


def read_more_metrics(
    path: str | os.PathLike[str], content: bytes, rows: list[dict[str, Any]]
) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the complete lines of a metrics.jsonl file: their bytes, and the parsed lines.

    `content` and `rows` are the results of an earlier call, or b"" and []. If the file starts with
    `content`, only the lines after it are parsed.

    Raises:
        ValueError: A complete line is damaged.
    """
    whole = _whole_lines(path)
    if not whole.startswith(content):
        content, rows = b"", []
    more, damaged = _parse(path, whole[len(content) :], len(rows) + 1)
    if damaged:
        raise ValueError(damaged[0])
    return whole, rows + more


def read_sound_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the parsed lines of a metrics.jsonl file. Damaged lines are left out with a warning.

    A resumed run reads its metrics with this function, because damaged lines do not affect
    training.
    """
    lines, damaged = _parse(path, _whole_lines(path))
    if damaged:
        logging.warning("%s; %d damaged lines are ignored", damaged[0], len(damaged))
    return lines


def _whole_lines(path: str | os.PathLike[str]) -> bytes:
    content = files.path(path).read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _parse(path: str | os.PathLike[str], content: bytes, first: int = 1) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the parsed lines of `content`, and one message per damaged line.

    `path` and `first`, the number of the first line, appear in the messages.
    """
    lines, damaged = [], []
    for number, line in enumerate(content.split(b"\n")[:-1], first):
        try:
            lines.append(_metrics(untrusted.parse_json(line)))
        except ValueError:
            text = untrusted.printable(line[:80].decode(errors="backslashreplace"))
            damaged.append(f"{path}, line {number} is damaged: {text!r}")
    return lines, damaged


def _metrics(line: Any) -> dict[str, Any]:
    is_number = lambda value: type(value) in (int, float)
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        raise ValueError("the line has no whole number `step`")
    if not all(value is None or is_number(value) for value in line.values()):
        raise ValueError("the line holds a value that is not a number")
    # Other programs write NaN and inf; this one writes null.
    finite = lambda value: not isinstance(value, float) or math.isfinite(value)
    return {name: value if finite(value) else None for name, value in line.items()}


def write_manifest(
    workdir: str | os.PathLike[str], config: Mapping[str, Any], seed: int, step: int, autotuning: str = ""
) -> None:
    """Append an entry for this start of the run to the list "runs" in manifest.json.

    If earlier starts had logged steps after `step`, which this one repeats, the entry also holds
    their seconds. A damaged file is replaced by one with only this entry. The arguments are those
    of `manifest_entry`.
    """
    entry = manifest_entry(config, seed, step, autotuning)
    if jax.process_index():
        return
    entries, metrics = read_manifest(workdir), files.path(workdir) / METRICS
    lines = read_sound_metrics(metrics) if entries and metrics.exists() else []
    if seconds := goodput.repeated(entries, lines, step):
        entry["seconds"] = {goodput.REPEATED: seconds}
    _write_runs(workdir, [*entries, entry], read_lineage(workdir))


def write_seconds(workdir: str | os.PathLike[str], seconds: Mapping[str, float]) -> None:
    """Write the seconds that this start has spent so far, keyed by goodput.BESIDE, to its entry."""
    entries = [] if jax.process_index() else read_manifest(workdir)
    for entry in entries[-1:]:  # There is none if the manifest was damaged since the start.
        entry["seconds"] = entry.get("seconds", {}) | dict(seconds)
        _write_runs(workdir, entries, read_lineage(workdir))


def read_starts(workdir: str | os.PathLike[str]) -> list[goodput.Start]:
    """Return the times of all starts of a run, from its manifest and metrics."""
    metrics = files.path(workdir) / METRICS
    lines = read_sound_metrics(metrics) if metrics.exists() else []
    return goodput.starts(read_manifest(workdir), lines)


def read_cpu_seconds(workdir: str | os.PathLike[str], step: int) -> float:
    """Return the CPU seconds of a run's steps up to `step`, according to its metrics."""
    metrics, before, total = files.path(workdir) / METRICS, 0, 0.0
    for line in read_sound_metrics(metrics) if metrics.exists() else []:
        if "cpu_seconds_per_step" in line and line["step"] <= step:
            total += line["cpu_seconds_per_step"] * (line["step"] - before)
            before = line["step"]
    return total


def begin_from(workdir: str | os.PathLike[str], run: str, step: int, fingerprint: str, averages_from: int = 0) -> None:
    """Write the lineage of a new workdir that continues the checkpoint of `step` of another run.

    The workdir also gets the metrics of `run` and its entries in the manifest, up to `step`, so
    that one curve shows both runs. `fingerprint` is the hash of the checkpoint's checksums.
    `averages_from` is the step at which the averages of the weights began.
    """
    if jax.process_index():
        return
    metrics, folder = files.path(run) / METRICS, files.path(workdir)
    lines = read_sound_metrics(metrics) if metrics.exists() else []
    text = "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step)
    files.write_whole(folder / METRICS, text)
    entries = [entry for entry in read_manifest(run) if entry["first_step"] < step]
    lineage = {"run": run, "step": step, "fingerprint": fingerprint}
    if averages_from:
        lineage["averages_from"] = averages_from
    earlier = read_lineage(run)
    _write_runs(workdir, entries, lineage | ({"continued_from": earlier} if earlier else {}))


def _write_runs(workdir: str | os.PathLike[str], entries: Sequence[Any], lineage: Mapping[str, Any] | None) -> None:
    content = {"continued_from": lineage} if lineage else {}
    text = json.dumps(content | {"runs": entries}, indent=1)
    files.write_whole(files.path(workdir) / MANIFEST, text)


def manifest_entry(config: Mapping[str, Any], seed: int, step: int, autotuning: str = "") -> dict[str, Any]:
    """Return the manifest entry, as JSON values, for this start of a run, after step `step`.

    The entry holds the config, the seed, `step` (as "first_step"), the time, the command line,
    package versions, the git commit (None outside a checkout), the devices, the environment
    variables that JAX, XLA and their libraries read, and `autotuning`, the name of the file in the
    workdir from which XLA loads its choices of kernels ("" if it chooses them at this start).
    """
    versions = {package: version(package) for package in _PACKAGES}
    entry = {
        "start": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "first_step": step,
        "seed": seed,
        "command": sys.orig_argv,
        "git": git_commit(pathlib.Path(__file__)),
        "versions": {"python": platform.python_version(), **versions},
        "devices": _devices(),
        "environment": tuning.variables(),
        "autotuning": autotuning,
        "config": config,
    }
    # ConfigDict holds tuples and numpy numbers, which JSON writes as lists and numbers.
    plain = lambda value: value.item() if isinstance(value, np.generic) else str(value)
    return json.loads(json.dumps(entry, default=plain))


def version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit(file: pathlib.Path) -> dict[str, Any] | None:
    """Return the commit of the git checkout that tracks `file`, or None if none does.

    The result is {"commit": HASH, "dirty": whether tracked files have uncommitted changes}.
    """

    def git(*args):
        command = ["git", "-C", str(file.parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Fails for an installed package inside another checkout.
        git("ls-files", "--error-unmatch", file.name)
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        return None


def _devices() -> dict[str, Any]:
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
    }
