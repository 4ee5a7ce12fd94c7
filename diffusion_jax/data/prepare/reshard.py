"""Write the records of any data source as webdataset tars or ArrayRecord files of equal size.

With N records per shard, shard i holds the usable records among records i * N to (i + 1) * N - 1 of
the source. So shards can be written in any order and by several processes, and a killed command can
continue.
"""

import collections
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from PIL import Image

from diffusion_jax.config import named
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.data import decoding, fingerprints, records, tars
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.engines import ALONE, Engine
from diffusion_jax.data.records import Record, Records
from diffusion_jax.files import settings_record, untrusted


def _write_array_records(path: pathlib.Path, examples: Iterable[Mapping[str, bytes]]) -> None:
    from diffusion_jax.data.sources import arrayrecord  # Needs packages that tars do not need.

    arrayrecord.write(path, examples)


WriteShard = Callable[[pathlib.Path, Iterable[Mapping[str, bytes]]], None]
_WRITERS: Mapping[str, tuple[str, WriteShard]] = {
    "webdataset": (".tar", tars.write),
    "arrayrecord": (".array_record", _write_array_records),
}
EncodeRecord = Callable[[int, Record], dict[str, bytes] | str]
FORMATS = tuple(_WRITERS)
MANIFEST = "reshard.json"
_CHUNK = 64
_MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp"}


def reshard(
    records: Records,
    out: pathlib.Path,
    *,
    num: int,
    format: str,
    identity: Mapping[str, Any],
    process: int = 0,
    processes: int = 1,
    engine: Engine = ALONE,
    size: int = 0,
    pad: bool = False,
    checksums: bool = False,
    fields: Sequence[Field] = (),
) -> collections.Counter[str]:
    """Write this process's shards of a source, except existing ones, and return counts of records.

    Args:
        records: The source.
        out: The folder of the shards.
        num: The number of source records per shard. Of these, unusable records are dropped.
        format: One of FORMATS.
        identity: JSON values that identify the source. They are saved in `out` and compared when
            the command runs again.
        process: The index of this process, from 0.
        processes: The number of processes that share the work. Each writes every `processes`-th
            shard.
        engine: Distributes the shards of this process.
        size: The largest length of an image's shorter side in pixels. Larger images are shrunk (see
            decoding.shrink). 0 copies all images unchanged.
        pad: Whether to pad the images to squares. If so, `size` limits the longer side.
        checksums: Whether to keep a checksum of each file in a tar, which is checked when the file
            is read. ArrayRecord files have checksums of their own.
        fields: The numbers to write, into the JSON file of each record.

    Returns:
        The number of records that this call wrote, keyed by "written", and the numbers of records
        that it dropped or the source left out, keyed by reason. Shards that existed before are not
        counted.

    Raises:
        ValueError: If `out` holds shards of another source, with other settings or from before a
            file of the source changed, or an argument is out of range.
    """
    named.one_of("format", format, FORMATS)
    if num < 1:
        raise ValueError(f"num is {num}: a shard must hold at least 1 record")
    if not 0 <= process < processes:
        raise ValueError(f"process is {process}: it must be from 0 to {processes - 1}")
    if pad and not size:
        raise ValueError("pad is set, but size is 0: set size to the side of the squares in pixels")
    if checksums and format != "webdataset":
        raise ValueError(f"checksums is set, but {format} files have their own: leave it out")
    shrinking = {"size": size, "pad": pad} if size else {}
    stamp = fingerprints.stamp(records)
    stored = settings_record.record(
        out / MANIFEST,
        {**identity, "records": len(records), "num": num, "format": format, **shrinking}
        | ({"checksums": True} if checksums else {})
        | ({"fields": [field.name for field in fields]} if fields else {})
        | {"files": stamp},
        free=("files",),
    )
    if stored.get("files", stamp) != stamp:  # Earlier versions did not record them.
        raise ValueError(
            f"files of the data set have changed since shards were first written into {out}: write into another folder"
        )
    mine = range(process, -(-len(records) // num), processes)
    path = functools.partial(_path, out, format)
    encode = functools.partial(_encode, size=size, pad=pad, fields=fields)
    write_shard = _WRITERS[format][1]
    if checksums:
        write_shard = functools.partial(tars.write, checksums=True)
    write = functools.partial(_write, records, num, path, write_shard, encode)
    return collections.Counter(records.left_out()) + engine.fill(mine, path, write)


def _path(out: pathlib.Path, format: str, shard: int) -> pathlib.Path:
    return out / f"{shard:06}{_WRITERS[format][0]}"


def _write(
    records: Records,
    num: int,
    path: Callable[[int], pathlib.Path],
    write_shard: WriteShard,
    encode: EncodeRecord,
    shard: int,
) -> collections.Counter[str]:
    counts = collections.Counter[str]()
    rows = range(shard * num, min((shard + 1) * num, len(records)))
    write_shard(path(shard), _encoded(records, rows, encode, counts))
    return counts


def image_kind(image: bytes) -> str | None:
    """Return the suffix for an image file, such as "jpg", or None if Pillow cannot decode it.

    The first bytes of the file determine the format.
    """
    kind = next((kind for magic, kind in _MAGIC.items() if image.startswith(magic)), None)
    if kind and (kind != "webp" or image[8:12] == b"WEBP"):
        return kind
    try:
        format = untrusted.open_image(image).format
    except Exception:  # Pillow's decoders raise many types.
        return None
    suffixes = Image.registered_extensions()
    return next((s for s in untrusted.image_suffixes() if suffixes[f".{s}"] == format), None)


def _encoded(
    records: Records, rows: range, encode: EncodeRecord, counts: collections.Counter[str]
) -> Iterator[dict[str, bytes]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside Python's lock.
        for first in range(rows.start, rows.stop, _CHUNK):
            chunk = range(first, min(first + _CHUNK, rows.stop))
            for encoded in pool.map(encode, chunk, records.read(chunk)):
                if isinstance(encoded, str):
                    counts[encoded] += 1
                else:
                    counts["written"] += 1
                    yield encoded


def _encode(row: int, record: Record, *, size: int, pad: bool, fields: Sequence[Field]) -> dict[str, bytes] | str:
    """Return the files of a record, keyed by suffix, or the reason why the record is dropped.

    `row` is the record's index in the source. `size`, `pad` and `fields` are those of `reshard`.
    """
    if isinstance(record.text, Unusable):
        return record.text.reason
    try:
        numbers = records.checked_numbers(record.numbers, fields)
    except Unusable as error:
        return error.reason
    kind = image_kind(record.image)
    if kind is None:
        return "broken_image"
    image = record.image
    if size:
        try:
            kind, image = "png", decoding.shrink(image, size, pad=pad)
        except Unusable as error:
            return error.reason
    return {tars.KEY: f"{row:09}".encode(), kind: image, **records.write_text(record.text, numbers)}
