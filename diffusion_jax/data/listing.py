"""Builds and opens listings. A listing is a memory-mapped file with the positions of all records in
a set of tars.

A listing has 16 bytes per record, and 8 more for each further place of texts in data.text. It is
built once from the indices of the tars (see tars.py) and saved as `records-NAME.index` in the
folder that holds all tars, or in the user's cache if that folder is read-only. NAME is a hash of
the suffixes of images and texts, and of each tar's name, size and modification time. If a tar
changes, a new listing is built, so a listing is never out of date. Old listings may be deleted when
no run uses them. For tars in an object store, the listing is kept in the bucket and copied to each
machine.

The file holds the fields spans (uint32), firsts (int64) and facts (JSON) of Listing, and then the
number of bytes of the facts (uint64). All numbers are little-endian. The facts include the CRC-32
of all bytes before the facts. A damaged listing, which could pair images with wrong texts, is built
again.
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
_NAME = 100  # Bytes of the member's name at the start of a tar header.
_CHUNK = 256  # Number of tars whose indices are held in memory together.
_LENGTH = struct.Struct("<Q")


class Listing(NamedTuple):
    """The positions of all records that have an image and a text, in the order of the tars."""

    tars: Sequence[str]
    """The paths or URLs of the T tars."""
    firsts: Int[np.ndarray, "T+1"]
    """Tar t holds records firsts[t] to firsts[t + 1] - 1."""
    spans: UInt32[np.ndarray, "N 2*S"]
    """Offset and size of the image, then of the text with each of the S - 1 suffixes of texts.
    Offsets are in blocks of tars.BLOCK bytes, sizes in bytes. A missing text has the offset 0."""
    facts: dict[str, Any]
    """Numbers of "records", "images", "bare" images (without a text), "truncated" tars and "broken"
    (unreadable) tars. "first" holds up to three names of bare images, "error" holds the message
    about the first broken tar, and "suffixes" holds the suffixes of all files in the tars."""


def open_listing(path: str, images: Sequence[str], texts: Sequence[str]) -> Listing:
    """Return the listing of all records in the tars at `path`, building it if necessary.

    Unreadable tars are left out, and counted in the listing's facts.

    Args:
        path: the tars; see tars.find.
        images: suffixes of the image files.
        texts: suffixes of the text files. A record needs at least one of these files.

    Raises:
        FileNotFoundError: a tar is missing.
        ValueError: a folder has no tars, a wdinfo.pkl is damaged, or an image or text has 4 GiB or
            more.
    """
    names, stamps = tars.find_stamped(path)
    home = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071 - URLs are not paths.
    home += "/" if home or names[0].startswith("/") else ""
    kinds = texts[0] if len(texts) == 1 else texts
    digest = hashlib.sha256(json.dumps([_VERSION, images, kinds]).encode())
    for name, stamp in zip(names, stamps, strict=True):
        digest.update(f"\n{name[len(home) :]} {stamp}".encode())
    name = f"records-{digest.hexdigest()[:24]}.index"
    folders = [pathlib.Path(home), *tars.cache_folders()][storage.is_url(home) :]
    for folder in folders:
        if (listing := _load(folder / name, names, len(texts))) is not None:
            return listing
    target = next(filter(_is_writable, folders)) / name
    lock = target.with_name(f".{name}.lock")
    with filelock.FileLock(lock):
        if _load(target, names, len(texts)) is None:  # Another process may have built it meanwhile.
            _obtain(f"{home}{name}", target, functools.partial(_build, names, images, texts))
        lock.unlink(missing_ok=True)
    listing = _load(target, names, len(texts))
    assert listing is not None, f"{target} is damaged immediately after writing"
    return listing


def _obtain(shared: str, path: pathlib.Path, build: Any) -> None:
    """Write a listing to the local `path`: download it if it is in the bucket, or build it.

    `shared` is the path or URL that the listing has in the folder of the tars. If it is a URL, a
    new listing is uploaded there, so that other machines can download it. `build(path)` writes a
    new listing.
    """
    if storage.is_url(shared) and storage.exists(shared):
        return storage.download(shared, path)
    build(path)
    if storage.is_url(shared):
        try:
            storage.upload(path, shared)
        except OSError as error:
            logging.warning(
                "the listing of the tars' records cannot be uploaded, so each machine builds its "
                "own: %s", error
            )  # fmt: skip


def _is_writable(folder: pathlib.Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return True
    return False


def _load(path: pathlib.Path, names: Sequence[str], num_texts: int) -> Listing | None:
    """Open a listing as memory-mapped arrays. Return None if the file is missing or damaged.

    `names` are the paths of the listed tars, and `num_texts` is the number of suffixes of texts.
    """
    columns = 2 + 2 * num_texts
    try:
        with path.open("rb") as file:
            file.seek(-_LENGTH.size, os.SEEK_END)
            end = file.tell()
            (length,) = _LENGTH.unpack(file.read())
            file.seek(end - length)
            facts = json.loads(file.read(length))
        total, num_firsts = facts["records"], len(names) + 1
        if end != 4 * columns * total + 8 * num_firsts + length:
            return None
        numbers = np.memmap(path, np.uint8, "r", shape=(end - length,))
        if zlib.crc32(numbers.data) != facts["crc32"]:
            return None
        firsts = np.fromfile(path, "<i8", num_firsts, offset=4 * columns * total)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    spans = np.zeros((0, columns), np.uint32)
    if total:  # memmap refuses an empty shape.
        spans = np.memmap(path, "<u4", "r", shape=(total, columns)).view(np.ndarray)
    return Listing(names, firsts, spans, facts)


def _build(
    names: Sequence[str], images: Sequence[str], texts: Sequence[str], path: pathlib.Path
) -> None:
    """Write the listing of the tars `names` to `path`.

    `images` and `texts` are suffixes, as in `open_listing`. The tars are processed in groups,
    because the indices of all tars together would fill memory.
    """
    facts: dict[str, Any] = {"first": [], "error": ""}
    counts, suffixes, lengths, crc = collections.Counter[str](), set[str](), [], 0
    with (
        files.whole(path) as temporary,
        temporary.open("wb") as file,
        ThreadPoolExecutor(8) as threads,  # Reading headers is limited by disk latency.
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
            spans = _spans(index, images, texts)
            bare = (spans[:, 1:, 0] == 0).all(axis=1)
            for (offset, _), *_ in spans[bare][: 3 - len(facts["first"])].tolist():
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
    """Return the 100-byte name field in the header of the member whose contents start at `offset`.

    The result is a list with one item, as from storage.read_ranges.
    """
    first = offset - tars.BLOCK
    return storage.read_ranges([tar], [first], [first + _NAME])


def full_name(tar: str, header: bytes) -> str:
    """Return a record's name, "TAR/MEMBER", from the tar header of its image.

    Listings hold no names, because millions of them would fill memory.
    """
    return f"{tar}/{header[:_NAME].partition(bytes(1))[0].decode(errors='replace')}"


def _attempt(name: str) -> Index | ValueError:
    try:
        return tars.load_index(name)
    except ValueError as error:
        logging.warning("skipped a tar: %s", error)
        return error


def _spans(index: Index, images: Sequence[str], texts: Sequence[str]) -> Int[np.ndarray, "N S 2"]:
    """Return (offset, size) in bytes of the image and of each text of each record.

    They are 0 if a record lacks the text, because the first member's content starts after its
    header. Records without an image are left out.
    """
    num_records = int(index.record.max(initial=-1)) + 1
    spans = np.zeros((num_records, 1 + len(texts), 2), np.int64)
    for column, suffixes in enumerate((images, *((text,) for text in texts))):
        rows = np.isin(index.suffix, suffixes)
        spans[index.record[rows], column] = index.span[rows]
    return spans[spans[:, 0, 0] > 0]


def _compact(spans: Int[np.ndarray, "N S 2"], tar: str) -> UInt32[np.ndarray, "N 2*S"]:
    rows = (spans // [tars.BLOCK, 1]).reshape(len(spans), 2 * spans.shape[1])
    if (rows >= 2**32).any():
        raise ValueError(f"{tar} holds an image or text of 4 GiB or more: remove this file")
    return rows.astype("<u4")
