"""Read and write logs of benchmark runs in mllog, the format of MLPerf's results.

Only process 0 writes. When a killed run continues, `recover` first removes the incomplete entries
at the end of the log: a training block without an end, an evaluation without scores, and everything
after the last checkpoint. The run then logs these entries again.
"""

import importlib
import json
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from diffusion_jax import files

RESULT = "result.txt"
RUNNING, SUCCESS, ABORTED = "running", "success", "aborted"
_TOKEN = ":::MLLOG "


class Event(NamedTuple):
    """An event of an mllog file, stored as one line."""

    key: str
    value: Any
    metadata: Mapping[str, Any]
    time_ms: int
    """The time in milliseconds since the Unix epoch."""


def open_log(workdir: pathlib.Path) -> Any:
    """Return an MLLogger of MLCommons that appends events to result.txt in a workdir.

    The logger writes only in process 0. Raises ModuleNotFoundError if the package mlperf-logging is
    missing.
    """
    mllog, path = package("mllog.mllog"), workdir / RESULT
    path.parent.mkdir(parents=True, exist_ok=True)
    first = jax.process_index() == 0
    # This logger has no parent, so its lines appear only in the file.
    logger = logging.Logger("mllog", logging.INFO)
    logger.addHandler(logging.FileHandler(path) if first else logging.NullHandler())
    return mllog.MLLogger(logger, root_dir=str(pathlib.Path(__file__).parents[2]))


def recover(workdir: pathlib.Path, samples: int) -> list[Event]:
    """Remove incomplete entries from the end of a run's log, and return the remaining events.

    Call this function before `open_log`.

    Args:
        workdir: The workdir of the run, with the log result.txt.
        samples: The number of training images at the last checkpoint. Later entries are removed. If
            it is 0, the log becomes empty, so that the run starts from the beginning.

    Raises:
        ValueError: If a line of the log is not in mllog's format.
    """
    path = workdir / RESULT
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()  # The last line may be incomplete.
    events = _parse(lines, path)
    if len(events) < len(lines):
        raise ValueError(
            f"{path} holds lines that are not in mllog's format, so it is not the log of this run: "
            "move the file to another folder"
        )
    whole = _whole(events, samples)
    if jax.process_index() == 0:
        files.write_whole(path, "".join(f"{line}\n" for line in lines[:whole]))
    return events[:whole]


def read(path: str | os.PathLike[str]) -> list[Event]:
    """Return the events of a log.

    Lines without an event, and the text before an event in its line, are ignored. Raises ValueError
    if an event is malformed.
    """
    text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    return _parse(text.splitlines(), path)


def status(events: Sequence[Event]) -> str:
    """Return the status of a run: "success" or "aborted" if it has ended, otherwise "running"."""
    stops = [event.metadata.get("status") for event in events if event.key == "run_stop"]
    return str(stops[-1]) if stops else RUNNING


def evaluations(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """Return the logged scores {images: {metric: score}}, ordered by number of training images."""
    scores: dict[int, dict[str, float]] = {}
    for event in events:
        if event.key == "eval_accuracy":
            at_images = scores.setdefault(int(event.metadata["samples_count"]), {})
            at_images[event.metadata["metric"]] = float(event.value)
    return dict(sorted(scores.items()))


def block_ends(events: Sequence[Event]) -> Mapping[int, int]:
    """Return each training block's end time, keyed by the number of training images until then.

    Times are in milliseconds since the Unix epoch.
    """
    return {e.metadata["samples_count"]: e.time_ms for e in events if e.key == "block_stop"}


def package(module: str) -> Any:
    """Import a module of MLCommons' package mlperf-logging and return it.

    If the package is missing, raises ModuleNotFoundError with the command that installs it.
    """
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
                raise ValueError(f"{path}: line {number} is a malformed mllog event: {error}") from error
    return events


def _whole(events: Sequence[Event], samples: int) -> int:
    """Return the number of events up to the last complete entry of a log.

    Events after `samples` training images do not count. The number is 0 if there is no "run_start".
    """
    whole = 0
    for i, event in enumerate(events, 1):
        if not samples or event.metadata.get("samples_count", 0) > samples:
            break
        if event.key not in ("block_start", "eval_start", "eval_accuracy"):
            whole = i
    return whole if "run_start" in [event.key for event in events[:whole]] else 0
