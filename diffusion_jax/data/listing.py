"""The records of many tars in one file of 16 bytes each, mapped into memory by all processes.

A listing is made once from the indices of the tars (see tars), and kept as `records-NAME.index` in
the folder that holds them all, or in the user's cache where that cannot be written. NAME is a hash
of the tars' names, sizes and times and of what is listed, so that a file which is there is right.
Other tars get another one; old ones may be deleted when no run uses them. Of tars in an object
store the bucket keeps one, and each machine a copy.

The file holds spans, firsts and facts as in Listing (uint32, int64, JSON), and then the length of
the facts in bytes (uint64), all of them little-endian. The facts have the CRC-32 of what is before
them: a damaged listing would pair images with the texts of others, and is made anew.
"""

import collections
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import struct
import tempfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import filelock
import numpy as np
from absl import logging
from jaxtyping import Int, UInt32

from diffusion_jax.data import storage, tars
from diffusion_jax.data.tars import Index
from diffusion_jax.machine import files, progress

_VERSION = 2
_NAME = 100  # Bytes of a member's name at the start of its header.
_CHUNK = 256  # Tars whose indices are in memory at once.
_LENGTH = struct.Struct("<Q")


class Listing(NamedTuple):
    """The records that have an image and a text, in the order of the tars and of their members."""

    tars: Sequence[str]
    firsts: Int[np.ndarray, "T+1"]
    """Record i is in the tar t of firsts[t] <= i < firsts[t + 1]."""
    spans: UInt32[np.ndarray, "N 4"]
    """Block and size of the image, block and size of the text; a block has tars.BLOCK bytes."""
    facts: dict[str, Any]
    """Counts: `records`, `images`, `bare` ones without a text, `truncated` and `broken` tars; then
    names of `first` bare images, the first `error` of a broken tar, the `suffixes` of all files."""


def open_listing(path: str, images: Sequence[str], text: str) -> Listing:
    """The listing of the tars of `path`, made if it is not there.

    A record has an image with one of the suffixes `images` and a text of the suffix `text`. Errors
    are those of tars.find; tars that cannot be read are counted.
    """
    names, stamps = tars.find_stamped(path)
    home = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071 - URLs are no paths.
    home += "/" if home or names[0].startswith("/") else ""
    named = hashlib.sha256(json.dumps([_VERSION, images, text]).encode())
    for name, stamp in zip(names, stamps, strict=True):
        named.update(f"\n{name[len(home) :]} {stamp}".encode())
    name = f"records-{named.hexdigest()[:24]}.index"
    folders = [pathlib.Path(home), *tars.cache_folders()][storage.is_url(home) :]
    for folder in folders:
        if (listing := _load(folder / name, names)) is not None:
            return listing
    place = next(filter(_is_writable, folders)) / name
    lock = place.with_name(f".{name}.lock")
    with filelock.FileLock(lock):
        if _load(place, names) is None:  # Another process may have made it.
            _bring(f"{home}{name}", place, functools.partial(_make, names, images, text))
        lock.unlink(missing_ok=True)
    listing = _load(place, names)
    assert listing is not None, f"{place} is damaged as soon as it is written"
    return listing


def _bring(remote: str, place: pathlib.Path, make: Any) -> None:
    """Puts the listing at `place`: made here, or copied from the store that keeps it for all."""
    if storage.is_url(remote) and storage.exists(remote):
        return storage.download(remote, place)
    make(place)
    if storage.is_url(remote):
        try:
            storage.upload(place, remote)
        except OSError as error:
            logging.warning("each machine lists the tars anew: %s", error)


def _is_writable(folder: pathlib.Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return True
    return False


def _load(place: pathlib.Path, names: Sequence[str]) -> Listing | None:
    """Maps the file; None if it is not there, or has been damaged."""
    try:
        with place.open("rb") as file:
            file.seek(-_LENGTH.size, os.SEEK_END)
            end = file.tell()
            (length,) = _LENGTH.unpack(file.read())
            file.seek(end - length)
            facts = json.loads(file.read(length))
        total, num_firsts = facts["records"], len(names) + 1
        if end != 16 * total + 8 * num_firsts + length:
            return None
        numbers = np.memmap(place, np.uint8, "r", shape=(end - length,))
        if zlib.crc32(numbers.data) != facts["crc32"]:
            return None
        firsts = np.fromfile(place, "<i8", num_firsts, offset=16 * total)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    spans = np.zeros((0, 4), np.uint32)
    if total:  # Nothing cannot be mapped.
        spans = np.memmap(place, "<u4", "r", shape=(total, 4)).view(np.ndarray)
    return Listing(names, firsts, spans, facts)


def _make(names: Sequence[str], images: Sequence[str], text: str, place: pathlib.Path) -> None:
    """Writes the listing tar by tar, so that memory holds a few of their indices alone."""
    facts: dict[str, Any] = {"first": [], "error": ""}
    counts, suffixes, lengths, crc = collections.Counter[str](), set[str](), [], 0
    with (
        files.whole(place) as temporary,
        temporary.open("wb") as file,
        ThreadPoolExecutor(8) as threads,  # Reading headers mostly waits for the disk.
    ):
        chunks = (names[i : i + _CHUNK] for i in range(0, len(names), _CHUNK))
        indices = (index for chunk in chunks for index in threads.map(_attempt, chunk))
        indices = progress.reported(indices, len(names), "tars listed")
        for name, index in zip(names, indices, strict=True):
            if isinstance(index, ValueError):
                counts["broken"] += 1
                facts["error"] = facts["error"] or str(index)
                lengths.append(0)
                continue
            spans = _spans(index, images, text)
            bare = spans[:, 1, 0] < 0
            for (offset, _), _ in spans[bare][: 3 - len(facts["first"])].tolist():
                facts["first"].append(full_name(name, *header(name, offset)))
            counts.update(images=len(bare), bare=int(bare.sum()), truncated=int(index.truncated))
            suffixes.update(index.suffix.tolist())
            numbers = _compact(spans[~bare], name).tobytes()
            crc = zlib.crc32(numbers, crc)
            file.write(numbers)
            lengths.append(len(bare) - int(bare.sum()))
        numbers = np.cumsum([0, *lengths], dtype="<i8").tobytes()
        crc = zlib.crc32(numbers, crc)
        file.write(numbers)
        facts |= {"records": sum(lengths), "suffixes": sorted(suffixes), "crc32": crc}
        facts |= {name: counts[name] for name in ("images", "bare", "truncated", "broken")}
        encoded = json.dumps(facts).encode()
        file.write(encoded + _LENGTH.pack(len(encoded)))


def header(tar: str, offset: int) -> list[bytes]:
    """The start of the header before the contents at `offset`, with the member's name."""
    first = offset - tars.BLOCK
    return storage.read_ranges([tar], [first], [first + _NAME])


def full_name(tar: str, header: bytes) -> str:
    """A record's name, read from its header each time: names of millions would fill memory."""
    return f"{tar}/{header[:_NAME].partition(bytes(1))[0].decode(errors='replace')}"


def _attempt(name: str) -> Index | ValueError:
    try:
        return tars.load_index(name)
    except ValueError as error:
        logging.warning("left out: %s", error)
        return error


def _spans(index: Index, images: Sequence[str], text: str) -> Int[np.ndarray, "N 2 2"]:
    """(offset, size) of image and text for each record that has an image; -1 for no text."""
    num_records = int(index.record.max(initial=-1)) + 1
    spans = np.full((num_records, 2, 2), -1, np.int64)
    for column, suffixes in enumerate((images, (text,))):
        rows = np.isin(index.suffix, suffixes)
        spans[index.record[rows], column] = index.span[rows]
    return spans[spans[:, 0, 0] >= 0]


def _compact(spans: Int[np.ndarray, "N 2 2"], tar: str) -> UInt32[np.ndarray, "N 4"]:
    rows = spans.reshape(-1, 4) // [tars.BLOCK, 1, tars.BLOCK, 1]
    if (rows >= 2**32).any():
        raise ValueError(f"{tar} holds a file of 4 GiB or more, which is no image and no text")
    return rows.astype("<u4")
