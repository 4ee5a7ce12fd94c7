"""The metrics and the manifest that a run writes."""

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
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8

from diffusion_jax.machine import events, files, remote, tuning
from diffusion_jax.task import LEVELS

METRICS = "metrics.jsonl"
MANIFEST = "manifest.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class MetricWriter:
    """The metrics of a run: metrics.jsonl, and TensorBoard's event files through CLU.

    The file holds one JSON object a line, with `step` first; NaN and infinities become null.
    Only the first process writes. A line is on its way to the disk when its call returns.
    """

    def __init__(
        self, workdir: str | os.PathLike[str], config: Mapping[str, Any], resumed_from: int = 0
    ) -> None:
        """Opens the files and drops what is after `resumed_from`, which will be written again.

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
                _drop_after(self._path, resumed_from)
            self._file = self._path.open("a", encoding="utf-8")
            self._opened.enter_context(self._file)
        self._events = self._opened.enter_context(
            events.writing(folder / events.FOLDER, resumed_from)
        )
        self._events.write_hparams(events.hparams(config))

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Numbers or arrays without axes, by name."""
        values = {name: float(value) for name, value in scalars.items()}
        if self._file:
            with files.named(self._path):
                self._file.write(metrics_line(step, values))
                self._file.flush()
        self._events.write_scalars(step, values)
        self._events.flush()

    def write_images(self, step: int, images: Mapping[str, UInt8[np.ndarray, "N H W 3"]]) -> None:
        """Writes images by name, to TensorBoard alone."""
        self._events.write_images(step, images)
        self._events.flush()

    def flush(self) -> None:
        """Returns when all of it is there: in a bucket lines are sent every few seconds else."""
        self._mirror.send()

    def close(self) -> None:
        """Closes the files; nothing can be written afterwards."""
        with files.named(self._path):
            self._opened.close()


def metrics_line(step: int, scalars: Mapping[str, float]) -> str:
    """A line of metrics.jsonl."""
    finite = {name: v if math.isfinite(v) else None for name, v in scalars.items()}
    return json.dumps({"step": step, **finite}) + "\n"


def noise_level_means(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Sums and counts, added up over steps, as means: {"loss/sigma_0.1_to_0.3": 0.2, ...}.

    A range that no sample fell into is left out, and all are of metrics without levels.
    """
    if "level_loss" not in metrics:
        return {}
    edges = ("0", *map(str, LEVELS), "inf")
    names = [f"loss/sigma_{a}_to_{b}" for a, b in itertools.pairwise(edges)]
    rows = zip(names, metrics["level_loss"], metrics["level_count"], strict=True)
    return {name: float(total / count) for name, total, count in rows if count}


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; one that a kill cut off at the end is left out."""
    *lines, rest = files.path(path).read_text(encoding="utf-8").split("\n")
    del rest  # Empty, or a line without its end.
    read = []
    for number, line in enumerate(lines, 1):
        try:
            read.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged: {line[:80]!r}") from error
    return read


def write_manifest(
    workdir: str | os.PathLike[str], config: Mapping[str, Any], seed: int, step: int
) -> None:
    """Adds this process's run to manifest.json: {"runs": [first, ..., this one]}.

    Call it before the first step is taken from `step`. A run holds config, seed, first step, start
    time, command line, versions, git commit (None outside a checkout), devices, and the environment
    that JAX, XLA and their libraries read.
    """
    path = files.path(workdir) / MANIFEST
    versions = {package: version(package) for package in _PACKAGES}
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    run = {
        "start": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "first_step": step,
        "seed": seed,
        "command": sys.orig_argv,
        "git": git_commit(pathlib.Path(__file__)),
        "versions": {"python": platform.python_version(), **versions},
        "devices": _devices(),
        "environment": tuning.variables(),
        "config": config,
    }
    if jax.process_index() == 0:
        # ConfigDict holds tuples and numpy numbers, which JSON writes as lists and numbers.
        files.write_whole(path, json.dumps({"runs": [*runs, run]}, indent=1, default=_plain))


def version(package: str) -> str | None:
    """The version of an installed package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit(file: pathlib.Path) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the checkout that tracks `file`; None if there is none."""

    def git(*args):
        command = ["git", "-C", str(file.parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # An environment inside another checkout.
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        return None


def _drop_after(path: pathlib.Path, step: int) -> None:
    kept = [json.dumps(line) + "\n" for line in read_metrics(path) if line["step"] <= step]
    files.write_whole(path, "".join(kept))


def _devices() -> dict[str, Any]:
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
    }


def _plain(value: Any) -> Any:
    """A value for JSON that it does not know: numpy's numbers, and dtypes and paths as text."""
    return value.item() if isinstance(value, np.generic) else str(value)
