"""Pictures to tars of moments, shard by shard: the work of a system's command precache.

Shard i holds records i * N to (i + 1) * N - 1 of the source, without those that cannot be used, so
that shards may be written in any order, by several workers, and again after a kill.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float, UInt8

from diffusion_jax import engines
from diffusion_jax.data import tars
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.data.sources import moments
from diffusion_jax.engines import ALONE, Engine
from diffusion_jax.machine import checksums, claims, files, programs

Encode = Callable[[UInt8[np.ndarray, "B H W 3"]], Float[np.ndarray, "B h w _"]]


class Work(NamedTuple):
    """Sizes and shares of the work; the flags of precache say what each field means."""

    shard: int
    batch: int
    engine: Engine = ALONE
    dry_run: bool = False
    verify: bool = False


def run(
    source: Pictures, encode: Encode, out: pathlib.Path, identity: Mapping[str, Any], work: Work
) -> int:
    """Encodes what `out` lacks; returns how many shards are there now, all unless workers share.

    `identity` says by what moments are made. ValueError if `out` was begun with another one, other
    data or shards of another size.
    """
    total = -(-len(source) // work.shard)
    manifest = {**identity, "records": len(source), "shard": work.shard, "finished": False}
    claims.claim(out / moments.MANIFEST, manifest, free=("finished",), write=not work.dry_run)
    path = functools.partial(_path, out)
    for name, found in checksums.damaged(out) if work.verify else ():
        logging.warning("%s is damaged (%s): encoding it again", out / name, found)
        (out / name).unlink(missing_ok=True)
    if work.dry_run:
        there = _there(out, total)
        with programs.rehearsal():
            next(_encoded(source, encode, range(min(work.batch, len(source))), work.batch), None)
        print(f"would encode {total - there} of {total} shards of {work.shard} images into {out}")
        return there
    write = functools.partial(_write, source, encode, out, work.shard, work.batch)
    work.engine.fill(range(total), path, write)
    if (there := _there(out, total)) == total:
        files.write_whole(out / moments.MANIFEST, json.dumps(manifest | {"finished": True}))
        if work.verify or not (out / checksums.FOLDER).exists():
            checksums.write(out)
            checksums.read_back(out)
    return there


def _path(out: pathlib.Path, shard: int) -> pathlib.Path:
    return out / f"{shard:06}.tar"


def _there(out: pathlib.Path, total: int) -> int:
    return len(files.present(_path(out, shard) for shard in range(total)))


def _write(
    source: Pictures, encode: Encode, out: pathlib.Path, size: int, batch: int, shard: int
) -> None:
    rows = range(shard * size, min((shard + 1) * size, len(source)))
    tars.write(_path(out, shard), _encoded(source, encode, rows, batch))


def _encoded(
    source: Pictures, encode: Encode, rows: range, batch: int
) -> Iterator[dict[str, bytes]]:
    """The files of each record that can be used; the next batch is read while one is encoded."""
    parts = (np.arange(i, min(i + batch, rows.stop)) for i in range(rows.start, rows.stop, batch))
    for _, (kept, images, texts) in engines.ahead(source.usable, parts):
        if not len(kept):
            continue
        encoded = encode(images[np.arange(batch) % len(kept)])  # All batches have one size.
        for index, array, text in zip(kept.tolist(), encoded[: len(kept)], texts, strict=True):
            if not isinstance(text, str):
                raise ValueError(f"record {index} has no caption but {type(text).__name__}")
            key = f"{index:09}".encode()
            yield {tars.KEY: key, "npy": moments.write(array), "txt": text.encode()}
