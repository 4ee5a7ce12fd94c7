"""MLPerf result files, lines of mllog, and what convergence is judged by in them."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TARGETS = {"FID": 90.0, "CLIP": 0.15}
"""Of one evaluation, FID at most and CLIP at least (MLPerf training 3.1 to 5.0)."""
RUNNING, SUCCESS, ABORTED = "running", "success", "aborted"
RESULT = "result.txt"
_TOKEN = ":::MLLOG "


class Event(NamedTuple):
    """One line of mllog."""

    key: str
    value: Any
    metadata: Mapping[str, Any]
    time_ms: int


class Result(NamedTuple):
    """A run, or the part of it that is there yet."""

    name: str
    """Its workdir, or its file."""
    batch_size: int
    learning_rate: float | None
    """The scaled one, or whatever the run's program took the key to mean."""
    status: str
    """"running" until there is a run_stop, which says "success" or "aborted"."""
    evaluations: dict[int, dict[str, float]]
    """{samples: {"FID": ..., "CLIP": ...}}, ascending; a score may still be missing."""

    @property
    def samples_to_target(self) -> int | None:
        """Samples at the first evaluation that meets both targets; None unless it succeeded."""
        passing = (n for n, scores in self.evaluations.items() if meets_targets(scores))
        return next(passing, None) if self.status == SUCCESS else None


def meets_targets(scores: Mapping[str, float]) -> bool:
    """Whether one evaluation's {"FID", "CLIP"} reach both; a missing score or NaN does not."""
    if not scores.keys() >= TARGETS.keys():
        return False
    return scores["FID"] <= TARGETS["FID"] and scores["CLIP"] >= TARGETS["CLIP"]


def find(paths: Sequence[str | os.PathLike[str]]) -> list[pathlib.Path]:
    """The result files that are named, or lie in a named folder as result.txt or result_*.txt.

    FileNotFoundError if a path has none.
    """
    found = []
    for path in map(pathlib.Path, paths):
        here = sorted([*path.glob(RESULT), *path.glob("result_*.txt")]) if path.is_dir() else [path]
        if not here or not here[0].is_file():
            raise FileNotFoundError(
                f"no result at {path}: give a file of mllog lines, or a folder that holds "
                f"{RESULT} or result_*.txt"
            )
        found += here
    return found


def read(path: str | os.PathLike[str]) -> Result:
    """ValueError if it holds no batch size, which every run logs first."""
    path = pathlib.Path(path)
    events = read_events(path)
    last = {event.key: event for event in events}
    if "global_batch_size" not in last:
        raise ValueError(f"{path} logs no global_batch_size: it is no result of a benchmark run")
    rate = last.get("opt_base_learning_rate")
    return Result(
        name=str(path.parent if path.name == RESULT else path),
        batch_size=int(last["global_batch_size"].value),
        learning_rate=float(rate.value) if rate else None,
        status=status_of(events),
        evaluations=evaluations_of(events),
    )


def status_of(events: Sequence[Event]) -> str:
    """Of the event "run_stop"; RUNNING without one."""
    stops = [event.metadata.get("status") for event in events if event.key == "run_stop"]
    return str(stops[-1]) if stops else RUNNING


def evaluations_of(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """{samples: {metric: score}} of the events "eval_accuracy", ascending."""
    found: dict[int, dict[str, float]] = {}
    for event in events:
        if event.key == "eval_accuracy":
            scores = found.setdefault(int(event.metadata["samples_count"]), {})
            scores[event.metadata["metric"]] = float(event.value)
    return dict(sorted(found.items()))


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """The lines of mllog in any log, whatever stands before them; ValueError for a damaged one."""
    text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    return parse(text.splitlines(), str(path))


def parse(lines: Sequence[str], name: str) -> list[Event]:
    """The lines of mllog among these; `name` is for the error."""
    events = []
    for number, line in enumerate(lines, 1):
        if _TOKEN in line:
            try:
                event = json.loads(line.partition(_TOKEN)[2])
                events.append(Event(*(event[field] for field in Event._fields)))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{name}, line {number} is no line of mllog: {error}") from error
    return events
