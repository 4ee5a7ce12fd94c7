"""Read and write the files of a sweep: tables, scores with their cards, and event files.

A sweep draws the same prompts from the same noise for every combination of guidance, checkpoint,
average (EMA) and sampler settings.
"""

import contextlib
import csv
import hashlib
import io
import itertools
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from diffusion_jax import files, runs
from diffusion_jax.files import remote, untrusted
from diffusion_jax.logs import events, run_log
from diffusion_jax.metrics import cards, table
from diffusion_jax.metrics.cards import Scored

TABLE, SCORED, CURVE = "sweep.csv", "scores", "curve.png"
SHARE = "features_share_of_time"
REAL = "real.png"
"""File name of the contact sheet of real pictures for the sweep's prompts.

For a prompt without a real picture, the sheet shows a picture with another caption.
"""
ScoreRow = Mapping[str, Any]
_ENDS = ("_low", "_high")
_NUMBERS = ("guidance", "checkpoint")
_ALWAYS = (*_NUMBERS, "ema")
_MAX_LETTERS = 60  # Largest number of characters of a setting's value in a file name.


class SweepResult(NamedTuple):
    """A sweep read from its folder: the rows of its table, and all scores with their cards."""

    folder: pathlib.Path
    rows: list[dict[str, str]]
    scored: dict[str, Scored]
    """Scores, keyed by file name without suffix, which holds point, guidance and reference."""
    damage: str = ""
    """The message about a damaged file, because of which there are no rows and scores."""


def read(folder: pathlib.Path) -> SweepResult:
    """Read a finished or unfinished sweep from its folder.

    Raises ValueError, which names the file, if the table or a file of scores is damaged.
    """
    path = folder / TABLE
    try:
        rows = list(csv.DictReader(io.StringIO(untrusted.read_text(path), newline="")))
    except csv.Error as error:
        raise ValueError(f"{path} is damaged ({error}): correct or remove this file") from error
    for number, row in enumerate(rows, 2):
        if problem := _problem(row):
            raise ValueError(f"{path}, line {number}: {problem}: correct or remove this file")
    return SweepResult(folder, rows, read_scored(folder / SCORED))


def _problem(row: Mapping[str | None, str | None]) -> str:
    """Return why a row is not one of a sweep's table, or ""."""
    if missing := [name for name in _ALWAYS if name not in row]:
        return f"the table has no column {missing[0]}"
    if None in row or None in row.values():
        return "it has another number of cells than the first line"
    is_number = lambda name: name in _NUMBERS or (name == SHARE and row[name])
    is_score = lambda name: re.sub("_(low|high)$", "", name) in table.shown()
    for name, cell in row.items():
        assert name is not None and cell is not None
        try:
            number = float(cell) if is_number(name) or (is_score(name) and cell) else 0.0
        except ValueError:
            return f"{name} is {cell!r}, not a number"
        if name in _NUMBERS and not math.isfinite(number):
            return f"{name} is {cell}"
        if name == "checkpoint" and not re.fullmatch(r"\d{1,18}", cell):
            return f"{name} is {cell}, not a step"
    return ""


def read_all(workdir: str | pathlib.Path) -> list[SweepResult]:
    """Read all sweeps of a workdir, sorted by the names of their folders. Ignore symbolic links.

    A damaged sweep is returned without rows and with a message.
    """
    root = files.path(workdir)
    tables = sorted((root / runs.EVALUATION).glob(f"*/{TABLE}"))
    return [_sound(path.parent) for path in tables if untrusted.is_plain(path, root)]


def _sound(folder: pathlib.Path) -> SweepResult:
    try:
        return read(folder)
    except (ValueError, OSError) as error:
        return SweepResult(folder, [], {}, str(error))


def sheet_of(one: SweepResult, row: ScoreRow) -> pathlib.Path | None:
    """Return the path of the contact sheet of a row, or None if there is no sheet.

    Earlier versions saved only one sheet per guidance, which each point overwrote. Such a sheet
    belongs to the last row with this guidance.
    """
    same_name = lambda other: sheet_name(other) == sheet_name(row)
    last = [other for other in one.rows if same_name(other)][-1:] == [row]
    names = [sheet_name(row, several=True), *([sheet_name(row)] if last else [])]
    paths = (one.folder / name for name in names)
    return next((path for path in paths if untrusted.is_plain(path, one.folder)), None)


def point_name(row: ScoreRow) -> str:
    """Return a name for the files of a row's point: its model, checkpoint, average and settings."""
    parts = [row.get("model"), f"step_{int(row['checkpoint']):08}_{row['ema']}", row.get("later")]
    named = [_file_name(part) for part in parts if part]
    return "_".join([*named, *(_file_name(axis_label(a), _distinct(row[a])) for a in axes(row))])


def label(row: ScoreRow) -> str:
    """Return a label for the point of a row, such as "step 3000, ema, steps 20".

    The label consists of the model, the checkpoint, the average and the settings.
    """
    parts = [row.get("model"), f"step {row['checkpoint']}", row["ema"]]
    parts += [f"then {row['later']}"] if row.get("later") else []
    parts += [f"{axis_label(axis)} {row[axis]}" for axis in axes(row)]
    return ", ".join(filter(None, parts))


def axes(row: ScoreRow) -> list[str]:
    """Return the names of a row's columns with sampler settings, such as "sampler.steps"."""
    return [column for column in row if "." in column]


def axis_label(axis: str) -> str:
    """Return the label of a column of sampler settings.

    The label of "sampler.name" is "sampler". The label of another column is the field's name with
    spaces instead of underscores: "steps" for "sampler.steps".
    """
    group, _, name = axis.partition(".")
    return group if name == "name" else name.replace("_", " ")


def write_table(path: pathlib.Path, rows: Sequence[ScoreRow]) -> None:
    """Write rows to a CSV file. Its columns are in the order in which they first occur in a row."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_whole(path, buffer.getvalue())


def write_scores(folder: pathlib.Path, rows: Sequence[ScoreRow]) -> None:
    """Write fid_scores.csv and clip_scores.csv in NeMo's format, if the sweep has these scores."""
    names = {"fid": ("fid_scores.csv", "fid"), "clip_score": ("clip_scores.csv", "clip_score")}
    for column, (name, head) in names.items():
        if column in rows[0]:
            write_table(folder / name, [{"cfg": r["guidance"], head: r[column]} for r in rows])


def write_metrics(
    folder: pathlib.Path, rows: Sequence[ScoreRow], pictures: Sequence[UInt8[np.ndarray, "H W 3"]]
) -> None:
    """Write a sweep's scores to metrics.jsonl and to TensorBoard event files.

    TensorBoard shows each point as a run, and each score as a curve over guidance. The steps of
    scores and contact sheets are 100 x guidance. The event files also contain curve.png. `pictures`
    holds the contact sheet of each row.
    """
    lines = []
    for row in rows:
        numbers = {f"evaluation/{k}": v for k, v in row.items() if isinstance(v, float)}
        lines.append(run_log.metrics_line(row["checkpoint"], {"guidance": row["guidance"], **numbers}))
    files.write_whole(folder / run_log.METRICS, "".join(lines))
    top = folder / events.FOLDER
    files.remove_tree(top)  # It may hold an earlier sweep of the same name.
    with contextlib.closing(remote.Mirror(top)) as mirror:
        curve = np.asarray(Image.open(io.BytesIO((folder / CURVE).read_bytes())).convert("RGB"))
        with events.writing(mirror.local) as writer:
            writer.write_images(rows[-1]["checkpoint"], {"curve": curve})
        run = lambda point: point_name(point[0])
        for name, points in itertools.groupby(zip(rows, pictures, strict=True), run):
            with events.writing(mirror.local / name) as writer:
                for row, sheet in points:
                    step = round(100 * row["guidance"])
                    scores = {f"guidance_x100/{k}": v for k, v in row.items() if _is_score(k, v)}
                    writer.write_scalars(step, scores)
                    writer.write_images(step, {"guidance_x100/pictures": sheet})


def _is_score(column: str, value: Any) -> bool:
    """Return whether a column holds a score, as opposed to an interval's end or another number."""
    others = ("guidance", SHARE)
    return isinstance(value, float) and column not in others and not column.endswith(_ENDS)


def write_scored(folder: pathlib.Path, name: str, scored: Mapping[str, Scored]) -> None:
    """Write scores and their cards as JSON files that `metrics compare` reads.

    `scored` is keyed by reference, such as inception, whose file is NAME_inception.json for `name`
    NAME.
    """
    folder.mkdir(exist_ok=True)
    for extractor, scores in scored.items():
        content = json.dumps(scores._asdict(), indent=1) + "\n"
        files.write_whole(folder / f"{name}_{extractor}.json", content)


def read_scored(folder: pathlib.Path) -> dict[str, Scored]:
    """Return the scores that write_scored wrote, keyed by file name without suffix."""
    paths = sorted(folder.glob("*.json"))
    plain = (path for path in paths if untrusted.is_plain(path, folder.parent))
    return {path.stem: cards.read_scored(path) for path in plain}


def describe(row: ScoreRow) -> str:
    """Return a text with one line for a row's guidance and one for each score and its interval."""
    parts = [f"guidance {float(row['guidance']):g}"]
    for name, metric in table.shown().items():
        if name in row:
            factor, unit = (100, " %") if metric.is_share else (1, "")
            shown = lambda key, factor=factor: f"{factor * float(row[key]):.4g}"
            parts.append(f"{metric.label} {shown(name)}{unit}")
            if f"{name}_low" in row:
                parts[-1] += f" ({shown(f'{name}_low')} to {shown(f'{name}_high')}{unit})"
    return "\n".join(parts)


def sheet_name(row: ScoreRow, several: bool = False) -> str:
    """Return the file name of a row's contact sheet.

    `several` says whether the sweep has several points. If it is True, the file name begins with
    the name of the point. If it is False, the file name begins with the name of the model, or lacks
    this part if the row names no model. The file name ends with the guidance.
    """
    model = point_name(row) if several else _file_name(row.get("model") or "")
    return f"{model}_guidance_{float(row['guidance']):g}.png".removeprefix("_")


def _file_name(*texts: str) -> str:
    return re.sub(r"[^\w.-]+", "_", "_".join(texts))


def _distinct(value: str) -> str:
    """Return a short string for a value in a file name. Different values give different strings."""
    if len(value) <= _MAX_LETTERS and re.fullmatch(r"[\w.,+()=-]*", value):
        return value
    return f"{value[:_MAX_LETTERS]}-{hashlib.blake2b(value.encode(), digest_size=4).hexdigest()}"
