"""Result files of mllog lines: read those of any program, and write ours across restarts.

Only process 0 writes. When a killed run continues, `recover` removes incomplete entries from its
log (a block without its end, an evaluation without its scores, steps after the last checkpoint),
and the run logs them again.
"""

import importlib
import json
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from diffusion_jax.machine import files

RESULT = "result.txt"
RUNNING, SUCCESS, ABORTED = "running", "success", "aborted"
_TOKEN = ":::MLLOG "


class Event(NamedTuple):
    """One line of mllog."""

    key: str
    value: Any
    metadata: Mapping[str, Any]
    time_ms: int


def open_log(workdir: pathlib.Path) -> Any:
    """Return MLCommons' MLLogger, which appends lines to `workdir`/result.txt.

    Only process 0 writes. Raises ModuleNotFoundError if the package mlperf-logging is missing.
    """
    mllog, path = package("mllog.mllog"), workdir / RESULT
    path.parent.mkdir(parents=True, exist_ok=True)
    first = jax.process_index() == 0
    # A logger without a parent, so that it writes nowhere else.
    logger = logging.Logger("mllog", logging.INFO)
    logger.addHandler(logging.FileHandler(path) if first else logging.NullHandler())
    return mllog.MLLogger(logger, root_dir=str(pathlib.Path(__file__).parents[2]))


def recover(workdir: pathlib.Path, samples: int) -> list[Event]:
    """Cut a run's log after the last complete entry up to `samples` images; return its events.

    Call this before opening the log. A run without a checkpoint (samples=0) starts from an empty
    log, with a new clock. Raises ValueError if a line of the file is not mllog's.
    """
    path = workdir / RESULT
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()  # The last line may be incomplete.
    events = _parse(lines, path)
    if len(events) < len(lines):
        raise ValueError(f"{path} holds lines that are not mllog's: move the file away")
    whole = _whole(events, samples)
    if jax.process_index() == 0:
        files.write_whole(path, "".join(f"{line}\n" for line in lines[:whole]))
    return events[:whole]


def read(path: str | os.PathLike[str]) -> list[Event]:
    """Return the events of all mllog lines in a log; lines may have prefixes.

    Raises ValueError if one is malformed.
    """
    text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    return _parse(text.splitlines(), path)


def status(events: Sequence[Event]) -> str:
    """Return the status of the last "run_stop" event: "success" or "aborted"; else "running"."""
    stops = [event.metadata.get("status") for event in events if event.key == "run_stop"]
    return str(stops[-1]) if stops else RUNNING


def evaluations(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """Return {samples: {metric: score}} of the "eval_accuracy" events, in ascending order."""
    scores: dict[int, dict[str, float]] = {}
    for event in events:
        if event.key == "eval_accuracy":
            at = scores.setdefault(int(event.metadata["samples_count"]), {})
            at[event.metadata["metric"]] = float(event.value)
    return dict(sorted(scores.items()))


def block_ends(events: Sequence[Event]) -> Mapping[int, int]:
    """Return the times in milliseconds at which training blocks ended, by the number of samples."""
    return {e.metadata["samples_count"]: e.time_ms for e in events if e.key == "block_stop"}


def package(module: str) -> Any:
    """Import a module of MLCommons' package; if it is missing, the error says how to install it."""
    try:
        return importlib.import_module(f"mlperf_logging.{module}")
    except ModuleNotFoundError as error:
        remedy = "the benchmark needs MLCommons' package: pip install mlperf-logging"
        raise ModuleNotFoundError(remedy) from error


def _parse(lines: Sequence[str], path: str | os.PathLike[str]) -> list[Event]:
    events = []
    for number, line in enumerate(lines, 1):
        if _TOKEN in line:
            try:
                event = json.loads(line.partition(_TOKEN)[2])
                events.append(Event(*(event[field] for field in Event._fields)))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number} is a malformed line of mllog: {error}"
                ) from error
    return events


def _whole(events: Sequence[Event], samples: int) -> int:
    """Return how many events at the start of the log are complete, up to `samples` images."""
    whole = 0
    for i, event in enumerate(events, 1):
        if not samples or event.metadata.get("samples_count", 0) > samples:
            break
        if event.key not in ("block_start", "eval_start", "eval_accuracy"):
            whole = i
    return whole if "run_start" in [event.key for event in events[:whole]] else 0
