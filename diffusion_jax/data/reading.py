"""Read pictures and texts at the places that a table names."""

import bisect
import os
from collections.abc import Sequence
from typing import NamedTuple

from diffusion_jax.data import storage, tars
from diffusion_jax.data.decoding import Unusable

FILE, TAR, BYTES = "file", "tar", "bytes"
RECORD, FRAME = "record:", "frame:"
_GAP = 64 * 2**10  # Reading this many superfluous bytes is cheaper than a second request.


class Place(NamedTuple):
    """Where bytes lie: a file, and their position in it."""

    file: str
    """Path or URL."""
    at: int = 0
    """Offset of the first byte. In an ArrayRecord file, the number of the record."""
    size: int = -1
    """Number of bytes; -1 for the whole file. In an ArrayRecord file, the number of the value among
    those of its feature; -1 for a feature with one value, such as a picture."""
    kind: str = "file"
    """FILE: the whole file. TAR: behind the header of a member, which may hold a checksum. BYTES:
    in any other file. RECORD + FEATURE: in this feature of a tf.train.Example in an ArrayRecord
    file. FRAME + FEATURE: the same in a TFRecord file, with a checksum behind the Example."""


def read(groups: Sequence[Sequence[Place]]) -> list[list[bytes | Unusable]]:
    """Return the bytes at the places of each group, or the reason for which they are unusable.

    Places of a group that are close to each other in one file are read together. URLs are read
    concurrently.

    Raises:
        OSError: a file was removed.
    """
    flat = [place for group in groups for place in group]
    alone = {place: read_file(place.file) for place in flat if place.kind == FILE}
    alone |= _read_records(flat)
    ranges = [_ranges(group) for group in groups]
    spans = [span for of_group in ranges for span in of_group]
    contents = iter(storage.read_ranges(*zip(*spans, strict=True)) if spans else ())
    found = []
    for group, of_group in zip(groups, ranges, strict=True):
        parts = [(*span, next(contents)) for span in of_group]
        found.append([alone[p] if p in alone else _contents(p, parts) for p in group])
    return found


def ends(places: Sequence[Place], size: int) -> list[bytes]:
    """Return the first `size` bytes at each place or, for a negative number, the last ones.

    Contents that are shorter, or are stored as records, are returned whole.

    Raises:
        OSError: a file was removed.
    """
    cut = {place: _cut(place, size) for place in places if place.kind in (TAR, BYTES)}
    parts = iter(storage.read_ranges(*zip(*cut.values(), strict=True)) if cut else ())
    found = {place: next(parts) for place in cut}
    for place in places:
        if place.kind == FILE:
            found[place] = _end_of_file(place.file, size)
    found |= {p: b"" if isinstance(c, Unusable) else c for p, c in _read_records(places).items()}
    return [found[place] for place in places]


def _cut(place: Place, size: int) -> tuple[str, int, int]:
    last = place.at + place.size
    if size < 0:
        return place.file, max(place.at, last + size), last
    return place.file, place.at, min(last, place.at + size)


def _end_of_file(path: str, size: int) -> bytes:
    with open(path, "rb") as file:
        if size < 0:
            file.seek(max(0, file.seek(0, os.SEEK_END) + size))
        return file.read(abs(size))


def read_file(path: str | os.PathLike[str]) -> bytes | Unusable:
    """Return a file's contents, or an Unusable error if it may not be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except PermissionError as error:
        return Unusable("unreadable", str(error))


def _read_records(places: Sequence[Place]) -> dict[Place, bytes | Unusable]:
    records, frames = ([p for p in places if p.kind.startswith(k)] for k in (RECORD, FRAME))
    if not records and not frames:
        return {}
    from diffusion_jax.data import tf_examples  # Slow to import.

    read, of = tf_examples.read_records((p.file, p.at) for p in records), tf_examples.value_of
    feature = lambda place: place.kind.partition(":")[2]
    found = {p: of(read[p.file, p.at], feature(p), p.size) for p in records}
    read = tf_examples.read_frames([place[:3] for place in frames])
    return found | {p: of(e, feature(p)) for p, e in zip(frames, read, strict=True)}


def _ranges(group: Sequence[Place]) -> list[tuple[str, int, int]]:
    """Return the byte ranges (path, first, last + 1) to read for a group."""
    spans = [(p.file, p.at - tars.BLOCK * (p.kind == TAR), p.at + p.size) for p in group if p.kind in (TAR, BYTES)]
    ranges: list[tuple[str, int, int]] = []
    for file, first, last in sorted(spans):
        if ranges and file == ranges[-1][0] and first - ranges[-1][2] < _GAP:
            ranges[-1] = file, ranges[-1][1], max(last, ranges[-1][2])
        else:
            ranges.append((file, first, last))
    return ranges


def _contents(place: Place, parts: Sequence[tuple[str, int, int, bytes]]) -> bytes | Unusable:
    """Return the bytes at a place, which one of the parts that were read contains."""
    begin = place.at - tars.BLOCK * (place.kind == TAR)
    end = place.at + place.size
    part = parts[bisect.bisect(parts, (place.file, begin), key=lambda part: part[:2]) - 1]
    found = part[3][begin - part[1] : end - part[1]]
    if len(found) < end - begin:
        return b""  # The file was truncated after it was listed.
    if place.kind == BYTES:
        return found
    try:
        return tars.contents(found)
    except Unusable as error:
        return error
