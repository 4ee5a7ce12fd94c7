"""The curve of a sweep: which of its scores a figure shows, over which axis."""

import itertools
from collections.abc import Sequence

from diffusion_jax.evaluate import sweep
from diffusion_jax.evaluate.figures import Line, Plot
from diffusion_jax.evaluate.sweep import Row, SweepResult
from diffusion_jax.metrics import table


def figure(one: SweepResult) -> Plot:
    """The first distance over the other scores' first axis, or what there is over guidance."""
    shown = {c: metric for c, metric in table.shown().items() if c in one.rows[0]}
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
    for across, up in itertools.product(xs, ys):
        for name, rows in _lines(one).items():
            own = across if several is xs else up
            parts = [name, shown[own].label if len(several) > 1 else ""]
            title = ", ".join(filter(None, parts)) or one.folder.name
            lines.append(_line(title, rows, across, up))
    return Plot(lines, x, y)


def _lines(one: SweepResult) -> dict[str, list[dict[str, str]]]:
    """The rows of each weights and settings in the order of guidance, by what tells them apart."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in sorted(one.rows, key=lambda row: float(row["guidance"])):
        groups.setdefault(tuple(sweep.label(row).split(", ")), []).append(row)
    shared = set.intersection(*map(set, groups))
    short = [", ".join(part for part in parts if part not in shared) for parts in groups]
    if len(set(short)) < len(groups) or not (all(short) or len(short) == 1):
        short = [", ".join(parts) for parts in groups]
    return dict(zip(short, groups.values(), strict=True))


def _line(name: str, rows: Sequence[Row], x: str, y: str) -> Line:
    column = lambda key: [float(row[key]) for row in rows]
    labels = [] if x == "guidance" else [f"{float(row['guidance']):g}" for row in rows]
    ends = [column(f"{y}_{end}") if f"{y}_{end}" in rows[0] else () for end in ("low", "high")]
    return Line(name, column(x), column(y), True, labels, *ends)
