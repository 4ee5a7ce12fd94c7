"""Result files, lines of mllog: read from any program, and written by ours, also across kills.

Process 0 alone writes. What a kill left half said (a block without its end, an evaluation without
its scores, steps after the last checkpoint) is taken out when the run goes on, and said anew.
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
    """MLCommons' MLLogger, which writes `WORKDIR/result.txt` behind what it holds, line by line.

    Those of other processes than 0 write nothing. ModuleNotFoundError with a remedy.
    """
    mllog, path = package("mllog.mllog"), workdir / RESULT
    path.parent.mkdir(parents=True, exist_ok=True)
    first = jax.process_index() == 0
    logger = logging.Logger("mllog", logging.INFO)  # In no tree: it says nothing elsewhere.
    logger.addHandler(logging.FileHandler(path) if first else logging.NullHandler())
    return mllog.MLLogger(logger, root_dir=str(pathlib.Path(__file__).parents[2]))


def recover(workdir: pathlib.Path, samples: int) -> list[Event]:
    """Cuts a run's file down to what is whole and of at most `samples` images; the events left.

    To be called before the file is opened. Empty for a run without a checkpoint: it starts anew,
    its clock too. ValueError for a file that is not all lines of mllog.
    """
    path = workdir / RESULT
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()  # The last one may be half a line.
    events = _parse(lines, path)
    if len(events) < len(lines):
        raise ValueError(f"{path} holds lines that are none of mllog: move it elsewhere")
    whole = _whole(events, samples)
    if jax.process_index() == 0:
        files.write_whole(path, "".join(f"{line}\n" for line in lines[:whole]))
    return events[:whole]


def read(path: str | os.PathLike[str]) -> list[Event]:
    """The lines of mllog in any log, whatever stands before them; ValueError for a damaged one."""
    text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    return _parse(text.splitlines(), path)


def status(events: Sequence[Event]) -> str:
    """The status at "run_stop", "success" or "aborted"; "running" without one."""
    stops = [event.metadata.get("status") for event in events if event.key == "run_stop"]
    return str(stops[-1]) if stops else RUNNING


def evaluations(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """{samples: {metric: score}} of the events "eval_accuracy", ascending."""
    scores: dict[int, dict[str, float]] = {}
    for event in events:
        if event.key == "eval_accuracy":
            at = scores.setdefault(int(event.metadata["samples_count"]), {})
            at[event.metadata["metric"]] = float(event.value)
    return dict(sorted(scores.items()))


def block_ends(events: Sequence[Event]) -> Mapping[int, int]:
    """{samples: milliseconds} at which training had seen so many."""
    return {e.metadata["samples_count"]: e.time_ms for e in events if e.key == "block_stop"}


def package(module: str) -> Any:
    """A module of MLCommons' package; ModuleNotFoundError that names the remedy if it is absent."""
    try:
        return importlib.import_module(f"mlperf_logging.{module}")
    except ModuleNotFoundError as error:
        remedy = "the benchmark needs a package of MLCommons: pip install mlperf-logging"
        raise ModuleNotFoundError(remedy) from error


def _parse(lines: Sequence[str], path: str | os.PathLike[str]) -> list[Event]:
    events = []
    for number, line in enumerate(lines, 1):
        if _TOKEN in line:
            try:
                event = json.loads(line.partition(_TOKEN)[2])
                events.append(Event(*(event[field] for field in Event._fields)))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is no line of mllog: {error}") from error
    return events


def _whole(events: Sequence[Event], samples: int) -> int:
    """The number of events before the first that is incomplete, or about more images."""
    whole = 0
    for i, event in enumerate(events, 1):
        if not samples or event.metadata.get("samples_count", 0) > samples:
            break
        if event.key not in ("block_start", "eval_start", "eval_accuracy"):
            whole = i
    return whole if "run_start" in [event.key for event in events[:whole]] else 0
