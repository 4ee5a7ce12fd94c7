"""The page of one run, or of several over one another: what its template, report.html, shows."""

import base64
import csv
import functools
import itertools
import pathlib
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from diffusion_jax import runs
from diffusion_jax.evaluate import figures, sweep
from diffusion_jax.evaluate.figures import Band, Line, Plot
from diffusion_jax.evaluate.sweep import TABLE, Row, describe, sheet_name
from diffusion_jax.machine import log
from diffusion_jax.metrics import table
from diffusion_jax.metrics.cards import ALIKE, Card, Scored, differing

PAGE = "report.html"
"""The page's name in a workdir, and its template's here."""
RCP = pathlib.Path(__file__).parent / "mlperf_rcp.csv"
"""Evaluations of the reference runs of MLPerf's text-to-image benchmark, by MLCommons."""
_POINTS = 300
_WORDS = {"ema": "average", "later": "later stages"}


class SweepResult(NamedTuple):
    """One sweep: its rows, their cards, and the sheet of pictures of each of its points."""

    name: str
    rows: list[dict[str, str]]
    scored: dict[str, Scored]
    """Scores and their cards, a point and extractor each."""
    sheets: dict[str, pathlib.Path]
    folder: pathlib.Path = pathlib.Path()


class RunResult(NamedTuple):
    """The metrics of a workdir's training, and its sweeps."""

    name: str
    training: list[dict[str, Any]]
    evaluations: list[SweepResult]


def read_run(workdir: str | pathlib.Path) -> RunResult:
    """A run's metrics and sweeps; FileNotFoundError if it has neither."""
    workdir = pathlib.Path(workdir)
    metrics = workdir / log.METRICS
    tables = sorted((workdir / runs.EVALUATION).glob(f"*/{TABLE}"))
    if not metrics.exists() and not tables:
        raise FileNotFoundError(
            f"{workdir} holds neither {log.METRICS} nor {runs.EVALUATION}/*/{TABLE}: "
            "it is no workdir"
        )
    training = log.read_metrics(metrics) if metrics.exists() else []
    return RunResult(workdir.name, training, [_read_evaluation(path) for path in tables])


def read_rcp(path: str | pathlib.Path = RCP) -> Band:
    """Lowest and highest FID of MLPerf's reference runs, by CLIP score rounded to 0.01.

    439 evaluations of runs of batch 512, 1024 and 2048 (30,000 images of 512 pixels each).
    """
    with open(path) as file:
        points = [(float(row["clip"]), float(row["fid"])) for row in csv.DictReader(file)]
    bins: dict[float, list[float]] = {}
    for clip, fid in points:
        bins.setdefault(round(clip * 100) / 100, []).append(fid)
    x = sorted(bins)
    return Band("MLPerf reference runs", x, [min(bins[b]) for b in x], [max(bins[b]) for b in x])


def page(runs: Sequence[RunResult], bands: Sequence[Band] = ()) -> str:
    """The whole page, in HTML."""
    sweeps = _sweeps(runs, ("guidance",))
    return _template().render(
        title=" and ".join(run.name for run in runs),
        warnings=_unlike(sweeps),
        figures=[figures.svg(_with_bands(plot, bands)) for plot in plots(runs)],
        tables=[_table(_name(runs, run, e), e.rows) for run, e in sweeps],
        pictures=[(run.name, _sheets(run)) for run in runs],
        training=list(_training(runs)),
        cards=[(run.name, [_cards(e) for e in run.evaluations if e.scored]) for run in runs],
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((pathlib.Path(__file__).parent / PAGE).read_text())


def trade_off(runs: Sequence[RunResult], x: str, y: str) -> list[Line]:
    """The score y over the score x, a line a sweep, its points in the order of guidance."""
    lines = []
    for run, evaluation in _sweeps(runs, (x, y)):
        groups = _by_weights(evaluation)
        models = len(_sweeps(runs, (x, y))) == 1 and "model" in evaluation.rows[0]
        sweep_name = [] if models else [_name(runs, run, evaluation)]
        for weights, rows in groups.items():
            rows = sorted(rows, key=lambda row: float(row["guidance"]))
            lines.append(_line(", ".join([*sweep_name, *weights]), rows, x, y))
    return lines


def main_figure(run: RunResult, name: str) -> Plot:
    """The curve of one sweep: its distance over its other score, or that score over guidance."""
    run = run._replace(evaluations=[e for e in run.evaluations if e.name == name])
    return plots([run])[0]


def plots(runs: Sequence[RunResult]) -> list[Plot]:
    """Figures of scores: the first distance over other axes, then every axis over guidance."""
    rows = [e.rows[0] for _, e in _sweeps(runs, ("guidance",))]
    shown = {c: metric for c, metric in table.shown().items() if any(c in row for row in rows)}
    axes: dict[str, list[str]] = {}
    for column in shown:
        axes.setdefault(_axis(column), []).append(column)
    distances = [column for column, metric in shown.items() if metric.lower_is_better]
    others = [group for group in axes.values() if not shown[group[0]].lower_is_better]
    pairs = [(xs, distances[:1]) for xs in others if distances]
    pairs += [(["guidance"], group) for group in axes.values()]
    return [Plot(_lines(runs, xs, ys), _axis(xs[0]), _axis(ys[0])) for xs, ys in pairs]


def _lines(runs: Sequence[RunResult], xs: Sequence[str], ys: Sequence[str]) -> list[Line]:
    """A line a sweep and pair of columns, named by what there are several of."""
    several = len(xs) + len(ys) > 2
    lines = []
    for x, y in itertools.product(xs, ys):
        found = _without_what_all_share(trade_off(runs, x, y))
        for line in found:
            names = [line.name] if not several or len(found) > 1 else []
            names += [_label(x if len(xs) > 1 else y)] if several else []
            lines.append(line._replace(name=", ".join(names)))
    return lines


def _without_what_all_share(lines: Sequence[Line]) -> list[Line]:
    """The lines, in whose names stands what tells them apart."""
    names = [line.name.split(", ") for line in lines]
    shared = set.intersection(*map(set, names)) if len(names) > 1 else set()
    short = [", ".join(part for part in name if part not in shared) for name in names]
    if len(set(short)) < len(lines) or not all(short):
        return list(lines)
    return [line._replace(name=name) for line, name in zip(lines, short, strict=True)]


def _by_weights(evaluation: SweepResult) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """The rows of each model, checkpoint and average, by their name; none if it is the only one."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in evaluation.rows:
        groups.setdefault((row.get("model", ""), sweep.label(row)), []).append(row)
    if len(groups) == 1:
        return {(): evaluation.rows}
    models = [model for model, _ in groups]
    alone = lambda model: model and models.count(model) == 1
    return {(model if alone(model) else label,): rows for (model, label), rows in groups.items()}


def _line(name: str, rows: Sequence[Row], x: str, y: str) -> Line:
    column = lambda key: [float(row[key]) for row in rows]
    interval = f"{y}_low" in rows[0]
    return Line(
        name,
        column(x),
        column(y),
        hover=[describe(row) for row in rows],
        labels=[] if x == "guidance" else [f"{float(row['guidance']):g}" for row in rows],
        low=column(f"{y}_low") if interval else (),
        high=column(f"{y}_high") if interval else (),
    )


def _with_bands(plot: Plot, bands: Sequence[Band]) -> Plot:
    """The plot with the bands behind its lines, which are of FID over CLIP score alone."""
    fits = (plot.x, plot.y) == (_axis("clip_score"), _axis("fid"))
    return plot._replace(bands=[_about(band, plot.lines) for band in bands if fits])


def _about(band: Band, lines: Sequence[Line]) -> Band:
    """The part of a band about the lines, which would be small beside the whole."""
    values = [x for line in lines for x in line.x]
    margin = 0.02 + 0.2 * (max(values) - min(values))
    near = [min(values) - margin < x < max(values) + margin for x in band.x]
    pick = lambda ends: list(itertools.compress(ends, near))
    return Band(band.name, pick(band.x), pick(band.low), pick(band.high))


def _unlike(sweeps: Sequence[tuple[RunResult, SweepResult]]) -> list[str]:
    """A warning for each field for which scores of these sweeps cannot be compared."""
    return [
        f"{extractor}: {field} differs ({', '.join(dict.fromkeys(map(str, values)))})"
        for extractor, cards in _by_extractor([evaluation for _, evaluation in sweeps])
        for field, values in differing(cards, ALIKE).items()
    ]


def _by_extractor(evaluations: Sequence[SweepResult]) -> list[tuple[str, list[Card]]]:
    """Each extractor's cards; apart those of one that pairs texts and that compares with images."""
    groups: dict[tuple[str, bool], list[Card]] = {}
    for card in (one.card for e in evaluations for one in e.scored.values()):
        groups.setdefault((card["extractor"], bool(card.get("reference"))), []).append(card)
    return [(extractor, cards) for (extractor, _), cards in groups.items()]


def _table(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    drawn = ("guidance", "model", "checkpoint", "ema", "later")
    columns = [column for column in drawn if any(row.get(column) for row in rows)]
    columns += sweep.axes(rows[0])
    columns += [column for column in table.shown() if column in rows[0]]
    shares = [float(row.get("features_share_of_time") or 0) for row in rows]
    return {
        "name": name,
        "labels": list(map(_label, columns)),
        "rows": [[_cell(row, column) for column in columns] for row in rows],
        "share": f"{100 * max(shares):.2g}" if any(shares) else "",
    }


def _cell(row: Row, column: str) -> dict[str, str]:
    if column not in table.shown() and column != "guidance":
        return {"value": row.get(column) or "", "interval": ""}
    ends = [row.get(f"{column}_{end}") for end in ("low", "high")]
    interval = " to ".join(f"{float(end):.3g}" for end in ends if end)
    return {"value": f"{float(row[column]):.4g}", "interval": interval}


def _sheets(run: RunResult) -> list[dict[str, str]]:
    return [
        {"evaluation": evaluation.name, "guidance": guidance,
         "png": base64.b64encode(path.read_bytes()).decode()}
        for evaluation in run.evaluations
        for guidance, path in evaluation.sheets.items()
    ]  # fmt: skip


def _training(runs: Sequence[RunResult]) -> Iterator[tuple[str, str]]:
    """Figures of what training logged, and its numbers in words."""
    names = dict.fromkeys(key for run in runs for row in run.training for key in row)
    apart = [key for key in names if key.startswith("heldout/") and key.endswith("/loss")]
    lines = [
        training_line(run, key)._replace(name=_of_weights(run.name, key))
        for run, key in itertools.product(runs, apart)
        if any(key in row for row in run.training)
    ]
    if lines:
        lasts = ", ".join(f"{line.name} {line.y[-1]:.6g}" for line in lines)
        yield figures.svg(Plot(lines, "step", "held-out loss")), f"At the end: {lasts}"
    for key, name in (("loss", "loss"), ("images_per_second", "images per second")):
        lines = [training_line(run, key) for run in runs if any(key in r for r in run.training)]
        if lines:
            medians = ", ".join(f"{line.name} {statistics.median(line.y):.4g}" for line in lines)
            yield figures.svg(Plot(lines, "step", name)), f"Median: {medians}"


def _of_weights(run: str, key: str) -> str:
    """A line's name: the run, and the weights of a held-out loss."""
    return f"{run}, {key.split('/')[1].replace('_', ' ')}"


def training_line(run: RunResult, key: str) -> Line:
    """Means over neighbouring lines, so that no figure has more than a few hundred points."""
    rows = [row for row in run.training if row.get(key) is not None]
    size = -(-len(rows) // _POINTS)
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    mean = lambda name: [statistics.fmean(row[name] for row in part) for part in parts]
    return Line(run.name, mean("step"), mean(key))


def _cards(evaluation: SweepResult) -> dict[str, Any]:
    """A column an extractor, a line a field; where points differ, each value that occurs."""
    columns = _by_extractor([evaluation])
    names = dict.fromkeys(field for _, cards in columns for field in cards[0])
    fields = [(_label(f), [_values(cards, f) for _, cards in columns]) for f in names]
    fields = [(label, values) for label, values in fields if any(values)]
    extractors = [extractor for extractor, _ in columns]
    return {"evaluation": evaluation.name, "extractors": extractors, "fields": fields}


def _values(cards: Sequence[Card], field: str) -> str:
    values = [card.get(field) for card in cards]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if len(numbers) == len(values):
        return ", ".join(f"{number:.10g}" for number in sorted(set(numbers)))
    return ", ".join(dict.fromkeys(map(plain, values)))


def plain(value: Any) -> str:
    """A card's value without the marks of Python, of a hash the beginning: files hold it whole."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(v)}" for name, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(plain, value))
    text = "" if value is None else str(value)
    return f"{text[:12]}…" if re.fullmatch("[0-9a-f]{40,}", text) else text


def _sweeps(
    runs: Sequence[RunResult], columns: Iterable[str]
) -> list[tuple[RunResult, SweepResult]]:
    """The sweeps whose rows have all these columns."""
    every = [(run, evaluation) for run in runs for evaluation in run.evaluations]
    return [(r, e) for r, e in every if e.rows and all(c in e.rows[0] for c in columns)]


def _name(runs: Sequence[RunResult], run: RunResult, evaluation: SweepResult) -> str:
    return evaluation.name if len(runs) == 1 else f"{run.name} {evaluation.name}"


def _read_evaluation(path: pathlib.Path) -> SweepResult:
    folder = path.parent
    with path.open() as file:
        rows = list(csv.DictReader(file))
    scored = sweep.read_scored(folder / sweep.SCORED)
    found = SweepResult(folder.name, rows, scored, {}, folder)
    several = len({sweep.point_name(row) for row in rows}) > len({row.get("model") for row in rows})
    sheets: dict[str, pathlib.Path] = {}
    for row in sorted(rows, key=lambda row: float(row["guidance"])):
        if kept := sheet_of(found, row):
            own = several and kept.name == sheet_name(row, several=True)
            of_point = sweep.label(row) if own else row.get("model")
            sheets[", ".join(filter(None, (f"{float(row['guidance']):g}", of_point)))] = kept
    return found._replace(sheets=sheets)


def sheet_of(evaluation: SweepResult, row: Row) -> pathlib.Path | None:
    """The pictures of a point, if they are there; of earlier code, which kept one sheet a scale,
    that of the scale's last point."""
    alike = lambda other: sheet_name(other) == sheet_name(row)
    last = [other for other in evaluation.rows if alike(other)][-1:] == [row]
    names = [sheet_name(row, several=True), *([sheet_name(row)] if last else [])]
    paths = (evaluation.folder / name for name in names)
    return next((path for path in paths if path.exists()), None)


def _axis(column: str) -> str:
    metric = table.shown().get(column)
    return metric.axis or metric.label if metric else _label(column)


def _label(column: str) -> str:
    metric = table.shown().get(column)
    if "." in column:
        return sweep.axis_label(column)
    return metric.label if metric else _WORDS.get(column, column.replace("_", " "))
