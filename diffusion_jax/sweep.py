"""Scores over guidance scales: features in shards that survive a kill, the table, the curves.

A sweep draws the same prompts from the same noise at every point (a guidance scale, a checkpoint,
an average of its weights), and keeps the features of each batch of images as soon as it is drawn.
"""

import csv
import io
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jaxtyping import Float, Int

from diffusion_jax import files
from diffusion_jax.log import clock

EVALUATION, TABLE, CARD = "evaluation", "sweep.csv", "card.json"
Row = Mapping[str, Any]
Features = dict[str, Float[np.ndarray, "N D"]]
Compute = Callable[[Int[np.ndarray, "B"]], Features]
"""Draws the images of these numbers and returns what each extractor makes of them."""


class Score(NamedTuple):
    """How a column of the table is named in figures, and which way is better."""

    label: str
    lower_is_better: bool = False


SCORES = {
    "fid": Score("FID", True),
    "fd_inception": Score("Fréchet distance (stand-in Inception)", True),
    "fd_digits": Score("Fréchet distance (digits)", True),
    "kid": Score("KID", True),
    "cmmd": Score("CMMD", True),
    "clip_score": Score("CLIP score"),
    "seen_prompt_accuracy": Score("all right, prompts seen"),
    "heldout_prompt_accuracy": Score("all right, prompts never shown"),
    "precision": Score("precision"),
    "recall": Score("recall"),
}


def collect(
    folder: pathlib.Path, card: Mapping[str, Any], num_images: int, batch_size: int,
    compute: Compute,
) -> Features:  # fmt: skip
    """The features of images 0 ... num_images - 1, of which those in `folder` are not redone.

    Each batch is a file, written whole. ValueError if `folder` holds features of another `card`:
    of other weights, prompts, seeds or extractors. Every process must call it alike.
    """
    _claim(folder, card)
    batches = [np.arange(i, min(i + batch_size, num_images))
               for i in range(0, num_images, batch_size)]  # fmt: skip
    paths = [folder / f"images_{rows[0]:06}_{rows[-1]:06}.npz" for rows in batches]
    there = _agree(np.array([path.exists() for path in paths]))
    left = [i for i, done in enumerate(there) if not done]
    for i in _with_progress(left, batches, folder.name):
        features = compute(batches[i])
        if jax.process_index() == 0:
            buffer = io.BytesIO()
            np.savez(buffer, **features)  # pyright: ignore[reportArgumentType]
            files.write_whole(paths[i], buffer.getvalue())
    if jax.process_count() > 1:  # Process 0 has written the last one.
        multihost_utils.sync_global_devices(f"features {folder.name}")
    shards = [np.load(path, allow_pickle=False) for path in paths]
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


def write_card(folder: pathlib.Path, card: Mapping[str, Any]) -> None:
    """What all rows of a table have in common, and what they are worth only together with."""
    files.write_whole(folder / CARD, json.dumps(card, indent=1))


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


def _claim(folder: pathlib.Path, card: Mapping[str, Any]) -> None:
    now = json.loads(json.dumps(card))
    path = folder / CARD
    before = json.loads(path.read_text()) if path.exists() else now
    differing = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    if differing:
        what = "; ".join(f"{k}: {before.get(k)!r} there, {now.get(k)!r} now" for k in differing)
        raise ValueError(f"{folder} holds features of another sweep ({what}): remove the folder")
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, json.dumps(now, indent=1))


def _agree(mine: np.ndarray) -> np.ndarray:
    """What process 0 found, for every process."""
    return mine if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(mine)


def _with_progress(left: Sequence[int], batches: Sequence[np.ndarray], name: str) -> Iterator[int]:
    total, done, start, last = sum(len(batches[i]) for i in left), 0, time.time(), 0.0
    for i in left:
        yield i
        done += len(batches[i])
        if time.time() - last > 5 or done == total:
            last = time.time()
            rate = done / (last - start)
            logging.info(
                "%s: %d/%d images | %.1f images/s | %s left",
                name, done, total, rate, clock((total - done) / rate),
            )  # fmt: skip
