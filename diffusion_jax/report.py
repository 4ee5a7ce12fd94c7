"""One page of a run, or of several over one another: scores, pictures, cards, training.

    python -m diffusion_jax.report runs/quickstart [runs/other ...] --out=report.html

The page is one file that needs no network: figures are SVG (points say their values under the
mouse), pictures stand inside it. It reads what training and evaluation wrote into the workdirs.
"""

import base64
import csv
import html
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags, logging
from matplotlib.figure import Figure

from diffusion_jax import cli, figures, files, log
from diffusion_jax.figures import Band, Line
from diffusion_jax.sweep import CARD, EVALUATION, SCORES, TABLE, Row, describe, sheet_name

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
"""


class Evaluation(NamedTuple):
    """One sweep: its rows, what they have in common, and a sheet of pictures by guidance scale."""

    name: str
    rows: list[dict[str, str]]
    card: dict[str, Any]
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
        bands = [read_rcp(flags.FLAGS.rcp)] if flags.FLAGS.rcp else []
    out = pathlib.Path(flags.FLAGS.out or pathlib.Path(argv[1]) / "report.html")
    files.write_whole(out, page(runs, bands))
    logging.info("wrote %s", out)


def read_run(workdir: str | pathlib.Path) -> Run:
    """A run's metrics and sweeps; FileNotFoundError if it has neither."""
    workdir = pathlib.Path(workdir)
    metrics = workdir / log.METRICS
    found = sorted((workdir / EVALUATION).glob(f"*/{TABLE}"))
    if not metrics.exists() and not found:
        raise FileNotFoundError(
            f"{workdir} holds neither {log.METRICS} nor {EVALUATION}/*/{TABLE}: it is no workdir"
        )
    training = log.read_metrics(metrics) if metrics.exists() else []
    return Run(workdir.name, training, [_read_evaluation(path) for path in found])


def read_rcp(path: str | pathlib.Path) -> Band:
    """MLPerf's convergence points, [CLIP, lowest FID, highest FID] in bins of the CLIP score."""
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
    x, y = _main_axes(run.evaluations[0].rows[0])
    return figures.plot(trade_off([run], x, y), _label(x), _label(y))


def _main_axes(row: Row) -> tuple[str, str]:
    here = [name for name in SCORES if name in row]
    distances = [name for name in here if SCORES[name].lower_is_better]
    others = [name for name in here if not SCORES[name].lower_is_better]
    if distances and others:
        return others[0], distances[0]
    return "guidance", here[0]


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
    evaluations = [e for run in runs for e in run.evaluations]
    if not evaluations:
        return "<p>No evaluation yet.</p>"
    names = [s for s in SCORES if any(s in e.rows[0] for e in evaluations)]
    distances = [s for s in names if SCORES[s].lower_is_better]
    others = [s for s in names if not SCORES[s].lower_is_better]
    drawn = [(trade_off(runs, x, y), x, y) for y in distances[:1] for x in others[:2]]
    drawn += [(trade_off(runs, "guidance", y), "guidance", y) for y in names]
    shown = [_figure(lines, x, y, bands if "fid" in y and "clip" in x else ()) for lines, x, y in
             drawn if lines]  # fmt: skip
    tables = [_table(_name(runs, run, e), e.rows) for run, e in _sweeps(runs, ("guidance",))]
    return f'<h2>Scores</h2><div class="figures">{"".join(shown)}</div>{"".join(tables)}'


def _figure(lines: Sequence[Line], x: str, y: str, bands: Sequence[Band] = ()) -> str:
    figure = figures.plot(lines, _label(x), _label(y), bands)
    return f"<figure>{figures.to_svg(figure, lines)}</figure>"


def _table(name: str, rows: Sequence[Row]) -> str:
    columns = ["guidance", *(c for c in rows[0] if c in SCORES)]
    head = "".join(f"<th>{_text(_label(c))}</th>" for c in columns)
    cells = lambda row: "".join(f"<td>{_cell(row, c)}</td>" for c in columns)
    body = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
    return f'<h3>{_text(name)}</h3><div class="wide"><table><tr>{head}</tr>{body}</table></div>'


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
        lines = [_training_line(run, key) for run in runs if any(key in r for r in run.training)]
        if lines:
            figure = figures.plot(lines, "step", name)
            shown.append(f"<figure>{figures.to_svg(figure, [])}</figure>")
    return f'<h2>Training</h2><div class="figures">{"".join(shown)}</div>' if shown else ""


def _training_line(run: Run, key: str) -> Line:
    rows = [row for row in run.training if key in row]
    return Line(run.name, [row["step"] for row in rows], [row[key] for row in rows])


def _cards(run: Run) -> str:
    cards = [
        f"<details><summary>{_text(e.name)}</summary><table>{_card_rows(e.card)}</table></details>"
        for e in run.evaluations
    ]
    return f"<h2>How {_text(run.name)} was scored</h2>{''.join(cards)}" if cards else ""


def _card_rows(card: Mapping[str, Any]) -> str:
    rows = [f"<tr><td>{_text(k)}</td><td>{_text(str(v))}</td></tr>" for k, v in card.items()]
    return "".join(rows)


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
    card = json.loads((folder / CARD).read_text()) if (folder / CARD).exists() else {}
    scales = sorted({row["guidance"] for row in rows}, key=float)
    sheets = {f"{float(g):g}": folder / sheet_name(float(g)) for g in scales}
    return Evaluation(folder.name, rows, card, {g: p for g, p in sheets.items() if p.exists()})


def _label(column: str) -> str:
    return SCORES[column].label if column in SCORES else column.replace("_", " ")


def _text(text: str) -> str:
    return html.escape(text)


if __name__ == "__main__":  # Flags of the command alone: other commands import the page.
    flags.DEFINE_string("out", None, "The page; default: report.html in the first run.")
    flags.DEFINE_string("rcp", None, "MLPerf's reference points (mlperf_rcp.csv), as a band.")
    cli.run(main)
