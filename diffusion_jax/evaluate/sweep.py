"""Scores over guidance scales: features in shards that survive a kill, the table, the curves.

A sweep draws the same prompts from the same noise at every point (a guidance scale, a checkpoint,
an average of its weights), and keeps the features of each batch of images as soon as it is drawn.
"""

import csv
import io
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Bool, Float, Int

from diffusion_jax.machine import files, progress
from diffusion_jax.metrics import cards
from diffusion_jax.metrics.cards import Card, Scored

TABLE, CARD, SCORED = "sweep.csv", "card.json", "scores"
Row = Mapping[str, Any]
Features = dict[str, Float[np.ndarray, "N D"]]
Compute = Callable[[Int[np.ndarray, "B"]], Features]
"""Draws the images of these numbers and returns what each extractor makes of them."""


class Score(NamedTuple):
    """How a column of the table is named in figures, and which way is better."""

    label: str
    lower_is_better: bool = False
    axis: str = ""
    """Scores of one axis share a figure; by default the label is that of the axis."""


_ALL_RIGHT = "share all right (digit, ink, paper)"
SCORES = {
    "fid": Score("FID", True),
    "fd_inception": Score("Fréchet distance (stand-in Inception)", True),
    "fd_digits": Score("Fréchet distance (digits, prompts seen)", True),
    "kid": Score("KID", True),
    "cmmd": Score("CMMD", True),
    "clip_score": Score("CLIP score"),
    "seen_prompt_accuracy": Score("all right, prompts seen", axis=_ALL_RIGHT),
    "heldout_prompt_accuracy": Score("all right, prompts never shown", axis=_ALL_RIGHT),
    "precision": Score("precision"),
    "recall": Score("recall"),
}


def claim(folder: pathlib.Path, made: Mapping[str, Card]) -> dict[str, Card]:
    """Makes `folder` that of a point's features, known by the card of each extractor.

    Returns the cards that it was begun with, which may name other versions of software. ValueError
    if it holds features of anything else: other weights, prompts, seeds or extractors.
    """
    path = folder / CARD
    now: dict[str, Card] = json.loads(json.dumps(made))
    before = json.loads(path.read_text()) if path.exists() else now
    different = [
        f"{field} of {name}: {a!r} there, {b!r} now"
        for name in sorted(before.keys() | now.keys())
        for field, (a, b) in cards.unlike(before.get(name, {}), now.get(name, {})).items()
    ]
    if different:
        raise ValueError(
            f"{folder} holds features of another sweep ({'; '.join(different)}): remove the folder"
        )
    if jax.process_index() == 0 and not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps(now, indent=1))
    return before


def collect(folder: pathlib.Path, num_images: int, batch_size: int, compute: Compute) -> Features:
    """The features of images 0 ... num_images - 1, of which those in `folder` are not redone.

    Each batch is a file, written whole; those of another batch size serve as well. Every process
    must call it alike, and see the same folder.
    """
    batches = _batches(_agree(_missing(folder, num_images)), batch_size)
    total = sum(map(len, batches))
    for rows in progress.reported(batches, total, "images", name=folder.name, size=len):
        features = compute(rows)
        if jax.process_index() == 0:
            buffer = io.BytesIO()
            np.savez(buffer, **features)  # pyright: ignore[reportArgumentType]
            name = f"images_{rows[0]:06}_{rows[-1]:06}.npz"
            files.write_whole(folder / name, buffer.getvalue())
    if jax.process_count() > 1:  # Process 0 has written the last one.
        multihost_utils.sync_global_devices(f"features {folder.name}")
    shards = [np.load(path, allow_pickle=False) for path in _shards(folder)]
    return {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0].files}


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
            table = [{"cfg": row["guidance"], head: row[column]} for row in rows]
            write_table(folder / name, table)


def write_scored(folder: pathlib.Path, name: str, scored: Mapping[str, Scored]) -> None:
    """A point's scores with their card, a file an extractor, for `metrics compare`."""
    folder.mkdir(exist_ok=True)
    for extractor, one in scored.items():
        content = json.dumps(one._asdict(), indent=1) + "\n"
        files.write_whole(folder / f"{name}_{extractor}.json", content)


def read_scored(folder: pathlib.Path) -> dict[str, Scored]:
    """What write_scored wrote, by the files' names."""
    paths = sorted(folder.glob("*.json"))
    return {path.stem: cards.read_scored(path) for path in paths}


def describe(row: Row) -> str:
    """A point in words: its guidance, then each score with its interval."""
    parts = [f"guidance {float(row['guidance']):g}"]
    for name, score in SCORES.items():
        if name in row:
            parts.append(f"{score.label} {float(row[name]):.4g}")
            if f"{name}_low" in row:
                low, high = float(row[f"{name}_low"]), float(row[f"{name}_high"])
                parts[-1] += f" ({low:.4g} to {high:.4g})"
    return "\n".join(parts)


def sheet_name(guidance: float) -> str:
    """The file of pictures drawn at this scale."""
    return f"guidance_{guidance:g}.png"


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    """In the order of their images, whatever the number of digits."""
    return sorted(folder.glob("images_*_*.npz"), key=_rows_of)


def _rows_of(path: pathlib.Path) -> tuple[int, int]:
    first, last = path.stem.split("_")[1:]
    return int(first), int(last)


def _missing(folder: pathlib.Path, num_images: int) -> Bool[np.ndarray, "N"]:
    """Which images no shard holds."""
    missing = np.ones(num_images, bool)
    for first, last in map(_rows_of, _shards(folder)):
        missing[first : last + 1] = False
    return missing


def _batches(missing: Bool[np.ndarray, "N"], batch_size: int) -> list[Int[np.ndarray, "B"]]:
    """Rows that are missing, in batches of such as follow one another."""
    rows = np.flatnonzero(missing)
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return [run[i : i + batch_size] for run in runs for i in range(0, len(run), batch_size)]


def _agree(mine: np.ndarray) -> np.ndarray:
    """What process 0 found, for every process."""
    return mine if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(mine)
