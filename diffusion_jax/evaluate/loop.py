"""The one loop of all evaluation: prompts drawn in batches, features of each image, kept or not.

Sweeps and scores on the way of a training draw by `drawing`; MLPerf's benchmark, whose images stay
on the devices, brings its own. Features in a folder are shards, one a batch, and survive a kill.
"""

import io
import pathlib
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jaxtyping import Bool, Int, Shaped, UInt8
from PIL import Image

from diffusion_jax import cli
from diffusion_jax.draw.program import Images
from diffusion_jax.evaluate.scorers import Scorer
from diffusion_jax.machine import claims, files, progress, sheets
from diffusion_jax.metrics.cards import Card

CARD = "card.json"
KERNEL = "Pillow's bicubic"
Features = dict[str, Shaped[np.ndarray, "N *D"]]
Draw = Callable[[Sequence[str], Sequence[int], float], Images]
"""(prompts [B], seeds [B], guidance scale) to images [B, H, W, 3], all at once."""
Compute = Callable[[Int[np.ndarray, "B"]], Features]
"""Draws the images of these numbers and returns their features, of which "fine" [B] says whether
the image is finite."""


def collect(
    num_images: int,
    batch_size: int,
    compute: Compute,
    name: str,
    folder: pathlib.Path | None = None,
    *,
    finite: bool = False,
) -> Features:
    """The features of images 0 ... num_images - 1, at most `batch_size` at once.

    With a folder each batch is a file there, written whole; those that are there, also of another
    batch size, are not redone. Every process must call it alike, and see the same folder. Images
    that are not finite are marked in "fine"; where all must be `finite`, that is an error. That,
    and weights that make features of good images not finite, is one message and exit code 2.
    """
    missing = np.ones(num_images, bool) if folder is None else _missing(folder, num_images)
    batches, parts = _batches(missing, batch_size), []
    total = sum(map(len, batches))
    for rows in progress.reported(batches, total, "images", name=name, size=len):
        features = compute(rows)
        with cli.bad_input():
            _check(features, rows, name, finite)
        if finite:
            del features["fine"]
        if folder is None:
            parts.append(features)
        elif jax.process_index() == 0:
            _write_shard(folder, rows, features)
    if folder is not None:
        if jax.process_count() > 1:  # Process 0 has written the last one.
            multihost_utils.sync_global_devices(f"features {name}")
        parts = [_read_shard(path) for path in _shards(folder)]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def drawing(
    scorer: Scorer,
    draw: Draw,
    guidance: float,
    batch_size: int,
    *,
    first_seed: int = 0,
    size: int | None = None,
    save: Callable[[Int[np.ndarray, "B"], UInt8[np.ndarray, "B H W 3"]], None] | None = None,
) -> Compute:
    """Draws the scorer's prompts at a guidance scale and takes the pictures through its judges.

    Pictures of another side than `size` are brought to it first, by KERNEL.
    Beside their features are "images", those that people see, "seconds" of drawing and scoring.
    """
    shown = np.isin(np.arange(len(scorer.prompts)), scorer.shown)

    def compute(rows: Int[np.ndarray, "B"]) -> Features:
        numbers, count = filled(rows, batch_size), len(rows)
        prompts, start = [scorer.prompts[i] for i in numbers], time.time()
        drawn = draw(prompts, (numbers + first_seed).tolist(), guidance)
        images = _resized(sheets.to_uint8(np.nan_to_num(drawn)), size)
        half = time.time()
        features = {k: v[:count] for k, v in scorer.features(images, prompts).items()}
        seconds = np.array([[half - start, time.time() - half]])
        if save is not None:
            save(rows, images[:count])
        fine = np.asarray(np.isfinite(drawn[:count]).all((1, 2, 3)))
        visible = images[:count][shown[rows]]
        return {**features, "images": visible, "seconds": seconds, "fine": fine}

    return compute


def _resized(
    images: UInt8[np.ndarray, "B H W 3"], size: int | None
) -> UInt8[np.ndarray, "B h w 3"]:
    if size is None or images.shape[1:3] == (size, size):
        return images
    kernel = Image.Resampling.BICUBIC
    return np.stack([np.asarray(Image.fromarray(i).resize((size, size), kernel)) for i in images])


def filled(rows: Int[np.ndarray, "B"], batch_size: int) -> Int[np.ndarray, "{batch_size}"]:
    """The rows, repeated to fill a batch: one program does for all batches."""
    return rows[np.arange(batch_size) % len(rows)]


def claim(folder: pathlib.Path, cards_now: Mapping[str, Card]) -> dict[str, Card]:
    """Makes `folder` that of a point's features, known by the card of each extractor.

    Returns the cards that it was begun with, which may name other versions of software. ValueError
    if it holds features of anything else: other weights, prompts, seeds or extractors.
    """
    versions = tuple(f"{name}.versions." for name in cards_now)
    return claims.claim(folder / CARD, cards_now, free=versions, write=jax.process_index() == 0)


def _check(features: Features, rows: np.ndarray, name: str, finite: bool) -> None:
    bad = np.flatnonzero(~features["fine"])
    if bad.size and finite:
        raise ValueError(
            f"{bad.size} of {len(rows)} images of {name} are not finite, first of prompt "
            f"{rows[bad[0]]}: the model or its sampler diverges, and no score is written"
        )
    for key, values in features.items() if not bad.size else ():
        if not np.isfinite(values).all():
            raise ValueError(f"features of {key} are not finite: its weights are damaged")


def _write_shard(folder: pathlib.Path, rows: np.ndarray, features: Features) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **features)  # pyright: ignore[reportArgumentType]
    files.write_whole(folder / f"images_{rows[0]:06}_{rows[-1]:06}.npz", buffer.getvalue())


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of features in the order of their images, whatever the number of digits."""
    return sorted(folder.glob("images_*_*.npz"), key=_ends)


def _read_shard(path: pathlib.Path) -> Features:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as features:
        return dict(features)


def _is_whole(path: pathlib.Path) -> bool:
    damaged = (OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile,
               zlib.error)  # fmt: skip
    try:
        return all(array is not None for array in _read_shard(path).values())
    except damaged:
        return False


def _ends(path: pathlib.Path) -> tuple[int, int]:
    """The first and the last image of a shard."""
    first, last = path.stem.split("_")[1:]
    return int(first), int(last)


def _missing(folder: pathlib.Path, num_images: int) -> Bool[np.ndarray, "N"]:
    """A mask of the images that no shard holds, as process 0 sees it, for every process.

    Process 0 removes shards that are damaged: each array has a CRC-32.
    """
    missing = np.ones(num_images, bool)
    for path in _shards(folder) if jax.process_index() == 0 else ():
        first, last = _ends(path)
        if _is_whole(path):
            missing[first : last + 1] = False
        else:
            logging.warning("%s is damaged: its images are drawn again", path)
            path.unlink()
    return missing if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(missing)


def _batches(missing: Bool[np.ndarray, "N"], batch_size: int) -> list[Int[np.ndarray, "B"]]:
    """The missing rows, in batches of consecutive ones."""
    rows = np.flatnonzero(missing)
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return [run[i : i + batch_size] for run in runs for i in range(0, len(run), batch_size)]
