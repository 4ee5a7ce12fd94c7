"""One page of a run, or of several over one another: scores, pictures, cards, training.

    python -m diffusion_jax.report runs/quickstart [runs/other ...] --out=report.html
    python -m diffusion_jax.report runs/sd2_512 --rcp

The page is one file that needs no network: figures are SVG (points say their values under the
mouse), pictures stand inside it. It reads what training and evaluation wrote into the workdirs.
"""

import base64
import csv
import html
import itertools
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags, logging
from matplotlib.figure import Figure

from diffusion_jax import cli, runs
from diffusion_jax.evaluate import figures, sweep
from diffusion_jax.evaluate.figures import Band, Line
from diffusion_jax.evaluate.sweep import SCORES, TABLE, Row, describe, sheet_name
from diffusion_jax.machine import files, log
from diffusion_jax.metrics.cards import ALIKE, Card, Scored, differing

RCP = pathlib.Path(__file__).parent / "mlperf_rcp.csv"
"""Evaluations of the reference runs of MLPerf's text-to-image benchmark, by MLCommons."""
_POINTS = 300
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 68rem; margin: 2.5rem auto;
       padding: 0 1.2rem; background: #fff; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem;
     border-bottom: 1px solid #dfe5ea; padding-bottom: .3rem; } h3 { font-size: 1rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { color: #5a6875; font-size: .85rem; }
svg { width: 100%; height: auto; } img { max-width: 100%; image-rendering: pixelated; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid #e8edf1; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
.wide { overflow-x: auto; } summary { cursor: pointer; color: #2f6fb0; }
.note { color: #5a6875; font-size: .85rem; }
.warning { color: #8a2c12; background: #fdf1ec; padding: .4rem .8rem;
           border-left: 3px solid #d1603d; }
.card td, .card th { text-align: left; vertical-align: top; overflow-wrap: anywhere; }
.card td:first-child { white-space: nowrap; color: #5a6875; }
"""


class Evaluation(NamedTuple):
    """One sweep: its rows, their cards, and a sheet of pictures by guidance scale."""

    name: str
    rows: list[dict[str, str]]
    scored: dict[str, Scored]
    """Scores and their cards, a point and extractor each."""
    sheets: dict[str, pathlib.Path]


class Run(NamedTuple):
    """What a workdir holds."""

    name: str
    training: list[dict[str, Any]]
    evaluations: list[Evaluation]


def main(argv: list[str]) -> None:
    """Reads the runs, writes the page."""
    cli.start(alone=True)
    with cli.bad_input():
        if len(argv) < 2:
            raise ValueError("name one workdir or more: python -m diffusion_jax.report RUN")
        runs = [read_run(workdir) for workdir in argv[1:]]
        bands = [read_rcp()] if flags.FLAGS.rcp else []
    out = pathlib.Path(flags.FLAGS.out or pathlib.Path(argv[1]) / "report.html")
    files.write_whole(out, page(runs, bands))
    logging.info("wrote %s", out)


def read_run(workdir: str | pathlib.Path) -> Run:
    """A run's metrics and sweeps; FileNotFoundError if it has neither."""
    workdir = pathlib.Path(workdir)
    metrics = workdir / log.METRICS
    found = sorted((workdir / runs.EVALUATION).glob(f"*/{TABLE}"))
    if not metrics.exists() and not found:
        raise FileNotFoundError(
            f"{workdir} holds neither {log.METRICS} nor {runs.EVALUATION}/*/{TABLE}: "
            "it is no workdir"
        )
    training = log.read_metrics(metrics) if metrics.exists() else []
    return Run(workdir.name, training, [_read_evaluation(path) for path in found])


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


def page(runs: Sequence[Run], bands: Sequence[Band] = ()) -> str:
    """The whole page."""
    title = " and ".join(run.name for run in runs)
    parts = [_scores(runs, bands), *map(_pictures, runs), _training(runs), *map(_cards, runs)]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n<body>"
        f"<h1>{_text(title)}</h1>{''.join(parts)}</body></html>\n"
    )


def trade_off(runs: Sequence[Run], x: str, y: str) -> list[Line]:
    """The score y over the score x, a line a sweep, its points in the order of guidance."""
    lines = []
    for run, evaluation in _sweeps(runs, (x, y)):
        for weights, rows in _by_weights(evaluation).items():
            rows = sorted(rows, key=lambda row: float(row["guidance"]))
            lines.append(_line(_name(runs, run, evaluation) + weights, rows, x, y))
    return lines


def main_figure(run: Run, name: str) -> Figure:
    """The curve of one sweep: its distance over its other score, or that score over guidance."""
    run = run._replace(evaluations=[e for e in run.evaluations if e.name == name])
    return _draw(plots([run])[0])


class Plot(NamedTuple):
    """A figure to be: its lines and the names of its axes."""

    lines: list[Line]
    x: str
    y: str


def plots(runs: Sequence[Run]) -> list[Plot]:
    """Figures of scores: the first distance over other axes, then every axis over guidance."""
    rows = [e.rows[0] for _, e in _sweeps(runs, ("guidance",))]
    columns = [name for name in SCORES if any(name in row for row in rows)]
    axes: dict[str, list[str]] = {}
    for column in columns:
        axes.setdefault(_axis(column), []).append(column)
    distances = [column for column in columns if SCORES[column].lower_is_better]
    others = [group for group in axes.values() if not SCORES[group[0]].lower_is_better]
    pairs = [(xs, distances[:1]) for xs in others if distances]
    pairs += [(["guidance"], group) for group in axes.values()]
    return [Plot(_lines(runs, xs, ys), _axis(xs[0]), _axis(ys[0])) for xs, ys in pairs]


def _lines(runs: Sequence[Run], xs: Sequence[str], ys: Sequence[str]) -> list[Line]:
    """A line a sweep and pair of columns, named by what there are several of."""
    several = len(xs) + len(ys) > 2
    lines = []
    for x, y in itertools.product(xs, ys):
        for line in trade_off(runs, x, y):
            names = [line.name] if not several or len(_sweeps(runs, (x, y))) > 1 else []
            names += [_label(x if len(xs) > 1 else y)] if several else []
            lines.append(line._replace(name=", ".join(names)))
    return lines


def _by_weights(evaluation: Evaluation) -> dict[str, list[dict[str, str]]]:
    """The rows of each checkpoint and average; the key names it where there are several."""
    groups: dict[str, list[dict[str, str]]] = {}
    for row in evaluation.rows:
        groups.setdefault(f", step {row['checkpoint']}, {row['ema']}", []).append(row)
    return groups if len(groups) > 1 else {"": evaluation.rows}


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


def _scores(runs: Sequence[Run], bands: Sequence[Band]) -> str:
    sweeps = _sweeps(runs, ("guidance",))
    if not sweeps:
        return "<p>No evaluation yet.</p>"
    figures_ = "".join(
        f"<figure>{figures.to_svg(_draw(plot, bands), plot.lines)}</figure>" for plot in plots(runs)
    )
    tables = "".join(_table(_name(runs, run, e), e.rows) for run, e in sweeps)
    return f'<h2>Scores</h2>{_unlike(sweeps)}<div class="figures">{figures_}</div>{tables}'


def _draw(plot: Plot, bands: Sequence[Band] = ()) -> Figure:
    """The bands are of FID over CLIP score alone."""
    fits = (plot.x, plot.y) == (_axis("clip_score"), _axis("fid"))
    shown = [_about(band, plot.lines) for band in bands if fits]
    return figures.plot(plot.lines, plot.x, plot.y, shown)


def _about(band: Band, lines: Sequence[Line]) -> Band:
    """The part of a band about the lines, which would be small beside the whole."""
    values = [x for line in lines for x in line.x]
    margin = 0.02 + 0.2 * (max(values) - min(values))
    near = [min(values) - margin < x < max(values) + margin for x in band.x]
    pick = lambda ends: list(itertools.compress(ends, near))
    return Band(band.name, pick(band.x), pick(band.low), pick(band.high))


def _unlike(sweeps: Sequence[tuple[Run, Evaluation]]) -> str:
    """A warning for each field for which scores of these sweeps cannot be compared."""
    cards: dict[str, list[Card]] = {}
    for one in (one for _, e in sweeps for one in e.scored.values()):
        cards.setdefault(one.card["extractor"], []).append(one.card)
    lines = [
        f"{name}: {field} differs ({', '.join(dict.fromkeys(map(str, values)))})"
        for name, found in cards.items()
        for field, values in differing(found, ALIKE).items()
    ]
    return "".join(f'<p class="warning">Not comparable. {_text(line)}</p>' for line in lines)


def _table(name: str, rows: Sequence[Row]) -> str:
    columns = ["guidance", *(c for c in rows[0] if c in SCORES)]
    head = "".join(f"<th>{_text(_label(c))}</th>" for c in columns)
    cells = lambda row: "".join(f"<td>{_cell(row, c)}</td>" for c in columns)
    body = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
    table = f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
    return f"<h3>{_text(name)}</h3>{table}{_share(rows)}"


def _share(rows: Sequence[Row]) -> str:
    shares = [
        float(row["features_share_of_time"]) for row in rows if "features_share_of_time" in row
    ]
    if not shares:
        return ""
    return f'<p class="note">Scoring took {100 * max(shares):.2g} % of the time at most.</p>'


def _cell(row: Row, column: str) -> str:
    text = f"{float(row[column]):.4g}"
    if f"{column}_low" in row:
        low, high = (float(row[f"{column}_{end}"]) for end in ("low", "high"))
        text += f' <span class="note">({low:.3g} to {high:.3g})</span>'
    return text


def _pictures(run: Run) -> str:
    parts = []
    for evaluation in run.evaluations:
        for guidance, path in evaluation.sheets.items():
            data = base64.b64encode(path.read_bytes()).decode()
            parts.append(
                f"<details{' open' if not parts else ''}><summary>{_text(evaluation.name)}, "
                f"guidance {guidance}</summary>"
                f'<img alt="pictures at guidance {guidance}" src="data:image/png;base64,{data}">'
                "</details>"
            )
    return f"<h2>Pictures of {_text(run.name)}</h2>{''.join(parts)}" if parts else ""


def _training(runs: Sequence[Run]) -> str:
    shown = []
    for key, name in (("loss", "loss"), ("images_per_second", "images per second")):
        lines = [training_line(run, key) for run in runs if any(key in r for r in run.training)]
        if lines:
            figure = figures.plot(lines, "step", name)
            medians = ", ".join(f"{line.name} {statistics.median(line.y):.4g}" for line in lines)
            caption = f"<figcaption>Median: {_text(medians)}.</figcaption>"
            shown.append(f"<figure>{figures.to_svg(figure, [])}{caption}</figure>")
    return f'<h2>Training</h2><div class="figures">{"".join(shown)}</div>' if shown else ""


def training_line(run: Run, key: str) -> Line:
    """Means over neighbouring lines, so that no figure has more than a few hundred points."""
    rows = [row for row in run.training if row.get(key) is not None]
    size = -(-len(rows) // _POINTS)
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    mean = lambda name: [statistics.fmean(row[name] for row in part) for part in parts]
    return Line(run.name, mean("step"), mean(key))


def _cards(run: Run) -> str:
    cards = [
        f"<details><summary>{_text(e.name)}</summary>{_card_table(e.scored)}</details>"
        for e in run.evaluations
        if e.scored
    ]
    return f"<h2>How {_text(run.name)} was scored</h2>{''.join(cards)}" if cards else ""


def _card_table(scored: Mapping[str, Scored]) -> str:
    """A column an extractor, a line a field; where points differ, each value that occurs."""
    by_extractor: dict[str, list[Card]] = {}
    for one in scored.values():
        by_extractor.setdefault(one.card["extractor"], []).append(one.card)
    fields = dict.fromkeys(field for cards in by_extractor.values() for field in cards[0])
    head = "".join(f"<th>{_text(name)}</th>" for name in by_extractor)
    line = lambda field: "".join(f"<td>{_values(c, field)}</td>" for c in by_extractor.values())
    told = [f for f in fields if any(_values(c, f) for c in by_extractor.values())]
    body = "".join(f"<tr><td>{_text(_label(f))}</td>{line(f)}</tr>" for f in told)
    return f'<table class="card"><tr><th></th>{head}</tr>{body}</table>'


def _values(cards: Sequence[Card], field: str) -> str:
    values = [card.get(field) for card in cards]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if len(numbers) == len(values):
        return ", ".join(f"{number:.10g}" for number in sorted(set(numbers)))
    return _text(", ".join(dict.fromkeys(map(_plain, values))))


def _plain(value: Any) -> str:
    """Without the marks of Python; of a hash the beginning, as the files hold it whole."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(v)}" for name, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(_plain, value))
    text = "" if value is None else str(value)
    return f"{text[:12]}…" if re.fullmatch("[0-9a-f]{40,}", text) else text


def _sweeps(runs: Sequence[Run], columns: Iterable[str]) -> list[tuple[Run, Evaluation]]:
    """The sweeps whose rows have all these columns."""
    every = [(run, evaluation) for run in runs for evaluation in run.evaluations]
    return [(r, e) for r, e in every if e.rows and all(c in e.rows[0] for c in columns)]


def _name(runs: Sequence[Run], run: Run, evaluation: Evaluation) -> str:
    return evaluation.name if len(runs) == 1 else f"{run.name} {evaluation.name}"


def _read_evaluation(path: pathlib.Path) -> Evaluation:
    folder = path.parent
    with path.open() as file:
        rows = list(csv.DictReader(file))
    scored = sweep.read_scored(folder / sweep.SCORED)
    scales = sorted({row["guidance"] for row in rows}, key=float)
    sheets = {f"{float(g):g}": folder / sheet_name(float(g)) for g in scales}
    return Evaluation(folder.name, rows, scored, {g: p for g, p in sheets.items() if p.exists()})


def _axis(column: str) -> str:
    return SCORES[column].axis or SCORES[column].label if column in SCORES else _label(column)


def _label(column: str) -> str:
    return SCORES[column].label if column in SCORES else column.replace("_", " ")


def _text(text: str) -> str:
    return html.escape(text)


if __name__ == "__main__":  # Flags of the command alone: other commands import the page.
    flags.DEFINE_string("out", None, "The page; default: report.html in the first run.")
    flags.DEFINE_bool("rcp", False, "Also MLPerf's reference runs, as a band.")
    cli.run(main)
