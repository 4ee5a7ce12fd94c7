"""Scores over guidance scales: the table and the curve."""

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence

from diffusion_jax import files

Row = Mapping[str, float | int | str]


def write_table(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """A CSV file with the keys of the first row as its header."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_whole(path, buffer.getvalue())


def write_curve(path: pathlib.Path, rows: Sequence[Row], x: str, lines: Sequence[str]) -> None:
    """A PNG of the columns `lines` over the column `x`, each point marked."""
    # The object interface: pyplot would look for a display and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    for name in lines:
        points = sorted((float(row[x]), float(row[name])) for row in rows)
        axes.plot(*zip(*points, strict=True), marker="o", label=name.replace("_", " "))
    axes.set_xlabel(x.replace("_", " "))
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    files.write_whole(path, buffer.getvalue())
