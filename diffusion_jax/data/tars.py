"""Find, index and write webdataset tars, on a disk or in an object store.

Members of a tar form a record if their paths agree up to the first dot of the file name, as
`a/0001.jpg` and `a/0001.txt` do. The index of a tar is saved beside it (`shard.tar.index.npz`), or
in the user's cache if the folder is read-only. The index is rebuilt when the tar's size or
modification time changes.
"""

import array
import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import pathlib
import re
import stat
import tarfile
import tempfile
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Int, UInt8

from diffusion_jax import files
from diffusion_jax.data import records, storage
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import Inventory, LeftOut
from diffusion_jax.data.records import check_exists, suffix_of
from diffusion_jax.files import untrusted
from diffusion_jax.files.user_cache import user_cache

KEY = "__key__"
BLOCK = 512
"""Bytes per block of a tar. The header of a member is the block before the member's contents."""
_INDEX_VERSION = 5
_OWNER = slice(265, 297)  # The bytes of a header that hold the name of the file's owner.
_CHECKSUM = b"crc32:"
_TRUNCATED = "truncated_tar"
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd.
_CHUNK = 2**17
_MAX_ZEROS = 2**20  # Largest usual number of zero bytes at the end of a tar.
_WDINFO = ".pkl"
_OWN = ("reshard.json", "moments.json")  # How the tars beside them were made.
_BRACES = r"\{([^{}]*)\}"
_NUMBERS = r"(\d+)\.\.(\d+)"
_MAX_NAMES = 1_000_000  # Largest number of names that a pattern may expand to.


class Index(NamedTuple):
    """An index of a tar: the record, suffix and position of each of its M files, in tar order."""

    record: Int[np.ndarray, "M"]
    """The number of the record that each file belongs to."""
    suffix: np.ndarray
    """Suffixes such as "jpg", strings [M]."""
    span: Int[np.ndarray, "M 2"]
    """Offset in the tar and size of each file's contents, in bytes."""
    key: Int[np.ndarray, "R"]
    """For each of the R records, the number of the first record with the same key."""
    inventory: Inventory
    """The files that are left out, and damaged places; see `members`."""
    names: UInt8[np.ndarray, "_"]
    """The names of the M files; see `unpack`."""
    left: UInt8[np.ndarray, "_"]
    """[name, reason] of each file that is left out, and of each damaged place; see `unpack`."""


def write(path: str | os.PathLike[str], records: Iterable[Mapping[str, bytes]], *, checksums: bool = False) -> None:
    """Write records to a new tar. The tar appears under its name only once it is complete.

    Args:
        path: the path of the tar, in an existing folder.
        records: one dictionary per record, which maps each suffix to the contents of a file, and
            "__key__" to the record's name.
        checksums: whether the owner of each file, which other programs ignore, is the checksum of
            its contents, such as "crc32:0c2e7a51". Whoever reads the record checks it.
    """
    with files.whole(path) as temporary, tarfile.open(temporary, "w", format=tarfile.GNU_FORMAT) as tar:
        for record in records:
            for suffix in sorted(record.keys() - {KEY}):
                key = record[KEY].decode(errors="surrogateescape")
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(record[suffix])
                member.uname = _checksum(record[suffix]).decode() if checksums else ""
                tar.addfile(member, io.BytesIO(record[suffix]))


def contents(member: bytes) -> bytes:
    """Return the contents of a member: its bytes after the header.

    Raises:
        Unusable: with reason "wrong_checksum" if the header holds another checksum; see `write`.
    """
    owner, file = member[_OWNER].rstrip(b"\0"), member[BLOCK:]
    if owner.startswith(_CHECKSUM) and owner != _checksum(file):
        raise Unusable("wrong_checksum", "a file of it has changed since it was written")
    return file


def _checksum(file: bytes) -> bytes:
    return b"%s%08x" % (_CHECKSUM, zlib.crc32(file))


def load_index(tar: str) -> Index:
    """Return the saved index of a tar if it is up to date; otherwise build and save a new one.

    The index of a damaged tar is not saved, because reading the tar again may succeed.
    """
    stamp = np.array([_INDEX_VERSION, *storage.stamp(tar)])
    paths = [f"{tar}.index.npz", *(f"{cache}/{_digest(tar)}.npz" for cache in cache_folders())]
    for path in paths:
        if is_trusted(path, tar) and (index := _load(path, stamp)) is not None:
            return index
    index = scan(tar)
    if not index.inventory.damaged():
        _save(index, stamp, paths)
    return index


def is_trusted(path: str | os.PathLike[str], tar: str) -> bool:
    """Return whether a file about a tar was written by this user, by root or by the tar's owner.

    A file that all users may write to is not trusted. At URLs, every file is trusted.
    """
    if storage.is_url(str(path)):
        return True
    try:
        status = os.stat(path)
    except OSError:
        return False
    owners = {os.geteuid(), 0}
    with contextlib.suppress(OSError):  # The tar may be missing.
        owners.add(0 if storage.is_url(tar) else os.stat(tar).st_uid)
    return status.st_uid in owners and not status.st_mode & stat.S_IWOTH


def scan(path: str) -> Index:
    """Read the headers of the tar at `path`, and return the tar's index.

    A file belongs to the latest record with its key. If this record already has a file of the same
    suffix, as in tars that `tar -A` joined, the file starts another record.

    Raises:
        ValueError: see `members`.
    """
    inventory, latest, archive = LeftOut(), dict[str, int](), 0
    keys, seen, suffixes, names = list[int](), set[tuple[int, str]](), list[str](), list[str]()
    numbers = array.array("q")  # The record, offset and size of each file.
    for member in members(path, inventory):
        if member.archive != archive:
            latest, archive = {}, member.archive
        key, suffix = split(member.name)
        record = latest.get(key, -1)
        if (record, suffix) in seen or record < 0:
            keys.append(len(keys) if record < 0 else keys[record])
            record = latest[key] = len(keys) - 1
        seen.add((record, suffix))
        suffixes.append(suffix)
        names.append(member.name)
        numbers.extend((record, member.offset, member.size))
    rows = np.array(numbers, np.int64).reshape(-1, 3)
    return Index(
        rows[:, 0],
        np.array(suffixes, str),
        rows[:, 1:],
        np.array(keys, int),
        inventory,
        _pack(names),
        _pack(inventory.take()),
    )


def unpack(column: UInt8[np.ndarray, "_"]) -> list[Any]:
    """Return the values of Index.names or Index.left, which take little memory as JSON."""
    return json.loads(column.tobytes())


def _pack(values: list[Any]) -> UInt8[np.ndarray, "_"]:
    return np.frombuffer(json.dumps(values).encode(), np.uint8)


class Member(NamedTuple):
    """A regular file in a tar: its name, and the offset and size of its contents in bytes."""

    name: str
    offset: int
    size: int
    archive: int
    """Number of end-of-archive marks before the file. Tars that `cat` joined contain such marks."""


def members(path: str, inventory: Inventory) -> Iterator[Member]:
    """Yield the regular files of a tar, and add everything else to `inventory`.

    If a header is damaged, reading continues at the next valid header. After an end-of-archive
    mark, the rest must be zeros or further members.

    In the inventory, hidden files, links and special files have their names in the tar. Damage has
    names such as "byte 5120". The number of files behind damaged headers is a lower bound.

    Raises:
        ValueError: the file is compressed, a pointer of Git LFS or not a tar, or is damaged before
            the end of the first file in it.
    """
    size, count, largest, archive, begin = storage.stamp(path)[0], 0, 0, 0, 0
    with files.path(path).open("rb") as file, tarfile.TarFile(fileobj=io.BytesIO(bytes(BLOCK))) as tar:
        head = file.read(len(untrusted.POINTER))
        if head == untrusted.POINTER:
            raise ValueError(f"{path} is {untrusted.IS_POINTER}")
        compressed = head.startswith(_COMPRESSED)
        tar.fileobj, tar.offset = file, file.seek(0)
        while not compressed:
            start = tar.offset
            # tarfile keeps all members; millions of them would fill the memory.
            tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
            if (member := _next(tar)) is not None:
                largest = max(largest, tar.offset - start)
                if not member.isfile() or member.issparse():
                    reason = "link" if member.islnk() or member.issym() else "special"
                    inventory.add(reason, [member.name] * (not member.isdir()))
                elif storage.is_hidden(member.name):
                    inventory.add("hidden", [member.name])
                elif member.offset_data + member.size <= size:
                    count += 1
                    yield Member(member.name, member.offset_data, member.size, archive)
                continue
            if start + BLOCK > size:
                inventory.add(_TRUNCATED, [f"byte {size}"])
                break
            gap = _gap(file, start, size)
            lost = gap.num_lost(begin, size, largest or size)
            inventory.add("broken_header", [f"byte {start}"], lost)
            if gap.end == size:
                if size - gap.last > _MAX_ZEROS:  # Preallocated, but not downloaded to the end.
                    inventory.add(_TRUNCATED, [f"byte {gap.last}"])
                break
            if gap.end - gap.last >= 2 * BLOCK:
                archive, begin = archive + 1, gap.end
            tar.offset = gap.end
            if gap.is_extension:
                _next(tar)  # Its name or size was in the damaged header.
    if compressed or (not count and inventory.damaged()):
        reason = "compressed): decompress it" if compressed else "no complete file): get it again"
        raise ValueError(f"cannot read {path} as a tar ({reason}")
    if inventory.damaged():
        logging.warning(
            "%s is damaged, and files in it are lost (%d or more): copy or download it again", path, inventory.damaged()
        )


def _next(tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    """Return the member whose header is at tar.offset, or None if there is no valid header."""
    start = tar.offset
    try:
        member = tar.next()
    except (tarfile.TarError, ValueError):  # Hostile headers raise several types.
        member = None
    if tar.offset > start:  # A negative size would lead back.
        return member
    tar.offset = start
    return None


class _Gap(NamedTuple):
    """A part of a tar, from `start` to `end`, that belongs to no member."""

    start: int
    end: int
    """Offset of the next valid header, or the size of the tar if there is none."""
    first: int
    """Offset of the first block that is not zero, or `start` if all are zero."""
    last: int
    """End of the last block that is not zero, or `start` if all are zero."""
    headers: int
    """Number of blocks that look like damaged headers of files."""
    is_extension: bool
    """Whether the first block is a damaged header that extends the next header."""

    def num_lost(self, begin: int, size: int, largest: int) -> int:
        """Return how many files were lost at least, or 0 if the gap is an end-of-archive mark.

        A mark has two blocks of zeros, or more that pad the archive, or ends the tar.

        Args:
            begin: offset of the archive's first header.
            size: size of the tar.
            largest: size of the largest member.
        """
        length, lost = self.end - self.start, self.last - self.start
        if not lost:
            padded = BLOCK < length <= tarfile.RECORDSIZE + BLOCK
            padded &= (self.end - begin) % tarfile.RECORDSIZE == 0
            if self.end == size or padded or length == 2 * BLOCK:
                return 0
            lost = length
        elif self.end == size:
            lost = self.last - self.first
        return max(1, self.headers, lost // largest)


def _gap(file: Any, start: int, size: int) -> _Gap:
    """Find the next valid header behind the block at `start` of an open tar of `size` bytes."""
    end, first, last, headers, is_extension, place = size, start, start, 0, False, file.seek(start)
    while end == size and (chunk := file.read(_CHUNK)):
        chunk += bytes(-len(chunk) % BLOCK)
        blocks = np.frombuffer(chunk, np.uint8).reshape(-1, BLOCK)
        is_valid = lambda row, chunk=chunk: _is_valid(chunk[row * BLOCK : (row + 1) * BLOCK])
        # In every valid header, these two bytes of the checksum are octal digits.
        rows = np.flatnonzero((blocks[:, 151:153] & 0xF8 == 0x30).all(1)).tolist()
        if valid := next(([r] for r in rows if place + r * BLOCK > start and is_valid(r)), []):
            end, blocks = place + valid[0] * BLOCK, blocks[: valid[0]]
        looks_valid = (blocks[:, 257:262] == np.frombuffer(b"ustar", np.uint8)).all(1)
        extends = looks_valid & np.isin(blocks[:, 156], np.frombuffer(b"LKxX", np.uint8))
        if place == start:
            is_extension = bool(extends[0]) and not is_valid(0)
        headers += int((looks_valid & ~extends).sum())
        if len(filled := np.flatnonzero(blocks.any(1))):
            first = place + int(filled[0]) * BLOCK if last == start else first
            last = place + (int(filled[-1]) + 1) * BLOCK
        place += len(chunk)
    return _Gap(start, end, first, min(last, size), headers, is_extension)


def _is_valid(header: bytes) -> bool:
    with contextlib.suppress(tarfile.TarError, ValueError):
        return bool(tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape"))
    return False


def split(name: str) -> tuple[str, str]:
    """Split a tar member's name into key and suffix: "a/1.t5.npy" gives "a/1" and "t5.npy".

    The key has Unicode's composed form, so that files of a record may have names in other forms.
    """
    folder, slash, file = name.removeprefix("./").rpartition("/")
    return unicodedata.normalize("NFC", folder + slash + file.partition(".")[0]), suffix_of(file)


def expand(pattern: str) -> list[str]:
    """Return all names that a pattern with braces stands for, as in a shell.

    "{a,b}" stands for a and b, and "{08..11}" for 08, 09, 10 and 11. The name of a file or folder
    that exists stands for itself.

    Raises:
        ValueError: there are more than a million names.
    """
    if os.path.exists(pattern):
        return [pattern]
    parts = list[tuple[int, Sequence[Any]]]()  # The width of numbers, and the choices.
    for at, part in enumerate(re.split(_BRACES, pattern)):
        if at % 2 and (match := re.fullmatch(_NUMBERS, part)):
            parts.append((len(match[1]), range(int(match[1]), int(match[2]) + 1)))
        else:
            parts.append((0, part.split(",") if at % 2 else [part]))
    if (count := math.prod(len(choices) for _, choices in parts)) > _MAX_NAMES:
        raise ValueError(f"{pattern} stands for {count:,} files: write a pattern for at most {_MAX_NAMES:,}")
    named = [[str(choice).zfill(width) for choice in choices] for width, choices in parts]
    return list(map("".join, itertools.product(*named)))


def find(path: str) -> list[str]:
    """Return the paths of all tars at `path`.

    Args:
        path: a tar, a folder (searched recursively), NeMo's list of tars (wdinfo.pkl), or a pattern
            such as "shard-{0000..0099}.tar". Each may be a URL.

    Raises:
        FileNotFoundError: a tar is missing.
        ValueError: a folder has no tars, or a wdinfo.pkl is damaged.
    """
    return find_stamped(path, Inventory())[0]


def find_stamped(path: str, inventory: Inventory) -> tuple[list[str], list[str]]:
    """Return (paths, stamps): the paths that `find` returns, and one string for each tar.

    A tar's string changes when the tar's contents change (see storage.stamps). In folders, files
    that are no tars are added to `inventory`.
    """
    tars = [tar for name in expand(path) for tar in _listed(name, inventory)]
    stamps = storage.stamps(tars)
    if any(stamps) and not all(stamps):
        missing = [tar for tar, stamp in zip(tars, stamps, strict=True) if not stamp]
        raise FileNotFoundError(
            f"{len(missing)} of the {len(tars)} tars {path} do not exist: copy {missing[0]}"
            f"{' and others' * (len(missing) > 1)}, or name only tars that exist"
        )
    check_exists([tar for tar, stamp in zip(tars, stamps, strict=True) if not stamp], "webdataset")
    return tars, stamps


def _listed(name: str, inventory: Inventory) -> list[str]:
    if name.endswith(".tar"):
        return [name]
    check_exists([name], "webdataset")
    if name.endswith(_WDINFO):
        return _wdinfo(name)
    if not storage.is_folder(name):
        return [name]
    names = storage.walk(name, inventory)
    tars = [tar for tar in names if suffix_of(tar).rpartition(".")[2] == "tar"]
    if not tars:
        raise ValueError(f"no .tar files in {name}: check the path, or read image files with data.source=folder")
    storage.warn_of_missing_shards(tars)
    _count_others(names, tars, inventory)
    return tars if storage.is_url(name) else _without_links(tars, name, inventory)


def _count_others(names: list[str], tars: list[str], inventory: Inventory) -> None:
    """Add the files beside tars to the inventory, except for those that this package wrote."""
    stems = {tar[: -len(".tar")] for tar in tars}
    own = {*tars, *(f"{tar}.index.npz" for tar in tars)}
    for name in (name for name in names if name not in own and os.path.basename(name) not in _OWN):
        stem, suffix = os.path.splitext(name)
        # img2dataset writes NAME.parquet and NAME_stats.json about NAME.tar.
        is_about = stem.removesuffix("_stats") in stems
        kind = records.other_kind(suffix[1:].lower(), ()) if is_about else records.beside(name, "beside_tars")
        inventory.add(kind, [name])


def _without_links(tars: list[str], folder: str, inventory: Inventory) -> list[str]:
    """Leave out local tars that are links to other ones of `tars`, and add them to `inventory`."""
    with ThreadPoolExecutor(32) as threads:  # Shared disks have a high latency.
        places = [(s.st_dev, s.st_ino) for s in threads.map(os.stat, tars)]
        are_links = threads.map(os.path.islink, tars)
        rows = sorted(zip(are_links, tars, places, strict=True))  # Links come last.
    kept = {place: tar for _, tar, place in reversed(rows)}
    left_out = [tar for _, tar, place in rows if kept[place] != tar]
    inventory.add("link", [os.path.relpath(tar, folder) for tar in left_out])
    return sorted(kept.values())


def _wdinfo(path: str) -> list[str]:
    """Return the paths of the tars that NeMo's wdinfo.pkl at `path` lists.

    In the file, relative paths are relative to the file's folder.
    """
    storage.refuse_pointer(path)
    try:
        info = _PlainUnpickler(io.BytesIO(files.path(path).read_bytes())).load()
        names = [str(name) for name in info["tar_files"]]
    except Exception as error:  # A damaged pickle can raise anything.
        raise ValueError(
            f"cannot read {path} as NeMo's list of tars (wdinfo.pkl): {error}; name the tars by a folder or a pattern"
        ) from error
    if not names:
        raise ValueError(f"{path} lists no tar files: name the tars by a folder or a pattern")
    folder = path.rpartition("/")[0]
    absolute = lambda name: name.startswith("/") or storage.is_url(name)
    return [name if absolute(name) or not folder else f"{folder}/{name}" for name in names]


class _PlainUnpickler(untrusted.Unpickler):
    """An unpickler of lists, dictionaries, numbers and strings that refuses to call functions."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"the pickle refers to {module}.{name}, but may hold only plain values")


def _load(path: str, stamp: np.ndarray) -> Index | None:
    with contextlib.suppress(Exception):  # A damaged index can raise anything; a new one is built.
        saved = untrusted.read_archive(io.BytesIO(files.path(path).read_bytes()))
        if np.array_equal(saved.pop("stamp"), stamp):
            inventory = Inventory(json.loads(str(saved["inventory"])))
            return Index(**{**saved, "inventory": inventory})


def _save(index: Index, stamp: np.ndarray, paths: list[str]) -> None:
    buffer = io.BytesIO()
    inventory = json.dumps(index.inventory.saved())
    np.savez(buffer, stamp=stamp, **{**index._asdict(), "inventory": np.array(inventory)})
    for path in paths:
        try:
            if not storage.is_url(path):
                os.makedirs(os.path.dirname(path) or ".", 0o700, exist_ok=True)
            return files.write_whole(path, buffer.getvalue())
        except OSError:
            continue  # The folder is read-only.
    logging.warning(
        "the index of a tar cannot be saved to any of the paths %s, so every start reads all "
        "headers of the tar: make the folder of one of these paths writable",
        paths,
    )


def _digest(tar: str) -> str:
    name = tar if storage.is_url(tar) else os.path.realpath(tar)
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def cache_folders() -> list[pathlib.Path]:
    """Return the folders for the indices of tars in read-only folders, the preferred one first.

    A folder that exists but belongs to another user, or that all users may write to, is left out.
    """
    folders = [pathlib.Path(tempfile.gettempdir()) / f"diffusion_jax-{os.geteuid()}"]
    with contextlib.suppress(ValueError):  # A user without a home folder.
        folders.insert(0, user_cache() / "diffusion_jax/tar_index")
    return [folder for folder in folders if _is_own(folder)]


def _is_own(folder: pathlib.Path) -> bool:
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return True  # It will be created with mode 0700.
    except OSError:
        return False
    mine = status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)
    return mine and not status.st_mode & stat.S_IWOTH
