"""Compute statistics of many images in shards, for the command `metrics stats`.

With N images per shard, shard i consists of images i * N to (i + 1) * N - 1 of a source. Each shard
gives a partial result: a file with the sums of the features of its images. The partial results are
merged in the order of the shards, so the statistics are bit-identical, no matter which process
computes which shard. Only one shard is in memory at a time. If the features of each image are
saved, too, the merge holds all of them in memory.
"""

import functools
import hashlib
import io
import json
import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from diffusion_jax import files
from diffusion_jax.data import engines
from diffusion_jax.devices import sharding
from diffusion_jax.logs import progress
from diffusion_jax.metrics import cards, extractors, features, images, stats_files
from diffusion_jax.metrics.features import Gaussian

_SAMPLED = 16  # `digest` reads at most this many files.


class ImageSet:
    """A set of images, and the extractor that computes their features."""

    def __init__(self, path: str, extractor: extractors.Extractor, size: int, fit: str):
        """Open the images at `path`.

        `path` is a folder, one or several tars, or a data source "SOURCE:PATH::TEXT". `extractor`
        computes the features. Each image becomes a square with sides of `size` pixels. With
        fit="squash", it is resized and its aspect ratio changes. With fit="crop", its shorter side
        is resized to `size`, and then the centre is cut out. With size 0, `fit` must be "exact",
        and all images must have the same size.

        Raises:
            FileNotFoundError: the folder does not exist.
            ValueError: `size` and `fit` do not match, or no image is found or readable.
        """
        self.path, self.extractor = path, extractor
        self._files, self._fit = images.open_files(path), f"{fit} {size}" if size else None
        self.source = images.DecodedFiles(self._files, size, fit)
        self.run = functools.cache(self._run)
        """run(batch_size, keep) returns a function extract(source, rows, progress).

        That function computes features on the devices of this process (extractors.make_extract)."""

    def __len__(self) -> int:
        """Return the number of images, including unusable ones."""
        return len(self.source)

    def card(self, n: int, skipped: dict[str, int]) -> cards.Card:
        """Return the card for features of `n` images of this set.

        `skipped` maps reasons for skipping images to the numbers of skipped images.
        """
        shape = self.source.shape[:2]
        card = cards.make_card(self.extractor, image_size=shape, n=n, fit=self._fit)
        return card | {"images": self.path, "skipped": {**self._files.left_out(), **skipped}}

    def digest(self) -> str:
        """Return a hash of 16 hexadecimal digits that identifies the images.

        The hash covers the number of images, the names and sizes of the files if they are known,
        and the contents of up to 16 files.
        """
        digest = hashlib.blake2b(f"{len(self)} ".encode(), digest_size=8)
        for stamp in self._files.stamps():
            digest.update(stamp.encode(errors="surrogateescape"))
        for index in np.unique(np.linspace(0, len(self) - 1, _SAMPLED).astype(int)).tolist():
            digest.update(hashlib.sha256(self._files.read(index)[0]).digest())
        return digest.hexdigest()

    def _run(self, batch_size: int, keep: bool) -> Callable[..., extractors.Extracted]:
        mesh = sharding.make_mesh(1, -1, 1, jax.local_devices())
        return extractors.make_extract(self.extractor, mesh, batch_size=batch_size, keep=keep)


def open_images(
    path: str, extractor: Callable[[], extractors.Extractor], size: int = 0, fit: str = "exact"
) -> ImageSet:
    """Return the ImageSet at `path`, with the extractor that the function `extractor` loads.

    `size` and `fit` are those of `ImageSet`. Workers of Apache Beam call this function again, so
    that each of them loads the extractor itself.
    """
    opened = ImageSet(path, extractor(), size, fit)
    return engines.record_call(opened, open_images, path, extractor, size, fit)


class StatsOptions(NamedTuple):
    """Settings for the computation of statistics."""

    shard: int = 5000
    """Images per shard."""
    batch: int = 50
    """Images per batch."""
    keep: bool = False
    """Whether to save the features of each image, too."""


def take(opened: ImageSet, out: files.Path, work: StatsOptions, engine: engines.Engine) -> None:
    """Compute the statistics of the images `opened`, and write them to `out`.

    `engine` distributes the shards over workers. Partial results are stored in a temporary folder
    next to `out`. After an interruption, the same call computes only the missing shards. If several
    workers share the work and one of them has already written `out`, the others do nothing.

    Raises:
        ValueError: the images differ in size, or fewer than two of them are usable.
        OSError: a file cannot be read or written, or the engine failed.
    """
    shards = shards_of(opened, out, work)
    shared = isinstance(engine, engines.Worker) and engine.workers > 1
    done = lambda: shared and _is_of(out, shards.card(), work, opened.extractor)
    # Skip the remaining shards if another worker finishes first.
    write = (lambda shard: None if done() else shards.write(shard)) if shared else shards.write
    if done():
        return logging.info("%s already holds the statistics of these images", out)
    shards.folder.mkdir(parents=True, exist_ok=True)
    size = lambda shard: len(shards.rows(shard))
    try:
        engine.fill(shards.numbers, shards.path, write, noun="images", size=size)
        stats = shards.merged()
    except FileNotFoundError:  # Another worker has written `out` and removed the partial results.
        if done():
            files.remove_tree(shards.folder)
            return None
        raise
    stats_files.write(out, stats)
    files.remove_tree(shards.folder)


class Shards(NamedTuple):
    """The shards of a set of images, and the folder with the file of each finished shard."""

    images: ImageSet
    work: StatsOptions
    digest: str
    """A hash of the images (Images.digest)."""
    folder: pathlib.Path

    @property
    def numbers(self) -> range:
        """The shard indices, starting at 0."""
        return range(-(-len(self.images) // self.work.shard))

    def rows(self, shard: int) -> range:
        """Return the range of image indices in a shard."""
        first = shard * self.work.shard
        return range(first, min(first + self.work.shard, len(self.images)))

    def path(self, shard: int) -> pathlib.Path:
        """Return the path of a shard's file."""
        return self.folder / f"{shard:08}.npz"

    def card(self, n: int = 0, **skipped: int) -> cards.Card:
        """Return the card of statistics of `n` images.

        `skipped` maps reasons for skipping images to the numbers of skipped images.
        """
        return self.images.card(n, skipped) | {"digest": self.digest}

    def write(self, shard: int) -> None:
        """Compute the feature sums of a shard and write them to the shard's file.

        With work.keep, the file also holds the features.
        """
        run = self.images.run(self.work.batch, self.work.keep)
        rows = self.rows(shard)
        meter = progress.Meter("images", len(rows), name=f"shard {shard}")
        stream, skipped = run(self.images.source, rows, meter.reach)
        arrays: dict[str, Any] = stream.sums()._asdict()
        arrays["skipped"] = np.array(json.dumps(skipped))
        if self.work.keep:
            arrays["features"] = stream.features()
        np.savez(buffer := io.BytesIO(), **arrays)
        files.write_whole(self.path(shard), buffer.getvalue())

    def merged(self) -> stats_files.Stats:
        """Merge the files of all shards into the statistics of all images.

        Raises ValueError for fewer than two usable images.
        """
        sums, skipped, parts = features.no_sums(self.images.extractor.width), Counter[str](), []
        for shard in self.numbers:
            with np.load(io.BytesIO(self.path(shard).read_bytes())) as arrays:
                part = features.Sums(int(arrays["n"]), arrays["mean"], arrays["scatter"])
                sums = features.merged(sums, part)
                skipped.update(json.loads(str(arrays["skipped"])))
                parts += [arrays["features"]] if self.work.keep else []
        card = self.card(sums.n, **skipped)
        if card["skipped"]:
            details = len(self.images), self.images.path, card["skipped"]
            logging.warning("skipped some of the %d images in %s, by reason: %s", *details)
        rows = np.concatenate(parts) if self.work.keep else None
        gaussian, parts = sums.gaussian(), self.images.extractor.parts
        if not parts:
            return stats_files.Stats(gaussian, rows, card)
        width = parts["inception"]
        spatial = slice(width, width + parts["inception_spatial"])
        part = lambda index: Gaussian(gaussian.mean[index], gaussian.cov[index, index], gaussian.n)
        rows = None if rows is None else rows[:, :width]
        return stats_files.Stats(part(slice(width)), rows, card, part(spatial))


def shards_of(opened: ImageSet, out: files.Path, work: StatsOptions) -> Shards:
    """Return the shards of partial results from which the statistics file `out` is computed.

    The partial results are in a folder next to `out`. The folder's name contains a hash of the card
    and the settings, so results for another data set or other settings are never reused.
    """
    shards = Shards(opened, work, opened.digest(), files.path(out))
    settings = [shards.card(), work, opened.extractor.width]
    name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    return shards._replace(folder=shards.folder.with_name(f".{shards.folder.name}.{name}.tmp"))


def _is_of(out: files.Path, card: cards.Card, work: StatsOptions, extractor: extractors.Extractor) -> bool:
    """Return whether `out` holds statistics with this card, and all arrays that are needed.

    `work` and `extractor` determine which arrays are needed. The card's fields "n" and "skipped"
    are not compared.
    """
    if not files.path(out).is_file():
        return False
    stats = stats_files.read(out)
    if (work.keep and stats.features is None) or (extractor.parts and stats.spatial is None):
        return False
    saved = stats.card or {}
    return all(saved.get(name) == card[name] for name in card if name not in ("n", "skipped"))
