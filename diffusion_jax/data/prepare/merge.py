"""Merge tars of images with tars of text embeddings into tars for training.

NeMo's precaching writes embeddings as `SOURCE_TAR/KEY.pickle`. They become `KEY.npy` beside the
images of SOURCE_TAR. The unpickler creates only arrays and dictionaries, and never runs code from a
file.
"""

import bisect
import collections
import functools
import hashlib
import io
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from diffusion_jax import files
from diffusion_jax.config.settings import EMBEDDINGS
from diffusion_jax.data import storage
from diffusion_jax.data import tars as tar_files
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.engines import ALONE, Engine
from diffusion_jax.data.inventory import Inventory
from diffusion_jax.files import folder_lock, sorted_tables, untrusted

_ARRAYS = {
    ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"),
    *((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}  # fmt: skip


_ROW = np.dtype([("key", sorted_tables.KEY), ("tar", "i4"), ("offset", "i8"), ("size", "i8"),
                 ("suffix", "S32")])  # fmt: skip
"""A table row for one embedding: a hash of its name without suffix, the number of its tar, its byte
range in the tar, and its suffix."""


def merge(
    images: str, embeddings: str, out: pathlib.Path, key: str = "", engine: Engine = ALONE
) -> dict[str, int]:
    """For each tar of images, write a tar of the images and their embeddings into `out`.

    Tars that exist in `out` are skipped. An embedding named TAR/KEY, with or without .tar after
    TAR, belongs to the record KEY of that tar. An embedding named KEY, without a folder, belongs to
    the record KEY of any tar.

    Args:
        images: Tars of images: a tar, a folder, a pattern, or a wdinfo.pkl.
        embeddings: Tars of embeddings, given in the same way.
        out: The folder of the merged tars.
        key: The path of the array in pickles, such as "embeddings_t5_xxl/encodings"; see
            `read_pickle`.
        engine: Distributes the work.

    Returns:
        The numbers of "merged" records and of "no_embedding" records, which are dropped because
        they have no embedding, and of records with a "duplicate_key" or a "wrong_checksum" (see
        `tars.write`), which are dropped too. Skipped tars are not counted.

    Raises:
        ValueError: If no embedding belongs to any record.
        Busy: If another process merges into `out`.
    """
    tars = tar_files.find(images)
    stored, stamps = tar_files.find_stamped(embeddings, Inventory())
    names = [pathlib.PurePath(tar).name for tar in tars]
    if len(set(names)) < len(tars):
        raise ValueError(
            f"several tars of {images} have the same name: merge each folder separately"
        )
    digest = hashlib.blake2b(json.dumps([stored, stamps]).encode(), digest_size=8).hexdigest()
    places = _Places(out / f"places-{digest}.tmp", len(stored))
    with folder_lock.FolderLock(out):
        places.folder.mkdir(exist_ok=True)
        write = functools.partial(_write_list, stored, places)
        engine.fill(range(len(stored)), places.listed, write, noun="tars", name="listing")
        rows = sum(places.listed(i).stat().st_size for i in range(len(stored))) // _ROW.itemsize
        places = places._replace(ranges=sorted_tables.num_ranges(rows))
        engine.fill(range(places.ranges), places.sorted, places.sort, noun="ranges", name="sorting")
        path = lambda number: out / names[number]
        files.remove_unfinished(map(path, range(len(tars))))
        write = functools.partial(_write_joined, tars, stored, places, out, key)
        counts = engine.fill(range(len(tars)), path, write, noun="tars", name="joining")
        files.remove_tree(places.folder)
    if counts["no_embedding"] and not counts["merged"]:
        raise ValueError(
            f"no embedding in {embeddings} has the name of a record of {images}: the first "
            "embeddings are "
            f"{', '.join(itertools.islice((stem for stem, *_ in _members(stored[0])), 3))}. The "
            "embedding of the record KEY must be named KEY or TAR/KEY"
        )
    return dict(counts)


def read_pickle(contents: bytes, key: str = "") -> Float[np.ndarray, "L D"]:
    """Return the embeddings in a pickle of nested dictionaries, without running code in it.

    Args:
        contents: The bytes of the pickle.
        key: The path of the array, such as "embeddings_t5_xxl/encodings". "" reads the array called
            "encodings" or, if there is none, the only array.

    Raises:
        ValueError: The array is missing or is not floats [tokens, width], or the pickle holds
            anything but arrays and plain values.
    """
    try:
        tree = _ArrayUnpickler(io.BytesIO(contents)).load()
    except Exception as error:  # A damaged pickle can raise anything.
        raise ValueError(f"cannot read embeddings from a pickle: {error}") from error
    arrays = dict(_flat(tree))
    names = [name for name in arrays if name == key or (not key and _last(name) == "encodings")]
    names = names or ([] if key else list(arrays))
    if len(names) != 1:
        raise ValueError(
            f"the pickle holds {', '.join(arrays) or 'no arrays'}: choose one array with --key"
        )
    array = arrays[names[0]]
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        actual = f"{array.dtype}{list(array.shape)}"
        raise ValueError(f"{names[0]} in the pickle is {actual}: expected floats [tokens, width]")
    return array


class _ArrayUnpickler(untrusted.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct":  # numpy's would allocate any shape that the file names.
            return lambda *_: np.ndarray((0,), "b")  # The array's state holds the real shape.
        if (module, name) in _ARRAYS:
            return super().find_class(module, name)
        raise ValueError(f"the pickle refers to {module}.{name}, but may hold only arrays")


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tree, np.ndarray):
        yield prefix.rstrip("/"), tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from _flat(value, f"{prefix}{name}/")


def _last(name: str) -> str:
    return name.rpartition("/")[2]


class _Places(NamedTuple):
    """Temporary tables that record where each embedding is stored (see files/sorted_tables.py)."""

    folder: pathlib.Path
    tars: int
    """The number of tars of embeddings."""
    ranges: int = 0
    """The number of ranges of keys, which is set once the tables of all tars are written."""

    def listed(self, tar: int) -> pathlib.Path:
        return self.folder / f"listed-{tar:08}"

    def sorted(self, number: int) -> pathlib.Path:
        return self.folder / f"sorted-{number:08}"

    def sort(self, number: int) -> None:
        """Write the table of all embeddings with keys in range `number`.

        If several embeddings have the same name, the table holds only the last one.
        """
        paths = map(self.listed, range(self.tars))
        rows = sorted_tables.read_range(paths, _ROW, number, self.ranges)
        files.write_whole(self.sorted(number), sorted_tables.first_of_each(rows[::-1]).tobytes())

    def find(self, stem: str) -> Any:
        key = np.frombuffer(_hash(stem), sorted_tables.KEY)[0]
        rows = sorted_tables.read(self.sorted(sorted_tables.range_of(key, self.ranges)), _ROW)
        at = bisect.bisect_left(rows["key"], key)
        exists = at < len(rows) and rows["key"][at] == key
        return rows[at].copy() if exists else None  # A view would keep the file open.


def _hash(stem: str) -> bytes:
    return hashlib.blake2b(_raw(stem), digest_size=sorted_tables.KEY_SIZE).digest()


def _raw(name: str) -> bytes:
    """Return the bytes of a member's name, which may not be valid UTF-8."""
    return name.encode(errors="surrogateescape")


def _write_list(stored: Sequence[str], places: _Places, number: int) -> None:
    """Write the table that lists the embeddings in tar `number` of the tars `stored`."""
    rows = []
    for stem, offset, size, suffix in _members(stored[number]):
        if len(_raw(suffix)) > (most := _ROW["suffix"].itemsize):
            raise ValueError(
                f"{stored[number]} holds {stem}.{suffix}, whose suffix has more than {most} "
                "bytes: give this file a shorter suffix"
            )
        rows.append((_hash(stem), number, offset, size, _raw(suffix)))
    sorted_tables.write(places.listed(number), np.array(rows, _ROW))


def _members(tar: str) -> Iterator[tuple[str, int, int, str]]:
    """Yield (name without suffix, offset, size, suffix) of each embedding in a tar."""
    for member in tar_files.members(tar, Inventory()):
        stem, suffix = tar_files.split(member.name)
        if suffix in ("pickle", "pkl") or suffix.rpartition(".")[2] in EMBEDDINGS:
            yield stem, member.offset, member.size, suffix


def _write_joined(
    tars: Sequence[str], stored: Sequence[str], places: _Places, out: pathlib.Path, key: str,
    number: int,
) -> collections.Counter[str]:  # fmt: skip
    """Write tar `number` of the images with its embeddings, and return counts of its records.

    `places` locates the embeddings in the tars `stored`.
    """
    counts, tar = collections.Counter[str](), tars[number]
    records = _joined(tar, functools.cache(places.find), stored, key, counts)
    tar_files.write(out / pathlib.PurePath(tar).name, records)
    return counts


def _joined(
    tar: str,
    find: Callable[[str], Any],
    stored: Sequence[str],
    key: str,
    counts: collections.Counter[str],
) -> Iterator[dict[str, bytes]]:
    """Yield the files of each record that has an embedding, together with the embedding.

    Args:
        tar: The tar of images.
        find: Maps an embedding's name to its row in the table, or to None.
        stored: The tars of embeddings.
        key: The path of the array in pickles, as in `merge`.
        counts: The numbers of merged and of dropped records are added here, as in `merge`.
    """
    path = pathlib.PurePath(tar)
    # The files of a record need not be adjacent (see tars.scan).
    members = collections.defaultdict[str, list[tar_files.Member]](list)
    for member in tar_files.members(tar, Inventory()):
        members[tar_files.split(member.name)[0]].append(member)
    with files.path(tar).open("rb") as file:
        for stem, group in members.items():
            suffixes = [tar_files.split(member.name)[1] for member in group]
            if len(set(suffixes)) < len(group):
                counts["duplicate_key"] += 1
                continue
            names = (f"{path.name}/{stem}", f"{path.stem}/{stem}", stem)
            place = next((row for row in map(find, names) if row is not None), None)
            if place is None:
                counts["no_embedding"] += 1
                continue
            try:
                read = {s: _contents(file, m) for s, m in zip(suffixes, group, strict=True)}
                read |= _embedding(stored, place, key)
            except Unusable as error:
                counts[error.reason] += 1
                continue
            counts["merged"] += 1
            yield {tar_files.KEY: _raw(stem), **read}


def _embedding(stored: Sequence[str], place: Any, key: str) -> dict[str, bytes]:
    first, suffix = int(place["offset"]), place["suffix"].decode(errors="surrogateescape")
    (member,) = storage.read_ranges(
        [stored[int(place["tar"])]], [first - tar_files.BLOCK], [first + int(place["size"])]
    )
    contents = tar_files.contents(member)
    if suffix not in ("pickle", "pkl"):
        return {suffix: contents}
    array = io.BytesIO()
    np.save(array, read_pickle(contents, key))
    return {"npy": array.getvalue()}


def _contents(file: Any, member: tar_files.Member) -> bytes:
    file.seek(member.offset - tar_files.BLOCK)
    return tar_files.contents(file.read(tar_files.BLOCK + member.size))
