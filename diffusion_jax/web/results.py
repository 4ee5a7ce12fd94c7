"""Collect results of training and evaluation for the web page: sweeps, curves and pictures."""

import itertools
import math
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from diffusion_jax import files, runs
from diffusion_jax.evaluate import sweep
from diffusion_jax.evaluate.sweep import SweepResult
from diffusion_jax.files import settings_record, untrusted
from diffusion_jax.logs import goodput, run_log
from diffusion_jax.metrics import table
from diffusion_jax.metrics.cards import ALIKE, Card, differing

Workdirs = Mapping[str, Sequence[str]]
Show = Callable[[pathlib.Path], str]
"""A function that returns the URL under which the web page loads a picture file."""
_SAMPLES = "samples"
_MAX_POINTS = 400  # The largest number of points in a curve.
_LIVE = 120  # A run counts as training if its metrics are at most this many seconds old.
_CACHE: dict[Any, tuple[Any, Any]] = {}  # (path, reader) -> ((mtime, size), content).
_METRICS: dict[pathlib.Path, tuple[bytes, list[dict[str, Any]], "dict[str, _Curve]"]] = {}
"""The content, lines and curves of metrics files. Later requests read only new lines."""
_LOCK = threading.Lock()  # Requests run in several threads.


def named(workdirs: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Name models after their folders, and return {unique name: workdirs of the model's stages}.

    Each item of `workdirs` holds the workdirs of one model's stages. The name of a cascade joins
    the folder names of its stages, such as "base + enlarger".
    """
    models: dict[str, list[str]] = {}
    for stages in workdirs:
        name = first = " + ".join(pathlib.Path(stage).name or stage for stage in stages)
        numbers = itertools.count(len(models) + 1)
        while name in models:
            name = f"{first}_{next(numbers)}"
        models[name] = list(stages)
    return models


def drawn_by(workdirs: Workdirs) -> list[tuple[str, SweepResult]]:
    """Return (model name, sweep) for each evaluation sweep of these models.

    The workdir of a cascade's first stage holds both the sweeps of the cascade and those of the
    first stage alone. For a cascade, only its own sweeps are returned; for a single model, only
    the sweeps of this model alone.
    """
    drawn = []
    for name, stages in workdirs.items():
        cascade = _folders(stages) if len(stages) > 1 else None
        every = sweep.read_all(stages[0])
        drawn += [(name, one) for one in every if one.damage or _stages(one) == cascade]
    return drawn


def sweeps(named_sweeps: Iterable[tuple[str, SweepResult]], show: Show) -> dict[str, Any]:
    """Return the data of the page's view of sweeps: {"sweeps", "metrics", "unlike", "damaged"}.

    "sweeps" lists the sweeps with the scores, settings and pictures of their points. "metrics"
    describes the scores, keyed by column. "unlike" lists the settings that make scores
    incomparable. "damaged" lists messages about damaged sweeps. Sweeps without points are left out.
    `show` returns the URL of a picture.
    """
    every = list(named_sweeps)
    filled = [(name, one) for name, one in every if one.rows]
    metrics = {
        column: {
            "label": metric.label,
            "axis": metric.axis or metric.label,
            "lower": metric.lower_is_better,
            "share": metric.is_share,
        }
        for column, metric in table.shown().items()
    }
    return {
        "sweeps": [_sweep(name, one, show) for name, one in filled],
        "metrics": metrics,
        "unlike": _unlike([one for _, one in filled]),
        "damaged": [one.damage for _, one in every if one.damage],
    }


def training(workdirs: Workdirs, show: Show, most: int | None = None) -> dict[str, Any]:
    """Return the data of the page's view of training: {"runs", "names", "differing"}.

    "runs" lists the runs with their curves and sample sheets, and "names" lists their names.
    "differing" lists the config fields that differ between runs, with the values for all runs.

    Args:
        workdirs: The workdirs of the stages of each model, keyed by the model's name.
        show: Returns the URL of a picture.
        most: The largest number of evenly spaced sample sheets to show per run, besides the last
            sheet. None shows all.
    """
    unique = dict.fromkeys(workdir for stages in workdirs.values() for workdir in stages)
    by_name = {name: workdir for name, (workdir,) in named([[w] for w in unique]).items()}
    configs = {name: settings_record.flat(_config(workdir)) for name, workdir in by_name.items()}
    keys = sorted({key for config in configs.values() for key in config})
    differ = [
        {"field": key, "values": [_plain(config.get(key)) for config in configs.values()]}
        for key in keys
        if len({_plain(config.get(key)) for config in configs.values()}) > 1
    ]
    shown = [_training(name, workdir, show, most) for name, workdir in by_name.items()]
    return {"runs": shown, "names": list(configs), "differing": differ}


def _stages(one: SweepResult) -> list[str] | None:
    """Return the folder names of the stages of a sweep's cascade, or None for a single model."""
    for scored in one.scored.values():
        models = scored.card.get("models") or ()
        if len(models) > 1 and all(isinstance(model, Mapping) for model in models):
            return _folders([str(model.get("workdir", "")) for model in models])
    return None


def _folders(workdirs: Sequence[str]) -> list[str]:
    return [pathlib.Path(workdir).name for workdir in workdirs]


def _unlike(every: Sequence[SweepResult]) -> list[str]:
    """Return a line for each setting that differs between sweeps and makes scores incomparable.

    Only scores with the same feature extractor are compared. Scores with a reference set and scores
    without one are compared separately.
    """
    groups: dict[tuple[str, bool], list[Card]] = {}
    for card in (scored.card for one in every for scored in one.scored.values()):
        groups.setdefault((card["extractor"], bool(card.get("reference"))), []).append(card)
    return [
        f"{extractor}: {field} differs ({', '.join(dict.fromkeys(map(str, values)))})"
        for (extractor, _), cards in groups.items()
        for field, values in differing(cards, ALIKE).items()
    ]


def _sweep(run: str, one: SweepResult, show: Show) -> dict[str, Any]:
    share = max(float(row.get(sweep.SHARE) or 0) for row in one.rows)
    real = one.folder / sweep.REAL
    return {
        "run": run,
        "name": one.folder.name,
        "share": f"{100 * share:.2g}" if share else "",
        "real": show(real) if untrusted.is_plain(real, one.folder) else "",
        "points": [_point(one, row, show) for row in one.rows],
    }


def _point(one: SweepResult, row: sweep.ScoreRow, show: Show) -> dict[str, Any]:
    """Return the data that the page shows about one point of a sweep.

    The entry "choices" holds the settings with which the page can draw the point's pictures again.
    The entry is None for a cascade and for a sweep of several models, because their tables do not
    hold all settings.
    """
    numbers = {column: _number(row, column) for column in row}
    scores = {column: number for column, number in numbers.items() if number is not None}
    axes = {sweep.axis_label(axis).replace(" ", "_"): row[axis] for axis in sweep.axes(row)}
    weights = {"ema": row["ema"], "checkpoint": row["checkpoint"]}
    alone = not row.get("model") and _stages(one) is None
    guidance, path = f"{float(row['guidance']):g}", sweep.sheet_of(one, row)
    drawn = {
        "guidance": guidance,
        "model": row.get("model"),
        "checkpoint": row["checkpoint"],
        "average": row["ema"],
        "later stages": row.get("later"),
        **{name.replace("_", " "): value for name, value in axes.items()},
    }
    prefix = f"{sweep.point_name(row)}_guidance_{guidance}_"
    return {
        "label": sweep.label(row),
        "guidance": float(row["guidance"]),
        "drawn": {name: value for name, value in drawn.items() if value},
        "scores": scores,
        "choices": {"guidance": row["guidance"], **weights, **axes} if alone else None,
        "sheet": show(path) if path else "",
        "cards": {k: _card(v.card) for k, v in one.scored.items() if k.startswith(prefix)},
    }


def _number(row: sweep.ScoreRow, column: str) -> float | None:
    """Return a column's value if it is a finite score, interval end or guidance, or else None."""
    name = re.sub("_(low|high)$", "", column)
    shown = (name in table.shown() or column == "guidance") and row[column]
    return float(row[column]) if shown and math.isfinite(float(row[column])) else None


def _card(card: Card) -> dict[str, str]:
    return {name: _plain(value) for name, value in card.items() if value is not None}


def _training(name: str, workdir: str, show: Show, most: int | None) -> dict[str, Any]:
    """Return the data that the page shows about one run: progress, curves and sample sheets.

    `show` maps the path of a picture to its URL. The page shows `most` evenly spaced sample sheets
    at most, and the last sheet. If `most` is None, it shows all sheets.
    """
    root = files.path(workdir)
    path = root / run_log.METRICS
    is_there = untrusted.is_plain(path, root)
    rows, curves, damage = [], {}, ""
    try:
        rows, curves = _metrics(path) if is_there else ([], {})
    except ValueError as error:
        damage = str(error)
    age = time.time() - path.stat().st_mtime if is_there else None
    last = rows[-1]["step"] if rows else 0
    planned = _count(workdir, "steps")
    samples = sorted(_samples(workdir).items())
    lineage = _of_manifest(root, run_log.read_lineage)
    chosen = samples[:: -(-len(samples) // most)] if most and samples else samples
    if samples and samples[-1] not in chosen:
        chosen.append(samples[-1])
    return {
        "name": name,
        "step": last,
        "steps": planned,
        "live": age is not None and age < _LIVE and last < planned,
        "seconds": _seconds_left(rows, _count(workdir, "batch_size"), planned - last),
        "damage": damage,
        "curves": {key: curve.points() for key, curve in curves.items()},
        "starts": _starts(root, rows),
        "continues": "{run}@{step}".format(**lineage) if lineage else "",
        "samples": [[step, show(picture)] for step, picture in chosen],
    }


def _starts(root: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the times of each start of a run, and of all: [{"name", "steps", "seconds"}, ...].

    "seconds" maps the kinds in goodput.KINDS and "not running" to seconds. The result is [] if no
    time was logged.
    """
    every = goodput.starts(_of_manifest(root, run_log.read_manifest) or [], rows)
    shown = [
        {
            "name": one.time[:16].replace("T", " "),
            "steps": f"{one.first:,} to {one.last:,}",
            "seconds": {**one.seconds, "not running": one.idle},
        }
        for one in every
    ]
    sums = {**goodput.total(every), "not running": sum(one.idle for one in every)}
    return [*shown, {"name": "total", "steps": "", "seconds": sums}] if goodput.total(every) else []


def _of_manifest(root: pathlib.Path, read: Callable[[Any], Any]) -> Any:
    """Return read(root), which reads the manifest of a run, or None without a manifest."""
    path = root / run_log.MANIFEST
    return _read(read, root, path) if untrusted.is_plain(path, root) else None


def _metrics(path: pathlib.Path) -> tuple[list[dict[str, Any]], "dict[str, _Curve]"]:
    """Return the lines of a metrics file and the curve of each metric. Only new lines are read."""
    with _LOCK:
        content, before, curves = _METRICS.get(path, (b"", [], {}))
        now, rows = run_log.read_more_metrics(path, content, before)
        if not now.startswith(content):  # The run was continued from an earlier step.
            before, curves = [], {}
        for row in rows[len(before) :]:
            for key, value in row.items():
                if key != "step":
                    curve = curves.setdefault(key, _Curve())
                    if value is not None:
                        curve.add(row["step"], value)
        _METRICS[path] = now, rows, curves
        return rows, {key: curve.copy() for key, curve in curves.items()}


class _Curve:
    """A curve of at most _MAX_POINTS points: means of 1, 2, 4, ... successive values each."""

    def __init__(self, every: int = 1, groups: Sequence[tuple[int, float, float]] = ()) -> None:
        self._every, self._groups = every, list(groups)  # (count, sum of steps, sum of values)

    def add(self, step: int, value: float) -> None:
        count, steps, values = self._groups.pop() if self._is_open() else (0, 0.0, 0.0)
        self._groups.append((count + 1, steps + step, values + value))
        if len(self._groups) > _MAX_POINTS:
            pairs = itertools.zip_longest(*[iter(self._groups)] * 2, fillvalue=(0, 0.0, 0.0))
            self._groups = [(a + d, b + e, c + f) for (a, b, c), (d, e, f) in pairs]
            self._every *= 2

    def copy(self) -> "_Curve":
        return _Curve(self._every, self._groups)

    def points(self) -> list[tuple[float, float]]:
        return [(steps / count, values / count) for count, steps, values in self._groups]

    def _is_open(self) -> bool:
        return bool(self._groups) and self._groups[-1][0] < self._every


def _count(workdir: str, field: str) -> int:
    """Return a whole number of a run's config, or 0 if it has none."""
    value = _config(workdir).get(field)
    return value if isinstance(value, int) else 0


def _seconds_left(rows: Sequence[Mapping[str, Any]], batch_size: int, steps: int) -> float:
    """Use the last logged speeds to estimate how many seconds `steps` more training steps take.

    `rows` holds the logged metrics. Return 0 if no speed was logged.
    """
    speeds = [row["images_per_second"] for row in rows[-20:] if row.get("images_per_second")]
    return steps * batch_size * len(speeds) / sum(speeds) if speeds else 0.0


def _samples(workdir: str) -> dict[int, pathlib.Path]:
    root = files.path(workdir)
    paths = (p for p in (root / _SAMPLES).glob("step_*.png") if p.stem[5:].isdigit())
    plain = (p for p in paths if untrusted.is_plain(p, root))
    return {int(p.stem.removeprefix("step_")): p for p in plain}


def _config(workdir: str) -> dict[str, Any]:
    root = files.path(workdir)
    if not untrusted.is_plain(root / runs.CONFIG, root):
        return {}
    try:
        return _read(runs.load, workdir, files.path(workdir) / runs.CONFIG)
    except (OSError, ValueError):
        return {}


def _read(read: Callable[[Any], Any], source: Any, path: pathlib.Path) -> Any:
    stat = path.stat()
    stamp = stat.st_mtime_ns, stat.st_size
    if (path, read) not in _CACHE or _CACHE[path, read][0] != stamp:
        _CACHE[path, read] = stamp, read(source)
    return _CACHE[path, read][1]


def _plain(value: Any) -> str:
    """Format a value of a config or card as plain text. Hashes are shortened to 12 characters."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(v)}" for name, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(_plain, value))
    text = "" if value is None else str(value)
    return f"{text[:12]}…" if re.fullmatch("[0-9a-f]{40,}", text) else text
