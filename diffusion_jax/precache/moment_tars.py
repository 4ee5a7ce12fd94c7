"""Encode images as tars of VAE moments (means and log variances of latents), shard by shard.

With N images per shard, shard i holds the usable records among records i * N to (i + 1) * N - 1 of
the source. So several workers can write shards in any order, and a killed command can continue.

For each shard, a list in the subfolder LISTS holds the name and the checksum of every record that
it was encoded from. If the files of the source have changed when the command runs again, the lists
show which records differ, and their shards are encoded again.
"""

import functools
import json
import math
import os
import pathlib
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float, UInt8

from diffusion_jax import files
from diffusion_jax.config import settings
from diffusion_jax.config.settings import Data
from diffusion_jax.data import captions, engines, fingerprints, records, sources, tars
from diffusion_jax.data.aspect_buckets import Buckets
from diffusion_jax.data.engines import ALONE, Engine
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.data.sources import moments
from diffusion_jax.devices import programs
from diffusion_jax.files import checksums, settings_record

LISTS = "encoded"
"""The subfolder of the lists. The list of the shard 000000.tar is 000000.json, which holds (name,
checksum) of each record, in order."""
_FIELDS = ("source", "path", "text", "uncaptioned", "prior", "resize", "min_size", "max_aspect", "min_chars")
"""Fields of the data group that determine what is encoded, apart from the crop."""
_PLACE = ("data.source", "data.path")
_CHUNK = 256  # Records that are compared together.
_SECONDS = 15.0  # After this time, `check_originals` reads no further records.
EncodeImages = Callable[[UInt8[np.ndarray, "B H W 3"]], Float[np.ndarray, "B h w _"]]


class MomentOptions(NamedTuple):
    """Options of an encoding run.

    `shard` is the number of images per shard, and `batch` is the number of images per batch. With
    `dry_run`, nothing is written, and the number of missing shards is printed. With `verify`,
    damaged shards are found by their checksums and encoded again. With `overwrite`, a folder that
    was started with other settings or other data is emptied first.
    """

    shard: int
    batch: int
    engine: Engine = ALONE
    dry_run: bool = False
    verify: bool = False
    buckets: Buckets | None = None
    """The aspect-ratio bucket of each image; None encodes squares."""
    overwrite: bool = False


def run(
    source: Pictures, encode: EncodeImages, out: pathlib.Path, identity: Mapping[str, Any], work: MomentOptions
) -> int:
    """Encode the shards that are missing in `out`, and return how many shards exist afterwards.

    Shards of records that have changed since they were encoded are encoded again. Other workers may
    write shards at the same time.

    Args:
        source: The images.
        encode: A function that maps a batch of images to VAE moments.
        out: The folder of the tars.
        identity: JSON values that describe the encoder and its input. They are saved in `out`, and
            compared when the command runs again.
        work: Options of the run.

    Raises:
        ValueError: `out` was started with another identity, other data or another shard size, or
            moments are not finite.
    """
    total = -(-len(source) // work.shard)
    manifest, stale = _claimed(source, out, identity, work)
    path = functools.partial(_path, out)
    damaged = list(checksums.damaged(out)) if work.verify else []
    for name, difference in damaged:
        logging.warning("%s is damaged (%s): it is encoded again, except with --dry_run", out / name, difference)
        if not work.dry_run:
            (out / name).unlink(missing_ok=True)
    if work.dry_run:
        again = [*(name for name, _ in damaged), *(path(shard).name for shard in stale)]
        finished = _count(out, total, again)
        with programs.rehearsal():
            next(_encoded(source, encode, range(min(work.batch, len(source))), work, {}), None)
        print(f"would encode {total - finished} of {total} shards of {work.shard} images into {out}")
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


def check_originals(path: str | os.PathLike[str]) -> None:
    """Log a warning if the images that moments were encoded from have changed since.

    Nothing is checked if the images cannot be reached from here. If their files were written or
    copied since, records of evenly spread shards are read for at most _SECONDS seconds.
    """
    stored, folder = moments.find_manifest(path) or {}, files.path(path)
    if not stored.get("data") or not folder.is_dir():
        return
    try:
        data = settings.read(Data, stored["data"], "data")
        source = sources.open_pictures(data, stored["image_size"])
    except OSError:
        return
    except ValueError as error:
        logging.warning("the images of the moments in %s cannot be read any more: %s", path, error)
        return
    if fingerprints.stamp(source) == stored["files"]:
        return
    _, names = _changed(source, folder, stored["shard"], _SECONDS)
    if names or len(source) != stored["records"]:
        logging.warning(
            "the images of the moments in %s have changed: %d are encoded, %d are in %s%s; encode "
            "the changes with the same sd_jax.precache command",
            path,
            stored["records"],
            len(source),
            stored["data"]["path"],
            f", and {_some(names)} differ" if names else "",
        )


def _claimed(
    source: Pictures, out: pathlib.Path, identity: Mapping[str, Any], work: MomentOptions
) -> tuple[dict[str, Any], Collection[int]]:
    """Compare the settings and records with those in `out`; return (manifest, changed shards).

    Except in a dry run, the manifest is written, and changed shards are deleted.
    """
    data = {name: getattr(source.data, name) for name in _FIELDS} if source.data else {}
    data |= {"fields": source.data.fields} if source.data and source.data.fields else {}
    now = {
        **identity,
        "data": data,
        "records": len(source),
        "files": fingerprints.stamp(source),
        "shard": work.shard,
        "finished": False,
    }
    now, stored = json.loads(json.dumps(now)), moments.find_manifest(out)
    if stored is None:
        if not work.dry_run:
            out.mkdir(parents=True, exist_ok=True)
            files.write_whole(out / moments.MANIFEST, json.dumps(now))
        return now, ()
    free = ("finished", "records", "files")
    if "data" not in stored:  # Written by an earlier version.
        free = ("finished", "files", "data.")
    changed, names = [], []
    different = settings_record.differences(stored, now, (*free, *_PLACE))
    if not different and stored.get("files") != now["files"]:
        changed, names = _changed(source, out, work.shard)
        if changed:  # Other records at another place are another data set.
            different = settings_record.differences(stored, now, free)
    if different and not work.overwrite:
        raise ValueError(
            f"{out} was started with other settings ({different}): use the same settings, write "
            "into another folder, or encode everything again with --overwrite"
        )
    if different:
        changed = [int(tar.stem) for tar in out.glob("*.tar") if tar.stem.isdecimal()]
        names = [different]
    if changed:
        logging.warning(
            "changed since %s was encoded: %s; encoding %d tars again, except with --dry_run",
            out,
            _some(names),
            len(changed),
        )
    if not work.dry_run and (changed or different or stored["records"] != len(source)):
        files.write_whole(out / moments.MANIFEST, json.dumps(now))
        for shard in changed:
            _path(out, shard).unlink(missing_ok=True)
            _list(out, shard).unlink(missing_ok=True)
        files.remove_tree(out / checksums.FOLDER)  # They are written again at the end.
    return now, changed


def _changed(source: Pictures, out: pathlib.Path, size: int, seconds: float = math.inf) -> tuple[list[int], list[str]]:
    """Return the shards whose records differ from their lists, and the names of changed records.

    `size` is the number of records per shard. After `seconds`, no further shard is compared.
    """
    changed, records, end = [], set(), time.monotonic() + seconds
    lists = sorted((out / LISTS).glob("*.json"))
    for path in random.Random(0).sample(lists, len(lists)):
        if time.monotonic() > end:
            break
        before = [tuple(record) for record in json.loads(path.read_text())]
        rows = np.arange(int(path.stem) * size, min((int(path.stem) + 1) * size, len(source)))
        now = [
            record for first in range(0, len(rows), _CHUNK) for record in source.contents(rows[first : first + _CHUNK])
        ]
        if before != now:
            changed.append(int(path.stem))
            records ^= set(before) ^ set(now)  # A record may only have moved to another shard.
    return changed, sorted({name for name, _ in records}) or ["the order"] * bool(changed)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _path(out: pathlib.Path, shard: int) -> pathlib.Path:
    return out / f"{shard:06}.tar"


def _list(out: pathlib.Path, shard: int) -> pathlib.Path:
    return out / LISTS / f"{shard:06}.json"


def _count(out: pathlib.Path, total: int, damaged: Collection[str] = ()) -> int:
    present = files.present(_path(out, shard) for shard in range(total))
    return sum(path.name not in damaged for path in present)


def _write(source: Pictures, encode: EncodeImages, out: pathlib.Path, work: MomentOptions, shard: int) -> None:
    rows = range(shard * work.shard, min((shard + 1) * work.shard, len(source)))
    path = _path(out, shard)

    def encoded():
        contents: dict[int, tuple[str, int]] = {}
        yield from _encoded(source, encode, rows, work, contents)
        # Before the tar gets its final name.
        (out / LISTS).mkdir(exist_ok=True)
        files.write_whole(_list(out, shard), json.dumps([contents[index] for index in rows]))

    try:
        tars.write(path, encoded())
    except FileNotFoundError:
        # Another worker wrote the last missing shard, and removed the temporary file of this one.
        if not path.exists():
            raise


def _parts(rows: range, work: MomentOptions) -> Iterator[np.ndarray]:
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
    source: Pictures, encode: EncodeImages, rows: range, work: MomentOptions, contents: dict[int, tuple[str, int]]
) -> Iterator[dict[str, bytes]]:
    """Yield the files of each usable record among `rows`, keyed by suffix, for tars.write.

    The files hold the record's moments and caption. The next batch is read while a batch is
    encoded. `contents` receives (name, checksum) of each record.
    """
    buckets, batch = work.buckets, work.batch
    views = [source.cropped_to(shape) for shape in buckets.shapes] if buckets else [source]

    def read(part):
        view = views[buckets.bucket[part[0]] if buckets else 0]
        usable, contents = view.usable(part), source.contents(part)
        has_fields = source.data and source.data.fields and len(usable[0])
        return *usable, view.columns(usable[0]).numbers if has_fields else {}, contents

    read_ahead = engines.ahead(read, _parts(rows, work))
    for part, (indices, images, texts, numbers, of_part) in read_ahead:
        contents |= zip(part.tolist(), of_part, strict=True)
        if not len(indices):
            continue
        # Repeat images to fill the batch, so that all batches have one size.
        encoded = encode(images[np.arange(batch) % len(indices)])[: len(indices)]
        finite = np.isfinite(encoded).all((1, 2, 3))
        if not finite.all():
            raise ValueError(
                f"the latents of {contents[int(indices[~finite][0])][0]} are not finite: check "
                "vae.weights, and try vae.dtype=float32"
            )
        for row, (index, array, text) in enumerate(zip(indices.tolist(), encoded, texts, strict=True)):
            if not all(isinstance(each, str) for each in captions.every(text)):
                raise ValueError(
                    f"the caption of record {index} is {type(text).__name__}, not text: "
                    "set data.text to captions, such as txt"
                )
            key = f"{index:09}".encode()
            of_row = {name: float(values[row]) for name, values in numbers.items()}
            yield {tars.KEY: key, "npy": moments.write(array), **records.write_text(text, of_row)}
