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
number of bytes of the facts (uint64) and the CRC-32 of all bytes before it (uint32). All numbers
are little-endian. A damaged listing, which could pair images with wrong texts, is built again.
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

from diffusion_jax import files
from diffusion_jax.data import records, storage, tars
from diffusion_jax.data.inventory import COMPANIONS, PICTURES, TEXTS, USED, Inventory
from diffusion_jax.data.tars import Index
from diffusion_jax.files import untrusted
from diffusion_jax.logs import progress

_VERSION = 5
_NAME = 100  # Bytes of the member's name at the start of a tar header.
_CHUNK = 256  # Number of tars whose indices are held in memory together.
_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_KINDS = (PICTURES, TEXTS, COMPANIONS, "dot_in_name", "format", "second_picture",
          "second_caption", "no_caption", "no_picture", "duplicate_key",
          "broken_record")  # fmt: skip


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
    """The number of "records", the "suffixes" of all files in the tars, and the "error" message
    about the first unreadable tar."""
    inventory: Inventory
    """The files in the tars."""


def open_listing(path: str, images: Sequence[str], texts: Sequence[str], more: str = "") -> Listing:
    """Return the listing of all records in the tars at `path`, building it if necessary.

    Unreadable tars are left out, and counted in the listing's inventory as "broken_tar". The
    listing of damaged tars is not kept, because reading the tars again may succeed.

    Args:
        path: the tars; see tars.find.
        images: suffixes of the image files.
        texts: suffixes of the text files. A record needs at least one of these files.
        more: the suffix of another file that the listing includes, in the last two columns of its
            spans; "" for none. Records do not need this file.

    Raises:
        FileNotFoundError: a tar is missing.
        OSError: no folder for the listing can be written.
        ValueError: a folder has no tars, a wdinfo.pkl is damaged, or an image or text has 4 GiB or
            more.
    """
    beside = Inventory()
    names, stamps = tars.find_stamped(path, beside)
    home = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071 - URLs are not paths.
    home += "/" if home or names[0].startswith("/") else ""
    kinds = texts[0] if len(texts) == 1 else texts
    identity = [_VERSION, images, kinds, *([more] if more else [])]
    digest = hashlib.sha256(json.dumps(identity).encode())
    for name, stamp in zip(names, stamps, strict=True):
        digest.update(f"\n{name[len(home) :]} {stamp}".encode())
    name = f"records-{digest.hexdigest()[:24]}.index"
    folders = [pathlib.Path(home), *tars.cache_folders()][storage.is_url(home) :]
    load = lambda path: _load(path, names, len(texts) + bool(more))
    trusted = lambda path: load(path) if tars.is_trusted(path, names[0]) else None
    for folder in folders:
        if (listing := trusted(folder / name)) is not None:
            listing.inventory.update(beside)
            return listing
    if (folder := next(filter(_is_writable, folders), None)) is None:
        raise OSError(f"the list of the tars' records needs a folder: make {folders[0]} writable")
    target, lock = folder / name, folder / f".{name}.lock"
    with filelock.FileLock(lock):
        if (listing := trusted(target)) is None:  # Another process may have built it meanwhile.
            _obtain(f"{home}{name}", target, functools.partial(_build, names, images, texts, more))
            listing = load(target)
        assert listing is not None, f"{target} is damaged immediately after writing"
        if listing.inventory.damaged():
            target.unlink(missing_ok=True)  # Its numbers stay mapped into memory.
        lock.unlink(missing_ok=True)
    listing.inventory.update(beside)
    return listing


def _obtain(shared: str, path: pathlib.Path, build: Any) -> None:
    """Write a listing to the local `path`: download it if it is in the bucket, or build it.

    `shared` is the path or URL that the listing has in the folder of the tars. If it is a URL, a
    new listing is uploaded there, so that other machines can download it. `build(path)` writes a
    new listing, and returns whether a tar is damaged.
    """
    stored = files.store_path(shared)
    if stored:  # Any error means that there is none, or that only the tars may be read.
        with contextlib.suppress(OSError), files.whole(path) as temporary:
            return stored.get(temporary)
    is_damaged = build(path)
    if stored and not is_damaged:
        try:
            stored.send(path)
        except OSError as error:
            logging.warning(
                "the listing of the tars' records cannot be uploaded, so each machine builds its "
                "own: %s", error
            )  # fmt: skip


def _is_writable(folder: pathlib.Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return True
    return False


def _load(path: pathlib.Path, names: Sequence[str], num_texts: int) -> Listing | None:
    """Open a listing as memory-mapped arrays. Return None if the file is missing or damaged.

    `names` are the paths of the listed tars, and `num_texts` is the number of suffixes besides
    those of images.
    """
    columns = 2 + 2 * num_texts
    try:
        with path.open("rb") as file:
            file.seek(-_LENGTH.size - _CRC.size, os.SEEK_END)
            end = file.tell()
            (length,), (crc,) = _LENGTH.unpack(file.read(_LENGTH.size)), _CRC.unpack(file.read())
            if zlib.crc32(np.memmap(path, np.uint8, "r")[: -_CRC.size].data) != crc:
                return None
            file.seek(end - length)
            facts = json.loads(file.read(length))
        total, num_firsts = facts["records"], len(names) + 1
        if end != 4 * columns * total + 8 * num_firsts + length:
            return None
        firsts = np.fromfile(path, "<i8", num_firsts, offset=4 * columns * total)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    spans = np.zeros((0, columns), np.uint32)
    if total:  # memmap refuses an empty shape.
        spans = np.memmap(path, "<u4", "r", shape=(total, columns)).view(np.ndarray)
    return Listing(names, firsts, spans, facts, Inventory(facts["inventory"]))


def _build(
    names: Sequence[str], images: Sequence[str], texts: Sequence[str], more: str, path: pathlib.Path
) -> bool:
    """Write the listing of the tars `names` to `path`, and return whether a tar is damaged.

    `images`, `texts` and `more` are suffixes, as in `open_listing`. The tars are processed in
    groups, because the indices of all tars together would fill memory.
    """
    inventory, error = Inventory(), ""
    suffixes, lengths, crc = set[str](), [], 0
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
                inventory.add("broken_tar", [name])
                error = error or str(index)
                lengths.append(0)
                continue
            spans, kinds = _sorted(index, images, texts, more)
            if index.inventory.damaged() and len(spans):  # The text was probably lost.
                kinds[kinds == _KINDS.index("no_caption")] = _KINDS.index("broken_record")
            for number in np.flatnonzero(np.bincount(kinds)).tolist():
                kind, rows = _KINDS[number], np.flatnonzero(kinds == number)
                named = rows[np.sort(np.unique(index.suffix[rows], return_index=True)[1])]
                named = np.append(named, np.setdiff1d(rows, named))[: inventory.room(kind)]
                first = [] if kind in USED else index.span[named, 0].tolist()
                inventory.add(kind, [full_name(name, *header(name, at)) for at in first], len(rows))
            for kind, first in index.inventory.first.items():
                number = index.inventory.counts[kind]
                inventory.add(kind, [f"{name}/{member}" for member in first], number)
            suffixes.update(np.unique(index.suffix).tolist())
            numbers = _compact(spans, name).tobytes()
            crc = zlib.crc32(numbers, crc)
            file.write(numbers)
            lengths.append(len(spans))
        numbers = np.cumsum([0, *lengths], dtype="<i8").tobytes()
        crc = zlib.crc32(numbers, crc)
        file.write(numbers)
        facts = {"records": sum(lengths), "suffixes": sorted(suffixes)}
        facts |= {"inventory": inventory.saved(), "error": error}
        encoded = json.dumps(facts).encode()
        encoded += _LENGTH.pack(len(encoded))
        file.write(encoded + _CRC.pack(zlib.crc32(encoded, crc)))
    return inventory.damaged() > 0


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


def _sorted(
    index: Index, images: Sequence[str], texts: Sequence[str], more: str = ""
) -> tuple[Int[np.ndarray, "N S 2"], np.ndarray]:
    """Return the records of a tar, and the kind of each of its files.

    Returns:
        (offset, size) in bytes of the image, of each text and of the file with the suffix `more` of
        the records that have an image and a text, where a missing file has the offset 0; and the
        inventory's kind of each file, as an array [M] of indices of _KINDS.
    """
    suffixes, number = np.unique(index.suffix, return_inverse=True)
    kind_of = lambda suffix: _KINDS.index(_kind(suffix, images, texts))
    kinds = np.array([kind_of(suffix) for suffix in suffixes.tolist()], np.int64)[number]
    others = [*texts, *([more] if more else [])]
    files = np.full((len(index.key), 1 + len(others)), -1)  # Numbers of each record's files.
    for column, rows in enumerate((kinds == 0, *(index.suffix == other for other in others))):
        rows = np.flatnonzero(rows)
        files[index.record[rows], column] = rows  # The last one of several images.
        kinds[rows[files[index.record[rows], column] != rows]] = _KINDS.index("second_picture")
    repeated = np.bincount(index.key, minlength=1)[index.key] > 1
    if not index.inventory.damaged():  # Otherwise, the picture of a text may be lost.
        kinds[_take_last_texts(files, index, repeated)] = _KINDS.index("second_caption")
        repeated &= (files >= 0).any(1)
    # Of several records with one key, it is only certain which files belong together if all
    # records are complete.
    needed = files[:, : 1 + len(texts)]
    is_bare, has_no_picture = (needed[:, 1:] < 0).all(1), needed[:, 0] < 0
    incomplete = is_bare | has_no_picture
    unclear = repeated & np.isin(index.key, index.key[repeated & incomplete])
    for chosen, kind in (
        (is_bare, "no_caption"), (has_no_picture, "no_picture"), (unclear, "duplicate_key"),
    ):  # fmt: skip
        rows = needed[chosen].ravel()
        kinds[rows[rows >= 0]] = _KINDS.index(kind)
    used = files[~incomplete & ~unclear]
    return np.where(used[..., None] < 0, 0, index.span[used]), kinds


def _take_last_texts(files: np.ndarray, index: Index, repeated: np.ndarray) -> list[int]:
    """Give the only picture of a key the last text of each suffix, as unpacking the tar does.

    The records without a picture lose their texts. If a text comes before the picture, and files
    with other keys are between them, nothing changes: it may belong to a missing picture.

    Args:
        files: the numbers of each record's files, or -1: the picture, then the texts. Is changed.
        index: the index of the tar.
        repeated: whether other records have the key of a record.

    Returns:
        The numbers of the texts that others replace.
    """
    groups, replaced = collections.defaultdict[int, list[int]](list), list[int]()
    for record in np.flatnonzero(repeated).tolist():
        groups[int(index.key[record])].append(record)
    for key, of_key in groups.items():
        pictures = [record for record in of_key if files[record, 0] >= 0]
        texts = files[of_key, 1:]
        if len(pictures) != 1 or (texts < 0).all():
            continue
        between = slice(texts[texts >= 0].min(), files[pictures[0], 0])
        if (index.key[index.record[between]] == key).all():
            last = texts.max(0)
            replaced += texts[(texts >= 0) & (texts != last)].tolist()
            files[of_key, 1:], files[pictures, 1:] = -1, last
    return replaced


def _kind(suffix: str, images: Sequence[str], texts: Sequence[str]) -> str:
    if suffix in images:
        return PICTURES
    if suffix in texts:
        return TEXTS
    last = suffix.rpartition(".")[2]
    if last in images or last in texts:
        return "dot_in_name"  # The record's key ends at the first dot.
    return COMPANIONS if last in untrusted.image_suffixes() else records.other_kind(suffix, texts)


def _compact(spans: Int[np.ndarray, "N S 2"], tar: str) -> UInt32[np.ndarray, "N 2*S"]:
    rows = (spans // [tars.BLOCK, 1]).reshape(len(spans), 2 * spans.shape[1])
    if (rows >= 2**32).any():
        raise ValueError(f"{tar} holds an image or text of 4 GiB or more: remove this file")
    return rows.astype("<u4")
