"""What training and evaluation wrote into runs, for the page: sweeps, curves, pictures."""

import pathlib
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
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


def sweeps(workdirs: Workdirs, package: str) -> dict[str, Any]:
    """Every sweep of the runs: its points with their scores, label, command and cards."""
    found = [
        {
            "run": name,
            "name": one.name,
            "points": [
                _point(workdirs, package, name, one, row, f"{n}/{i}/{j}")
                for j, row in enumerate(one.rows)
            ],
        }
        for n, name in enumerate(workdirs)
        for i, one in enumerate(_sweeps(workdirs[name][-1]))
    ]
    metrics = {
        column: {"label": metric.label, "lower": metric.lower_is_better}
        for column, metric in table.shown().items()
    }
    return {"sweeps": [one for one in found if one["points"]], "metrics": metrics}


def sheet(workdirs: Workdirs, run: int, number: int, point: int) -> bytes | None:
    """The PNG of a point's pictures; LookupError or None where there is none."""
    one = _sweeps(list(workdirs.values())[run][-1])[number]
    path = report.sheet_of(one, one.rows[point])
    return path.read_bytes() if path else None


def training(workdirs: Workdirs) -> dict[str, Any]:
    """What the runs logged, how far they are, when they drew, and how their configs differ."""
    every = [(name, workdir) for name, stages in workdirs.items() for workdir in stages]
    read = [(name, _training(name, workdir)) for name, workdir in every]
    configs = {name: claims.flat(_config(workdir)) for name, workdir in every}
    keys = sorted({key for config in configs.values() for key in config})
    differing = [
        {"field": key, "values": [_plain(config.get(key)) for config in configs.values()]}
        for key in keys
        if len({_plain(config.get(key)) for config in configs.values()}) > 1
    ]
    return {"runs": [one for _, one in read], "names": list(configs), "differing": differing}


def sample(workdirs: Workdirs, run: int, step: int) -> bytes | None:
    """The PNG that training drew at a step."""
    workdir = [w for stages in workdirs.values() for w in stages][run]
    path = _samples(workdir).get(step)
    return path.read_bytes() if path else None


def _sweeps(workdir: str) -> list[SweepResult]:
    try:
        return report.read_run(workdir).evaluations
    except FileNotFoundError:
        return []


def _point(
    workdirs: Workdirs, package: str, name: str, one: SweepResult, row: sweep.Row, key: str
) -> dict[str, Any]:
    scores = {column: float(row[column]) for column in row if _is_number(row, column)}
    drawn = {"guidance": row["guidance"], "ema": row["ema"], "checkpoint": row["checkpoint"]}
    axes = {sweep.axis_label(axis).replace(" ", "_"): row[axis] for axis in sweep.axes(row)}
    prefix = f"{sweep.point_name(row)}_guidance_{float(row['guidance']):g}_"
    words = ["python", "-m", f"{package}.evaluate", *(f"--workdir={w}" for w in workdirs[name])]
    words += [f"--{flag}={value}" for flag, value in {**drawn, **axes}.items()]
    return {
        "label": sweep.label(row),
        "guidance": float(row["guidance"]),
        "scores": scores,
        "choices": {**drawn, **axes},
        "sheet": f"/api/sweeps/{key}.png" if report.sheet_of(one, row) else "",
        "cards": {k: _card(v.card) for k, v in one.scored.items() if k.startswith(prefix)},
        "command": shlex.join(words),
    }


def _is_number(row: sweep.Row, column: str) -> bool:
    name = re.sub("_(low|high)$", "", column)
    return (name in table.shown() or column == "guidance") and bool(row[column])


def _card(card: Mapping[str, Any]) -> dict[str, str]:
    return {name: report.plain(value) for name, value in card.items() if value is not None}


def _training(name: str, workdir: str) -> dict[str, Any]:
    path = pathlib.Path(workdir) / log.METRICS
    rows = log.read_metrics(path) if path.exists() else []
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
        return runs.load(workdir)
    except (FileNotFoundError, ValueError):
        return {}


def _plain(value: Any) -> str:
    return "" if value is None else str(value)
