"""Encode images as tars of VAE moments (means and log variances of latents), shard by shard.

With N images per shard, shard i holds the usable records among records i * N to (i + 1) * N - 1 of
the source. So several workers can write shards in any order, and a killed command can continue.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float, UInt8

from diffusion_jax import engines
from diffusion_jax.data import captions, records, tars
from diffusion_jax.data.aspect_buckets import Buckets
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.data.sources import moments
from diffusion_jax.engines import ALONE, Engine
from diffusion_jax.machine import checksums, claims, files, programs

Encode = Callable[[UInt8[np.ndarray, "B H W 3"]], Float[np.ndarray, "B h w _"]]


class Work(NamedTuple):
    """Options of an encoding run.

    `shard` is the number of images per shard, and `batch` is the number of images per batch. With
    `dry_run`, nothing is written, and the number of missing shards is printed. With `verify`,
    damaged shards are found by their checksums and encoded again.
    """

    shard: int
    batch: int
    engine: Engine = ALONE
    dry_run: bool = False
    verify: bool = False
    buckets: Buckets | None = None
    """The aspect-ratio bucket of each image; None encodes squares."""


def run(
    source: Pictures, encode: Encode, out: pathlib.Path, identity: Mapping[str, Any], work: Work
) -> int:
    """Encode the shards that are missing in `out`, and return how many shards exist afterwards.

    Other workers may write shards at the same time.

    Args:
        source: The images.
        encode: A function that maps a batch of images to VAE moments.
        out: The folder of the tars.
        identity: JSON values that describe the encoder and its input. They are saved in `out`, and
            compared when the command runs again.
        work: Options of the run.

    Raises:
        ValueError: `out` was started with another identity, other data or another shard size.
    """
    total = -(-len(source) // work.shard)
    manifest = {**identity, "records": len(source), "shard": work.shard, "finished": False}
    claims.claim(out / moments.MANIFEST, manifest, free=("finished",), write=not work.dry_run)
    path = functools.partial(_path, out)
    damaged = list(checksums.damaged(out)) if work.verify else []
    for name, difference in damaged:
        logging.warning(
            "%s is damaged (%s): it is encoded again, except with --dry_run", out / name, difference
        )
        if not work.dry_run:
            (out / name).unlink(missing_ok=True)
    if work.dry_run:
        finished = _count(out, total, [name for name, _ in damaged])
        with programs.rehearsal():
            next(_encoded(source, encode, range(min(work.batch, len(source))), work), None)
        print(
            f"would encode {total - finished} of {total} shards of {work.shard} images into {out}"
        )
        return finished
    write = functools.partial(_write, source, encode, out, work)
    work.engine.fill(range(total), path, write)
    if (finished := _count(out, total)) == total:
        files.remove_unfinished(map(path, range(total)))
        files.write_whole(out / moments.MANIFEST, json.dumps(manifest | {"finished": True}))
        if work.verify or not (out / checksums.FOLDER).exists():
            checksums.write(out)
            checksums.read_back(out)
    return finished


def _path(out: pathlib.Path, shard: int) -> pathlib.Path:
    return out / f"{shard:06}.tar"


def _count(out: pathlib.Path, total: int, damaged: Collection[str] = ()) -> int:
    present = files.present(_path(out, shard) for shard in range(total))
    return sum(path.name not in damaged for path in present)


def _write(source: Pictures, encode: Encode, out: pathlib.Path, work: Work, shard: int) -> None:
    rows = range(shard * work.shard, min((shard + 1) * work.shard, len(source)))
    path = _path(out, shard)
    try:
        tars.write(path, _encoded(source, encode, rows, work))
    except FileNotFoundError:
        # Another worker wrote the last missing shard, and removed the temporary file of this one.
        if not path.exists():
            raise


def _parts(rows: range, work: Work) -> Iterator[np.ndarray]:
    """Yield the record indices of each batch of a shard. The shard holds the records `rows`.

    The images of a batch all have one shape.
    """
    groups = [np.arange(rows.start, rows.stop)]
    if work.buckets:
        bucket = work.buckets.bucket[rows.start : rows.stop]
        groups = [rows.start + np.flatnonzero(bucket == number) for number in np.unique(bucket)]
    for group in groups:
        for first in range(0, len(group), work.batch):
            yield group[first : first + work.batch]


def _encoded(
    source: Pictures, encode: Encode, rows: range, work: Work
) -> Iterator[dict[str, bytes]]:
    """Yield the files of each usable record among `rows`, keyed by suffix, for tars.write.

    The files hold the record's moments and caption. The next batch is read while a batch is
    encoded.
    """
    buckets, batch = work.buckets, work.batch
    views = [source.cropped_to(shape) for shape in buckets.shapes] if buckets else [source]
    read = lambda part: views[buckets.bucket[part[0]] if buckets else 0].usable(part)
    for _, (indices, images, texts) in engines.ahead(read, _parts(rows, work)):
        if not len(indices):
            continue
        # Repeat images to fill the batch, so that all batches have one size.
        encoded = encode(images[np.arange(batch) % len(indices)])
        for index, array, text in zip(
            indices.tolist(), encoded[: len(indices)], texts, strict=True
        ):
            if not all(isinstance(each, str) for each in captions.every(text)):
                raise ValueError(
                    f"the caption of record {index} is {type(text).__name__}, not text: "
                    "set data.text to captions, such as txt"
                )
            key = f"{index:09}".encode()
            yield {tars.KEY: key, "npy": moments.write(array), **records.write_text(text)}
