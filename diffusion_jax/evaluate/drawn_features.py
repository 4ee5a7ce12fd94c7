"""Draw images in batches and compute their features, for all evaluations.

`collect` runs over the batches, and calls a function that draws a batch. For sweeps and for
evaluation during training, `drawing` makes this function. MLPerf's benchmark has a function of its
own, which keeps the images on the devices. Features can be saved in a folder, one shard file per
batch. An interrupted evaluation then continues where it stopped.
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

from diffusion_jax import cli, files
from diffusion_jax.draw.program import Images
from diffusion_jax.evaluate.scorers import Scorer
from diffusion_jax.files import settings_record, sheets, untrusted
from diffusion_jax.logs import progress
from diffusion_jax.metrics.cards import Card

CARD = "card.json"
KERNEL = "Pillow's bicubic"
FeaturesByKind = dict[str, Shaped[np.ndarray, "N *D"]]
DrawPrompts = Callable[[Sequence[str], Sequence[int], float], Images]
"""Maps (prompts [B], seeds [B], guidance) to images [B, H, W, 3] in about [-1, 1]."""
Compute = Callable[[Int[np.ndarray, "B"]], FeaturesByKind]
"""Draws the images with the given indices and returns their features.

The entry "fine" [B] is True for images whose pixels are all finite."""


def collect(
    num_images: int,
    batch_size: int,
    compute: Compute,
    name: str,
    folder: pathlib.Path | None = None,
    *,
    finite: bool = False,
) -> FeaturesByKind:
    """Draw images 0 ... num_images - 1 and return their features.

    All processes must call this function with the same arguments, and must share the folder. If all
    images of a batch are finite but a feature is not, the process prints a message and exits with
    code 2. It also does so if the saved features do not cover each image exactly once, because
    shards have disappeared meanwhile.

    Args:
        num_images: number of images.
        batch_size: largest number of images per batch.
        compute: draws a batch of images and computes their features.
        name: name of the evaluation in messages.
        folder: folder in which the features of each batch are saved. Images whose features are
            already saved are not drawn again, even if the batch size has changed. With None,
            nothing is saved.
        finite: if True, an image with a pixel that is not finite also ends the process with code 2,
            and the result has no entry "fine". If False, such an image is only marked by False in
            the entry "fine".
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
        if jax.process_count() > 1:  # Wait until process 0 has written the last shard.
            multihost_utils.sync_global_devices(f"features {name}")
        shards = _disjoint(_shards(folder), num_images)
        with cli.bad_input():
            if (covered := _covered(shards, num_images).sum()) < num_images:
                raise ValueError(
                    f"{folder} holds the features of {covered} of {num_images} images, although "
                    "all were drawn: leave it alone during an evaluation, and run the command again"
                )
        parts = [_read_shard(path) for path in shards]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def drawing(
    scorer: Scorer,
    draw: DrawPrompts,
    guidance: float,
    batch_size: int,
    *,
    first_seed: int = 0,
    size: int | None = None,
    save: Callable[[Int[np.ndarray, "B"], UInt8[np.ndarray, "B H W 3"]], None] | None = None,
) -> Compute:
    """Return a function that draws images of a scorer's prompts and computes all features.

    The function's result has three additional entries. "images" holds the images of the batch that
    the contact sheet shows. "seconds" [1, 2] holds the seconds spent on drawing and on computing
    features. "fine" [B] is True for finite images.

    Args:
        scorer: the prompts and references.
        draw: maps (prompts, seeds, guidance) to images in about [-1, 1].
        guidance: the guidance scale.
        batch_size: number of images per batch; smaller batches are padded.
        first_seed: seed of image 0; image i has seed first_seed + i.
        size: side in pixels to which images are resized with KERNEL before scoring. None does not
            resize.
        save: function called with the indices and the pixels of the finite images of each batch.
    """
    shown = np.isin(np.arange(len(scorer.prompts)), scorer.shown)

    def compute(rows: Int[np.ndarray, "B"]) -> FeaturesByKind:
        numbers, count = filled(rows, batch_size), len(rows)
        prompts, start = [scorer.prompts[i] for i in numbers], time.time()
        samples = draw(prompts, [first_seed + n for n in numbers.tolist()], guidance)
        is_finite = np.asarray(np.isfinite(samples).all((1, 2, 3)))
        # An image that is not finite is only counted; its features are those of a grey image.
        samples = np.where(is_finite[:, None, None, None], samples, 0)
        images, is_finite = resized(sheets.to_uint8(samples), size), is_finite[:count]
        end_of_drawing = time.time()
        features = {k: v[:count] for k, v in scorer.features(images, prompts).items()}
        seconds = np.array([[end_of_drawing - start, time.time() - end_of_drawing]])
        if save is not None:
            save(rows[is_finite], images[:count][is_finite])
        on_sheet = images[:count][shown[rows]]
        return {**features, "images": on_sheet, "seconds": seconds, "fine": is_finite}

    return compute


def resized(images: UInt8[np.ndarray, "B H W 3"], size: int | None) -> UInt8[np.ndarray, "B h w 3"]:
    """Resize images to `size` x `size` pixels with KERNEL. None leaves them unchanged."""
    if size is None or images.shape[1:3] == (size, size):
        return images
    kernel = Image.Resampling.BICUBIC
    return np.stack([np.asarray(Image.fromarray(i).resize((size, size), kernel)) for i in images])


def filled(rows: Int[np.ndarray, "B"], batch_size: int) -> Int[np.ndarray, "{batch_size}"]:
    """Repeat `rows` up to the length `batch_size`, so that all batches use one compiled program."""
    return rows[np.arange(batch_size) % len(rows)]


def claim(folder: pathlib.Path, cards_now: Mapping[str, Card]) -> dict[str, Card]:
    """Reserve a folder for the features of one point of a sweep at one guidance scale.

    The first call writes `cards_now` to the folder. Later calls compare their `cards_now` with the
    cards in the folder.

    Args:
        folder: the folder.
        cards_now: the card of each reference, keyed by the reference's name.

    Returns:
        The cards in the folder. Only their software versions may differ from `cards_now`.

    Raises:
        ValueError: the folder holds features with other weights, prompts, seeds or extractors.
    """
    versions = tuple(f"{name}.versions." for name in cards_now)
    return settings_record.record(folder / CARD, cards_now, free=versions, write=jax.process_index() == 0)


def _check(features: FeaturesByKind, rows: np.ndarray, name: str, finite: bool) -> None:
    bad = np.flatnonzero(~features["fine"])
    if bad.size and finite:
        raise ValueError(
            f"{bad.size} of {len(rows)} images of {name} are not finite; the first one is for "
            f"prompt number {rows[bad[0]]} (from 0): the model or its sampler diverges, so no "
            "score is written"
        )
    for key, values in features.items() if not bad.size else ():
        if not np.isfinite(values).all():
            raise ValueError(
                f"the {key} features are not finite: the weights of the network that computes them are damaged"
            )


def _write_shard(folder: pathlib.Path, rows: np.ndarray, features: FeaturesByKind) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **features)  # pyright: ignore[reportArgumentType]
    files.write_whole(folder / f"images_{rows[0]:06}_{rows[-1]:06}.npz", buffer.getvalue())


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("images_*_*.npz"), key=_ends)


def _read_shard(path: pathlib.Path) -> FeaturesByKind:
    with path.open("rb") as file:
        return untrusted.read_archive(file)


def _is_whole(path: pathlib.Path) -> bool:
    errors = (OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)
    try:
        return all(array is not None for array in _read_shard(path).values())
    except errors:
        return False


def _ends(path: pathlib.Path) -> tuple[int, int]:
    first, last = path.stem.split("_")[1:]
    return int(first), int(last)


def _missing(folder: pathlib.Path, num_images: int) -> Bool[np.ndarray, "N"]:
    """Return a mask that is True for images without saved features.

    Process 0 computes the mask and sends it to all processes. Process 0 also deletes damaged
    shards, which it detects, for example, by their CRC-32.
    """
    whole = []
    for path in _shards(folder) if jax.process_index() == 0 else ():
        if _is_whole(path):
            whole.append(path)
        else:
            logging.warning("%s is damaged, so its images are drawn again", path)
            path.unlink()
    missing = ~_covered(_disjoint(whole, num_images), num_images)
    return missing if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(missing)


def _covered(shards: Sequence[pathlib.Path], num_images: int) -> Bool[np.ndarray, "N"]:
    """Return a mask that is True for the images in the given shards."""
    covered = np.zeros(num_images, bool)
    for first, last in map(_ends, shards):
        covered[first : last + 1] = True
    return covered


def _disjoint(shards: Sequence[pathlib.Path], num_images: int) -> list[pathlib.Path]:
    """Return those shards that cover most images without covering an image twice, in order.

    Shards overlap if two evaluations with different batch sizes wrote to one folder. This is
    weighted interval scheduling: best[n] holds the choice among the shards of images 0 to n - 1.
    """
    by_last = {}
    for path in shards:
        first, last = _ends(path)
        by_last.setdefault(last, []).append((first, path))
    best: list[tuple[int, list[pathlib.Path]]] = [(0, [])]
    for last in range(num_images):
        choices = [
            (best[first][0] + last + 1 - first, [*best[first][1], path]) for first, path in by_last.get(last, ())
        ]
        best.append(max([best[-1], *choices], key=lambda choice: choice[0]))
    return best[-1][1]


def _batches(missing: Bool[np.ndarray, "N"], batch_size: int) -> list[Int[np.ndarray, "B"]]:
    rows = np.flatnonzero(missing)
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return [run[i : i + batch_size] for run in runs for i in range(0, len(run), batch_size)]
