"""Statistics of many images, from shard to shard: the work of the command `metrics stats`.

Shard i holds the images i * N to (i + 1) * N - 1 of a source. Its file has the sums of their
features, and those of all shards are merged in the shards' order, whoever wrote which and when: so
that every digit is the same. Nobody holds more than a shard, unless the features are kept.
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

from diffusion_jax import engines
from diffusion_jax.machine import files, progress, sharding
from diffusion_jax.metrics import cards, extractors, features, images, stats_files

_LOOKED_AT = 16  # Files by which a set of images is known again.


class Images(engines.Portable):
    """Images, and the extractor of their features."""

    def __init__(self, path: str, extractor: extractors.Extractor, size: int, fit: str):
        """`path` is that of images.open_files, `size` and `fit` are those of images.Decoded."""
        self.path, self.extractor = path, extractor
        self._files, self._fit = images.open_files(path), f"{fit} {size}" if size else None
        self.source = images.Decoded(self._files, size, fit)
        self.run = functools.cache(self._run)
        """run(batch_size, keep) is extractors.make_extract on the devices of this process."""

    def __len__(self) -> int:
        """The number of images, unusable ones among them."""
        return len(self.source)

    def card(self, n: int, skipped: dict[str, int]) -> cards.Card:
        """The card of features of `n` of the images; `skipped` are without, by reason."""
        shape = self.source.shape[:2]
        card = cards.make_card(self.extractor, image_size=shape, n=n, fit=self._fit)
        return card | {"images": self.path, "skipped": {**self._files.left_out(), **skipped}}

    def digest(self) -> str:
        """A hash of how many files there are, of their sizes in a folder, and of some of them."""
        digest = hashlib.blake2b(f"{len(self)} ".encode(), digest_size=8)
        for stamp in self._files.stamps():
            digest.update(stamp.encode(errors="surrogateescape"))
        for index in np.unique(np.linspace(0, len(self) - 1, _LOOKED_AT).astype(int)).tolist():
            digest.update(hashlib.sha256(self._files.read(index)[0]).digest())
        return digest.hexdigest()

    def _run(self, batch_size: int, keep: bool) -> Callable[..., extractors.Extracted]:
        mesh = sharding.make_mesh(1, -1, 1, jax.local_devices())
        return extractors.make_extract(self.extractor, mesh, batch_size=batch_size, keep=keep)


def open_images(
    path: str, extractor: Callable[[], extractors.Extractor], size: int = 0, fit: str = "exact"
) -> Images:
    """`Images`, with what extractor() gives; for an engine's workers that can be pickled."""
    made = Images(path, extractor(), size, fit)
    return engines.made_by(made, open_images, path, extractor, size, fit)


class Work(NamedTuple):
    """Sizes of the work; the flags of `stats` say what each field means."""

    shard: int = 5000
    batch: int = 50
    keep: bool = False


def take(opened: Images, out: files.Path, work: Work, engine: engines.Engine) -> None:
    """Writes the file of statistics `out`; shards lie beside it meanwhile.

    Of several workers those that come when it is done leave it alone. ValueError for images of
    which there cannot be any, OSError where the engine cannot go on.
    """
    shards = shards_of(opened, out, work)
    shared = isinstance(engine, engines.Share) and engine.workers > 1
    done = lambda: shared and _is_of(out, shards.card(), work.keep)
    # Who is overtaken has nothing more to do.
    write = (lambda shard: None if done() else shards.write(shard)) if shared else shards.write
    if done():
        return logging.info("%s is of these images already", out)
    shards.folder.mkdir(parents=True, exist_ok=True)
    size = lambda shard: len(shards.rows(shard))
    try:
        engine.fill(shards.numbers, shards.path, write, noun="images", size=size)
        stats = shards.merged()
    except FileNotFoundError:  # Who writes the statistics first removes the shards.
        if done():
            files.remove_tree(shards.folder)
            return None
        raise
    stats_files.write(out, stats)
    files.remove_tree(shards.folder)


class Shards(NamedTuple):
    """The shards of some images, a file each."""

    images: Images
    work: Work
    digest: str
    folder: pathlib.Path

    @property
    def numbers(self) -> range:
        """The shards."""
        return range(-(-len(self.images) // self.work.shard))

    def rows(self, shard: int) -> range:
        """The images of a shard."""
        first = shard * self.work.shard
        return range(first, min(first + self.work.shard, len(self.images)))

    def path(self, shard: int) -> pathlib.Path:
        """The file of a shard."""
        return self.folder / f"{shard:08}.npz"

    def card(self, n: int = 0, **skipped: int) -> cards.Card:
        """The card of statistics of `n` images, without those `skipped` by reason."""
        return self.images.card(n, skipped) | {"digest": self.digest}

    def write(self, shard: int) -> None:
        """Makes the file of a shard."""
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
        """The statistics of all; ValueError if they are of fewer than two images."""
        sums, skipped, kept = features.no_sums(self.images.extractor.width), Counter[str](), []
        for shard in self.numbers:
            with np.load(io.BytesIO(self.path(shard).read_bytes())) as arrays:
                part = features.Sums(int(arrays["n"]), arrays["mean"], arrays["scatter"])
                sums = features.merged(sums, part)
                skipped.update(json.loads(str(arrays["skipped"])))
                kept += [arrays["features"]] if self.work.keep else []
        card = self.card(sums.n, **skipped)
        if card["skipped"]:
            all_of = len(self.images), self.images.path, card["skipped"]
            logging.warning("of %d images in %s were left out: %s", *all_of)
        rows = np.concatenate(kept) if self.work.keep else None
        return stats_files.Stats(sums.gaussian(), rows, card)


def shards_of(opened: Images, out: files.Path, work: Work) -> Shards:
    """The shards beside the file `out`, of this work and software alone."""
    new = Shards(opened, work, opened.digest(), files.path(out))
    name = hashlib.sha256(json.dumps([new.card(), work]).encode()).hexdigest()[:16]
    return new._replace(folder=new.folder.with_name(f".{new.folder.name}.{name}.tmp"))


def _is_of(out: files.Path, card: cards.Card, keep: bool) -> bool:
    """Whether there are statistics of the same images, made in the same way; `keep`: features."""
    if not files.path(out).is_file():
        return False
    stats = stats_files.read(out)
    if keep and stats.features is None:
        return False
    there = stats.card or {}
    return all(there.get(name) == card[name] for name in card if name not in ("n", "skipped"))
