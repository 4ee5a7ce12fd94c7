"""Make the figure of a sweep. Its axes show two scores, or a score over guidance."""

import itertools
from collections.abc import Sequence

from diffusion_jax.evaluate import sweep
from diffusion_jax.evaluate.figures import Line, Plot
from diffusion_jax.evaluate.sweep import ScoreRow, SweepResult
from diffusion_jax.metrics import table


def figure(result: SweepResult) -> Plot:
    """Return the figure of a sweep.

    If the sweep has a distance (lower is better) and a score that is not a distance, the figure
    shows the first distance over the first such score, in the order of METRICS. Otherwise, it shows
    the first score over guidance. Scores with the same Metric.axis are shown together.
    """
    shown = {c: metric for c, metric in table.shown().items() if c in result.rows[0]}
    distances = [column for column, metric in shown.items() if metric.lower_is_better]
    axes: dict[str, list[str]] = {}
    for column, metric in shown.items():
        axes.setdefault(metric.axis or metric.label, []).append(column)
    others = [name for name in axes if not shown[axes[name][0]].lower_is_better]
    if distances and others:
        x, y, xs, ys = others[0], shown[distances[0]].label, axes[others[0]], distances[:1]
    else:
        (y, ys), x, xs = next(iter(axes.items())), "guidance", ["guidance"]
    several = xs if len(xs) > 1 else ys
    lines = []
    for x_column, y_column in itertools.product(xs, ys):
        for name, rows in _lines(result).items():
            column = x_column if several is xs else y_column
            parts = [name, shown[column].label if len(several) > 1 else ""]
            title = ", ".join(filter(None, parts)) or result.folder.name
            lines.append(_line(title, rows, x_column, y_column))
    return Plot(lines, x, y)


def _lines(result: SweepResult) -> dict[str, list[dict[str, str]]]:
    """Group the table's rows by model, weights and settings, and sort each group by guidance.

    Return {name of the group: rows}. A name consists of the parts of sweep.label that not all
    groups share, or of all parts if these short names are empty or not unique.
    """
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in sorted(result.rows, key=lambda row: float(row["guidance"])):
        groups.setdefault(tuple(sweep.label(row).split(", ")), []).append(row)
    shared = set.intersection(*map(set, groups))
    short = [", ".join(part for part in parts if part not in shared) for parts in groups]
    if len(set(short)) < len(groups) or not (all(short) or len(short) == 1):
        short = [", ".join(parts) for parts in groups]
    return dict(zip(short, groups.values(), strict=True))


def _line(name: str, rows: Sequence[ScoreRow], x: str, y: str) -> Line:
    column = lambda key: [float(row[key]) for row in rows]
    labels = [] if x == "guidance" else [f"{float(row['guidance']):g}" for row in rows]
    ends = [column(f"{y}_{end}") if f"{y}_{end}" in rows[0] else () for end in ("low", "high")]
    return Line(name, column(x), column(y), True, labels, *ends)
