"""Draw figures of scores with matplotlib and save them as PNG, PDF or SVG."""

import colorsys
import io
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_COLOURS = ("#2f6fb0", "#d1603d", "#3d8f63", "#8a5fa8", "#b08a2e", "#5f7480", "#b3476f", "#2b8c8c")
_DASHES = ("-", "--", ":", "-.")
_WIDE = 76  # Number of characters that fit into a figure's width.
_GREY = "#e3e8ec"
_SHORT = 34  # Two names of at most this many characters fit on one row of the legend.
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "figures",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
}


class Line(NamedTuple):
    """A line of a figure. It connects the points (x, y) in the given order."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    marked: bool = False
    """Whether to draw a dot at each point of the line."""
    labels: Sequence[str] = ()
    """One text per point, which is written next to the point. By default, there are no texts."""
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """`low` and `high` hold the ends of the confidence interval of each point's y, if known."""


class Band(NamedTuple):
    """A shaded region between the lines (x, low) and (x, high)."""

    name: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


class Plot(NamedTuple):
    """The content of a figure: lines and bands. `x` and `y` are the labels of the axes."""

    lines: Sequence[Line]
    x: str
    y: str
    bands: Sequence[Band] = ()


def save(plot: Plot, format: str) -> bytes:
    """Draw a figure and return the bytes of a file in the format "png", "pdf" or "svg".

    Equal plots give equal bytes.
    """
    import matplotlib  # Takes a second to import, and few commands draw figures.
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with matplotlib.rc_context(_STYLE):
        names = [_wrapped(item.name) for item in (*plot.bands, *plot.lines)]
        colours = _distinct(len(plot.lines))
        columns = 2 if max(map(len, names)) <= _SHORT else 1
        rows = -(-sum(1 + name.count("\n") for name in names) // columns)
        legend = 0.17 * max(0, rows - 2)  # Two rows fit into the default height.
        figure = Figure(figsize=(5.2, 3.6 + legend), layout="constrained")
        axes = figure.add_subplot()
        for band in plot.bands:
            axes.fill_between(band.x, band.low, band.high, color=_GREY, label=_wrapped(band.name), lw=0)
        for i, line in enumerate(plot.lines):
            _draw(axes, line, colours[i], i)
        axes.margins(0.08)
        axes.autoscale_view()  # The labels' positions depend on the final scale.
        for i, line in enumerate(plot.lines):
            _label(axes, line, colours[i])
        axes.set_xlabel(plot.x)
        axes.set_ylabel(plot.y)
        if len(names) > 1:
            # Outside the axes, the legend hides no points.
            figure.legend(loc="outside upper center", ncols=columns, frameon=False)
        figure.savefig(buffer, format=format, dpi=160, metadata=dates.get(format))
    return buffer.getvalue()


def _wrapped(name: str) -> str:
    return textwrap.fill(name, _WIDE)


def _distinct(number: int) -> list[str]:
    """Return `number` colours (#RRGGBB): first a fixed palette, then evenly spaced hues."""
    extra = range(number - len(_COLOURS))
    shades = [colorsys.hls_to_rgb(i / len(extra), (0.3, 0.45, 0.6)[i % 3], 0.65) for i in extra]
    hexes = ["#" + "".join(f"{round(255 * part):02x}" for part in shade) for shade in shades]
    return [*_COLOURS, *hexes][:number]


def _draw(axes: Any, line: Line, colour: str, number: int) -> None:
    dashes = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    axes.plot(line.x, line.y, color=colour, lw=1.6, ls=dashes, label=_wrapped(line.name))
    if line.low:
        axes.vlines(line.x, line.low, line.high, color=colour, lw=0.9, alpha=0.35)
    if line.marked:
        axes.plot(line.x, line.y, "o", color=colour, ms=5, mec="white")


def _label(axes: Any, line: Line, colour: str) -> None:
    """Write each point's label on the side that faces away from its neighbours on the line."""
    points = axes.transData.transform(np.column_stack([line.x, line.y]))
    for n, label in enumerate(line.labels):
        steps = points[n] - np.delete(points[max(0, n - 1) : n + 2], min(n, 1), axis=0)
        steps /= np.maximum(np.hypot(*steps.T), 1e-9)[:, None]
        offset = steps.sum(0)
        if np.hypot(*offset) < 0.2:  # The line is straight, or points coincide.
            offset = np.array([-steps[0, 1], steps[0, 0]] if steps.any() else [0.0, 1.0])
        axes.annotate(
            label,
            (line.x[n], line.y[n]),
            xytext=tuple(10 * offset / np.hypot(*offset)),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=7.5,
            color=colour,
            bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.6},
        )
