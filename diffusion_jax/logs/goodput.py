"""Where the hours of a run went: in steps, or in compilation, saves, and steps taken twice.

The manifest holds the time of each start of a run, and the seconds that it spent beside training.
The seconds in steps, and those spent waiting for data, follow from the speeds in the metrics.
"""

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diffusion_jax.logs.progress import clock

STEPS, WAITING, REPEATED = "steps", "waiting for data", "repeated"
BESIDE = ("starting", "compiling", "saving", "drawing and scoring", "checking")
"""The kinds of seconds in an entry of the manifest. "checking" looks for the cause of a NaN."""
KINDS = (STEPS, WAITING, *BESIDE, REPEATED)


class Start(NamedTuple):
    """One start of a run, from its first step to the last one that was kept."""

    time: str
    first: int
    last: int
    seconds: Mapping[str, float]
    """The seconds of each of KINDS that are not 0.

    "repeated" are those of the steps after `first` that earlier starts had taken."""
    idle: float
    """The seconds between the last record of the start before and this start."""


def starts(entries: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> list[Start]:
    """Return a Start for each entry of a manifest. `lines` are the run's metrics."""
    found: list[Start] = []
    begins = [entry["first_step"] for entry in entries]
    for number, entry in enumerate(entries):
        first, end = begins[number], min(begins[number + 1 :], default=math.inf)
        own = [line for line in lines if first < line["step"] <= end]
        times = in_steps(own, first, entry["config"].get("batch_size", 0))
        for kind, value in entry.get("seconds", {}).items():
            times[kind] = times.get(kind, 0.0) + value
        last = max([first, *(line["step"] for line in own)])
        begun, idle = entry["start"], 0.0
        if found:
            counted = sum(v for k, v in found[-1].seconds.items() if k != REPEATED)
            counted += times.get(REPEATED, 0.0)
            idle = max(_unix(begun) - _unix(found[-1].time) - counted, 0.0)
        found.append(Start(begun, first, last, {k: v for k, v in times.items() if v}, idle))
    return found


def repeated(entries: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], step: int) -> float:
    """Return the seconds of the logged steps after `step`, which a start from there takes again."""
    later = [{**entry, "first_step": max(step, entry["first_step"]), "seconds": {}} for entry in entries]
    return sum(total(starts(later, lines)).values(), 0.0)


def in_steps(lines: Sequence[Mapping[str, Any]], first: int, batch_size: int) -> dict[str, float]:
    """Return the seconds of the steps that `lines` of metrics cover, and of waiting for their data.

    `first` is the step before the first of these steps.
    """
    times = {STEPS: 0.0, WAITING: 0.0}
    for line in lines:
        if speed := line.get("images_per_second"):
            whole, first = (line["step"] - first) * batch_size / speed, line["step"]
            waiting = whole * (line.get("data/waiting") or 0.0)
            times[STEPS] += whole - waiting
            times[WAITING] += waiting
    return times


def total(every: Sequence[Start]) -> dict[str, float]:
    """Return the seconds of each kind over all starts, without kinds that are 0."""
    sums = {kind: sum(one.seconds.get(kind, 0.0) for one in every) for kind in KINDS}
    return {kind: value for kind, value in sums.items() if value}


def summary(every: Sequence[Start]) -> str:
    """Return a line with the share of each kind in the time of all starts, or "" without times."""
    times = total(every)
    whole = sum(times.values())
    if not whole:
        return ""
    shares = [f"{kind} {value / whole:.1%}" for kind, value in times.items()]
    return f"{clock(whole)} in {len(every)} start{'s' * (len(every) > 1)}: {', '.join(shares)}"


def _unix(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
