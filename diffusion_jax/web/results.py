"""What training and evaluation wrote into runs, for the page: sweeps, curves, pictures."""

import math
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from diffusion_jax import runs
from diffusion_jax.evaluate import report, sweep
from diffusion_jax.evaluate.report import SweepResult
from diffusion_jax.machine import claims, log
from diffusion_jax.metrics import table

Workdirs = Mapping[str, Sequence[str]]
_SAMPLES = "samples"
_POINTS = 400  # Of a curve.
_LIVE = 120  # Seconds since its last line in which a training counts as running.
_READ: dict[Any, tuple[Any, Any]] = {}  # Of each file what it held, with its time and size then.


def named(workdirs: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """The stages of each model by a name: its last folder's, with a number where two are alike."""
    found: dict[str, list[str]] = {}
    for stages in workdirs:
        name = first = pathlib.Path(stages[-1]).name or stages[-1]
        while name in found:
            name = f"{first}_{len(found) + 1}"
        found[name] = list(stages)
    return found


def sweeps(workdirs: Workdirs) -> dict[str, Any]:
    """Every sweep of the runs: its points with their scores, label, choices and cards."""
    found = [
        {
            "run": name,
            "name": one.name,
            "points": [
                _point(one, row, f"{n}/{i}/{j}", alone=len(stages) == 1)
                for j, row in enumerate(one.rows)
            ],
        }
        for n, (name, stages) in enumerate(workdirs.items())
        for i, one in enumerate(_sweeps(stages))
    ]
    metrics = {
        column: {"label": metric.label, "lower": metric.lower_is_better}
        for column, metric in table.shown().items()
    }
    return {"sweeps": [one for one in found if one["points"]], "metrics": metrics}


def sheet(workdirs: Workdirs, run: int, number: int, point: int) -> bytes | None:
    """The PNG of a point's pictures; LookupError or None where there is none."""
    one = _sweeps(list(workdirs.values())[run])[number]
    path = report.sheet_of(one, one.rows[point])
    return path.read_bytes() if path else None


def training(workdirs: Workdirs) -> dict[str, Any]:
    """What the runs logged, how far they are, when they drew, and how their configs differ."""
    every = _runs(workdirs)
    configs = {name: claims.flat(_config(workdir)) for name, workdir in every.items()}
    keys = sorted({key for config in configs.values() for key in config})
    differing = [
        {"field": key, "values": [_plain(config.get(key)) for config in configs.values()]}
        for key in keys
        if len({_plain(config.get(key)) for config in configs.values()}) > 1
    ]
    read = [_training(name, workdir) for name, workdir in every.items()]
    return {"runs": read, "names": list(configs), "differing": differing}


def sample(workdirs: Workdirs, run: int, step: int) -> bytes | None:
    """The PNG that training drew at a step."""
    path = _samples(list(_runs(workdirs).values())[run]).get(step)
    return path.read_bytes() if path else None


def _runs(workdirs: Workdirs) -> dict[str, str]:
    """The run of each stage, once, by its own folder's name."""
    every = dict.fromkeys(workdir for stages in workdirs.values() for workdir in stages)
    return {name: workdir for name, (workdir,) in named([[w] for w in every]).items()}


def _sweeps(stages: Sequence[str]) -> list[SweepResult]:
    """The sweeps of these stages in a row, which lie in the first one's folder with its own."""
    try:
        found = report.read_run(stages[0]).evaluations
    except FileNotFoundError:
        return []
    wanted = _folders(stages) if len(stages) > 1 else None
    return [one for one in found if _drawn_by(one) == wanted]


def _drawn_by(one: SweepResult) -> list[str] | None:
    """The folders' names of the stages that drew a sweep, as its cards say; None of one model."""
    for scored in one.scored.values():
        models = scored.card.get("models") or ()
        if len(models) > 1:
            return _folders([model.get("workdir", "") for model in models])
    return None


def _folders(workdirs: Sequence[str]) -> list[str]:
    return [pathlib.Path(workdir).name for workdir in workdirs]


def _point(one: SweepResult, row: sweep.Row, key: str, alone: bool) -> dict[str, Any]:
    """A point; `alone` is of one stage. Without choices where the table does not say which drew."""
    numbers = {column: _number(row, column) for column in row}
    scores = {column: number for column, number in numbers.items() if number is not None}
    drawn = {"guidance": row["guidance"], "ema": row["ema"], "checkpoint": row["checkpoint"]}
    axes = {sweep.axis_label(axis).replace(" ", "_"): row[axis] for axis in sweep.axes(row)}
    prefix = f"{sweep.point_name(row)}_guidance_{float(row['guidance']):g}_"
    return {
        "label": sweep.label(row),
        "guidance": float(row["guidance"]),
        "scores": scores,
        "choices": {**drawn, **axes} if alone and not row.get("model") else None,
        "sheet": f"/api/sweeps/{key}.png" if report.sheet_of(one, row) else "",
        "cards": {k: _card(v.card) for k, v in one.scored.items() if k.startswith(prefix)},
    }


def _number(row: sweep.Row, column: str) -> float | None:
    """A finite score, an end of its interval, or the scale; None where there is none."""
    name = re.sub("_(low|high)$", "", column)
    shown = (name in table.shown() or column == "guidance") and row[column]
    return float(row[column]) if shown and math.isfinite(float(row[column])) else None


def _card(card: Mapping[str, Any]) -> dict[str, str]:
    return {name: report.plain(value) for name, value in card.items() if value is not None}


def _training(name: str, workdir: str) -> dict[str, Any]:
    path = pathlib.Path(workdir) / log.METRICS
    rows = _read(log.read_metrics, path, path) if path.exists() else []
    age = time.time() - path.stat().st_mtime if path.exists() else None
    keys = dict.fromkeys(key for row in rows for key in row if key != "step")
    curves = {}
    for key in keys:
        pairs = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        every = -(-len(pairs) // _POINTS)
        curves[key] = list(_means(pairs, every))
    last = rows[-1]["step"] if rows else 0
    planned = _config(workdir).get("steps", 0)
    return {
        "name": name,
        "step": last,
        "steps": planned,
        "live": age is not None and age < _LIVE and last < planned,
        "seconds": _seconds_left(rows, _config(workdir), planned - last),
        "curves": curves,
        "samples": sorted(_samples(workdir)),
    }


def _means(pairs: Sequence[tuple[int, float]], every: int) -> Iterator[tuple[float, float]]:
    """Means over neighbours, so that a curve has some hundreds of points."""
    for i in range(0, len(pairs), max(1, every)):
        part = pairs[i : i + every]
        yield sum(s for s, _ in part) / len(part), sum(v for _, v in part) / len(part)


def _seconds_left(
    rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any], steps: int
) -> float:
    speeds = [row["images_per_second"] for row in rows[-20:] if row.get("images_per_second")]
    return steps * config.get("batch_size", 0) * len(speeds) / sum(speeds) if speeds else 0.0


def _samples(workdir: str) -> dict[int, pathlib.Path]:
    """What training drew, by its step."""
    paths = pathlib.Path(workdir, _SAMPLES).glob("step_*.png")
    return {int(p.stem.removeprefix("step_")): p for p in paths if p.stem[5:].isdigit()}


def _config(workdir: str) -> dict[str, Any]:
    try:
        return _read(runs.load, workdir, pathlib.Path(workdir) / runs.CONFIG)
    except (OSError, ValueError):
        return {}


def _read(read: Callable[[Any], Any], of: Any, path: pathlib.Path) -> Any:
    """read(of), which is read again only where the file at `path` has changed."""
    stat = path.stat()
    stamp = stat.st_mtime_ns, stat.st_size
    if path not in _READ or _READ[path][0] != stamp:
        _READ[path] = stamp, read(of)
    return _READ[path][1]


def _plain(value: Any) -> str:
    return "" if value is None else str(value)
