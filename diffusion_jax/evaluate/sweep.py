"""The files of a sweep: its table, NeMo's, each point's scores with their card.

A sweep draws the same prompts from the same noise at every point: a guidance scale, a checkpoint,
an average of its weights.
"""

import csv
import io
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_jax.machine import files
from diffusion_jax.metrics import cards, table
from diffusion_jax.metrics.cards import Scored

TABLE, SCORED = "sweep.csv", "scores"
Row = Mapping[str, Any]


def point_name(row: Row) -> str:
    """A point's weights, as a file's name: the model of several, its checkpoint and average."""
    parts = [row.get("model"), f"step_{int(row['checkpoint']):08}_{row['ema']}", row.get("later")]
    return "_".join(_file_name(part) for part in parts if part)


def label(row: Row) -> str:
    """The same in words."""
    parts = [row.get("model"), f"step {row['checkpoint']}", row["ema"]]
    return ", ".join([*filter(None, parts), *(f"then {row[k]}" for k in ["later"] if row.get(k))])


def write_table(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """A CSV file; its columns are those of all rows, in the order in which they first appear."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_whole(path, buffer.getvalue())


def write_scores(folder: pathlib.Path, rows: Sequence[Row]) -> None:
    """NeMo's fid_scores.csv and clip_scores.csv, for those of the two scores that there are."""
    names = {"fid": ("fid_scores.csv", "fid"), "clip_score": ("clip_scores.csv", "clip_score")}
    for column, (name, head) in names.items():
        if column in rows[0]:
            write_table(folder / name, [{"cfg": r["guidance"], head: r[column]} for r in rows])


def write_scored(folder: pathlib.Path, name: str, scored: Mapping[str, Scored]) -> None:
    """A point's scores with their card, a file an extractor, for `metrics compare`."""
    folder.mkdir(exist_ok=True)
    for extractor, one in scored.items():
        content = json.dumps(one._asdict(), indent=1) + "\n"
        files.write_whole(folder / f"{name}_{extractor}.json", content)


def read_scored(folder: pathlib.Path) -> dict[str, Scored]:
    """The scores that write_scored wrote, by the names of their files."""
    paths = sorted(folder.glob("*.json"))
    return {path.stem: cards.read_scored(path) for path in paths}


def describe(row: Row) -> str:
    """A point in words: its guidance, then each score with its interval."""
    parts = [f"guidance {float(row['guidance']):g}"]
    for name, metric in table.shown().items():
        if name in row:
            parts.append(f"{metric.label} {float(row[name]):.4g}")
            if f"{name}_low" in row:
                low, high = float(row[f"{name}_low"]), float(row[f"{name}_high"])
                parts[-1] += f" ({low:.4g} to {high:.4g})"
    return "\n".join(parts)


def sheet_name(row: Row) -> str:
    """The file of pictures drawn at a row's scale, by its model if there are several."""
    model = f"{_file_name(row['model'])}_" if row.get("model") else ""
    return f"{model}guidance_{float(row['guidance']):g}.png"


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)
