"""Encode the images of a data set as VAE moments (means and log variances of latents).

A folder of moments is a column (data/columns.py) of the distinct images: the contents of an .npy
file for each, keyed by a hash of the image. Beside it is a table of the pictures that have moments.
Their texts and numbers are those of the data set, and their places are those of the moments in the
column. So training opens the table alone, and needs the images no more.

The subfolder IMAGES is a column of the images' hashes, keyed by what is known without reading an
image: its place, and the stamp of its file. So an image is read again only if its file is written,
and encoded again only if its contents change.
"""

import contextvars
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float, Int, Shaped, UInt8

from diffusion_jax.config import settings
from diffusion_jax.config.settings import Data
from diffusion_jax.data import captions, columns, engines, fingerprints, reading, sources, storage, table
from diffusion_jax.data.aspect_buckets import Buckets
from diffusion_jax.data.columns import ITEM, Computed, Filled, Identity
from diffusion_jax.data.engines import ALONE, Engine
from diffusion_jax.data.inventory import PICTURES, LeftOut
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.data.reading import Place
from diffusion_jax.data.sources import moments
from diffusion_jax.data.table import Row
from diffusion_jax.devices import programs
from diffusion_jax.files.safetensors_files import offset_of
from diffusion_jax.files.sorted_tables import KEY_SIZE
from diffusion_jax.logs import progress

IMAGES = "images"
_SOURCE = ("source", "path", "text", "uncaptioned", "prior", "fields", "max_broken")
"""Fields of the data group with which training opens the images, to see whether they changed."""
_CHUNK = 256  # Records whose texts are read together.
_READ = 4096  # Images whose hashes are stored together.
EncodeImages = Callable[[UInt8[np.ndarray, "B H W 3"]], Float[np.ndarray, "B h w _"]]


class MomentOptions(NamedTuple):
    """Options of an encoding run.

    `shard` is the number of images per chunk of the column, and `batch` is the number of images per
    batch. With `dry_run`, nothing is written. With `verify`, damaged chunks are found by their
    checksums and encoded again.
    """

    shard: int
    batch: int
    engine: Engine = ALONE
    dry_run: bool = False
    verify: bool = False
    buckets: Buckets | None = None
    """The aspect-ratio bucket of each image; None encodes squares."""


def run(source: Pictures, encode: EncodeImages, out: pathlib.Path, identity: Identity, work: MomentOptions) -> int:
    """Encode the images that `out` lacks, and return how many pictures have moments afterwards.

    Several workers may do this at the same time.

    Args:
        source: The images, as sources.open_pictures opened them.
        encode: A function that maps a batch of images to VAE moments.
        out: The folder of the moments.
        identity: JSON values that describe the encoder and its input.
        work: Options of the run.

    Raises:
        ValueError: `out` has another identity, or moments are not finite.
    """
    data = source.data or Data("")
    moments.check_version(out)
    # With Beam, the parts of `stage` are pickled.
    stage = _Stage(source, encode, work.batch, work.buckets)
    if work.dry_run:
        print(f"would encode at most {len(source):,} images into {out}")
        with programs.rehearsal():
            stage.compute(np.array([(b"", index) for index in range(min(work.batch, len(source)))], ITEM))
        return 0
    columns.start(out, {**identity, **{name: getattr(data, name) for name in moments.SETTINGS}}, moments.KIND)
    items = _items(source, out, work)
    how = columns.Work(_same, stage.compute, work.shard, "images", work.engine, work.verify)
    filled = columns.fill(out, items, how)
    facts = {"data": {name: getattr(data, name) for name in _SOURCE}, "digests": fingerprints.digests(source)}
    left = LeftOut()
    rows = _rows(source, out, items, filled, left)
    table.write(out, rows, left, rule=moments.rule(data), facts=facts)
    if lost := left.counts["without_moments"]:
        first = left.first["without_moments"][0]
        logging.warning("no moments of %s, which cannot be used, such as %s", progress.counted(lost, "image"), first)
    return left.counts[PICTURES]


def check_originals(path: str | os.PathLike[str]) -> None:
    """Log a warning if the images that moments were encoded from have changed since.

    Nothing is checked if the images cannot be reached from here. An edited image of the same size
    is not noticed.
    """
    facts = table.Table(path, os.fspath(path)).card["facts"]
    try:
        data = settings.read(Data, facts["data"], "data")
        # Outside of a run's context, in which a table of images that grew is opened as it was.
        source = contextvars.Context().run(sources.open_pictures, data, size=64)
    except OSError:
        return
    except ValueError as error:
        logging.warning("the images of the moments in %s cannot be read any more: %s", path, error)
        return
    digests = fingerprints.digests(source)
    if changed := [name for name, value in digests.items() if facts["digests"].get(name) != value]:
        logging.warning(
            "the images of the moments in %s have changed (%s): encode the changes with the same "
            "sd_jax.precache command",
            path,
            ", ".join(changed),
        )


def _items(source: Pictures, out: pathlib.Path, work: MomentOptions) -> Shaped[np.ndarray, "N"]:
    """Return the hash and the index of each image that has a usable text, of the type ITEM."""
    stamp = functools.lru_cache(_CHUNK)(lambda path: storage.stamps([path])[0])
    parts, has_files = [np.zeros(0, ITEM)], False
    for indices, rows in _listed(source):
        keys = [_key(row, stamp) for row in rows]
        parts.append(np.array(list(zip(keys, indices.tolist(), strict=True)), ITEM))
        has_files |= any(isinstance(row.image, Place) for row in rows)
    items, path = np.concatenate(parts), out / IMAGES
    if has_files:
        columns.start(path, {}, moments.KIND)
        how = columns.Work(
            functools.partial(_hashes, source), _hashed, _READ, "images", work.engine, work.verify, "reading"
        )
        chunks = columns.fill(path, items, how).chunks
        items["key"] = columns.joined(chunks, "hash")[columns.places_of(items["key"], chunks)]
    return items


def _listed(source: Pictures) -> Iterator[tuple[Int[np.ndarray, "N"], list[Row]]]:
    """Yield (indices, rows) of the pictures with usable texts, some at a time."""
    for first in range(0, len(source), _CHUNK):
        indices, rows = source.rows(np.arange(first, min(first + _CHUNK, len(source))))
        for row in rows:
            if not all(isinstance(text, str) for text in captions.every(row.text)):
                raise ValueError(
                    f"the caption of {row.name} is {type(row.text).__name__}, not text: set "
                    "data.text to captions, such as txt"
                )
        yield indices, rows


def _key(row: Row, stamp: Callable[[str], str]) -> bytes:
    """Return the hash of an image or, if it is in a file, of its place and the file's stamp."""
    if not isinstance(row.image, Place):
        return _hash(row.image)
    file, *place = row.image
    return _hash(f"{row.key} {place} {stamp(file)}".encode())


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_SIZE).digest()


def _hashes(source: Pictures, items: np.ndarray) -> np.ndarray:
    """Read images in files, and return their hashes [N, 16]."""
    hashes = []
    for first in range(0, len(items), _CHUNK):
        _, rows = source.rows(items["number"][first : first + _CHUNK])
        contents = reading.read([[row.image] for row in rows if isinstance(row.image, Place)])
        hashes += [_hash(image if isinstance(image, bytes) else str(image).encode()) for (image,) in contents]
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, KEY_SIZE)


def _hashed(hashes: np.ndarray) -> Computed:
    return Computed(np.ones(len(hashes), np.int64), {"hash": hashes})


def _same(items: np.ndarray) -> np.ndarray:
    return items


class _Stage(NamedTuple):
    """Computes a chunk of moments."""

    source: Pictures
    encode: EncodeImages
    batch: int
    buckets: Buckets | None

    def compute(self, items: np.ndarray) -> Computed:
        """Return the contents of an .npy file for each item. An unusable image has none.

        The next batch is read while a batch is encoded.
        """
        buckets, encoded = self.buckets, dict[int, bytes]()
        views = [self.source.cropped_to(shape) for shape in buckets.shapes] if buckets else [self.source]
        read = lambda part: views[buckets.bucket[part[0]] if buckets else 0].usable(part)[:2]
        for _, (indices, images) in engines.ahead(read, self._parts(items["number"])):
            if not len(indices):
                continue
            # Repeat images to fill the batch, so that all batches have one size.
            arrays = self.encode(images[np.arange(self.batch) % len(indices)])[: len(indices)]
            finite = np.isfinite(arrays).all((1, 2, 3))
            if not finite.all():
                raise ValueError(
                    f"the latents of {self.source.names(indices[~finite][:1])[0]} are not finite: "
                    "check vae.weights, and try vae.dtype=float32"
                )
            encoded |= zip(indices.tolist(), map(moments.write, arrays), strict=True)
        contents = [encoded.get(index, b"") for index in items["number"].tolist()]
        values = np.frombuffer(b"".join(contents), np.uint8)
        return Computed(np.array(list(map(len, contents))), {"npy": values})

    def _parts(self, rows: Int[np.ndarray, "N"]) -> Iterator[Int[np.ndarray, "B"]]:
        """Yield the indices of the images in each batch, which all have one shape."""
        groups = [rows]
        if self.buckets:
            bucket = self.buckets.bucket[rows]
            groups = [rows[bucket == number] for number in np.unique(bucket)]
        for group in groups:
            for first in range(0, len(group), self.batch):
                yield group[first : first + self.batch]


def _rows(source: Pictures, out: pathlib.Path, items: np.ndarray, filled: Filled, left: LeftOut) -> Iterator[Row]:
    """Yield the rows of the pictures that have moments, and count them in `left`.

    Raises ValueError if there are none.
    """
    spans = [np.zeros((0, 3), np.int64)]
    for number, (name, chunk) in enumerate(zip(filled.names, filled.chunks, strict=True)):
        first = offset_of(out / name, "npy") + chunk["first"]
        spans.append(np.stack([np.full(len(first) - 1, number), first[:-1], np.diff(first)], axis=1))
    places = np.concatenate(spans)[columns.places_of(items["key"], filled.chunks)].tolist()
    listed = (row for _, rows in _listed(source) for row in rows)
    for row, (file, begin, length) in zip(listed, places, strict=True):
        if length:
            left.add(PICTURES, (), 1)
            image = Place(filled.names[int(file)], begin, length, reading.BYTES)
            yield row._replace(image=image, mask=None)
        else:
            left.add("without_moments", [row.name])
    if not left.counts[PICTURES]:
        reasons = source.skipped() or "as an earlier run found"
        raise ValueError(f"no image can be encoded ({reasons}): check the files that are named in the log")
