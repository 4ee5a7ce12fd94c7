"""Join a table's pictures with text embeddings in other tars, by their names, without copying.

NeMo's precaching writes embeddings as `SOURCE_TAR/KEY.pickle`. The embedding of the picture KEY in
the tar SOURCE_TAR, or of the picture KEY of any tar or folder, becomes its text in a column of the
table (table.Table.join). It stays in its file. If several tars have an embedding KEY, it is that of
the picture KEY in the tar of the same name as its own.
"""

import collections
import hashlib
import os
import pathlib
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from diffusion_jax.data import home, reading, storage, tars
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import TEXTS, Inventory
from diffusion_jax.data.reading import TAR, Place
from diffusion_jax.data.records import read_text
from diffusion_jax.data.sources import webdataset
from diffusion_jax.data.table import InPlace, Table
from diffusion_jax.files import sorted_tables, untrusted
from diffusion_jax.logs import progress

_READ = 64  # Number of embeddings that are read together.
_NAMED = 2**14  # Number of pictures whose names are held in memory together.
_FORMATS = {"npy": 0, "npz": 1, "safetensors": 2, "pickle": 3, "pkl": 3}  # By suffix.
_ROW = np.dtype([("hash", sorted_tables.KEY), ("tar", "i4"), ("format", "i4"), ("at", "i8"), ("size", "i8")])
"""An embedding: a hash of its name without suffix, its place, and the number of its format."""


def attach(table: Table, column: str, stored: str, key: str = "") -> list[tuple[str, str]]:
    """Write the card of a column beside the table's own, and return what was joined, for printing.

    Every joined embedding is read once, to report those that are damaged or have another width.

    Args:
        table: a whole table in a folder.
        column: the name of the column in data.text, such as "t5.npy".
        stored: tars of embeddings: a tar, a folder, a pattern, or a wdinfo.pkl.
        key: the path of the array in pickles; see embeddings.read_pickle.

    Raises:
        ValueError: no embedding belongs to any picture, one belongs to several, or a tar or
            `column` is not usable.
        FileNotFoundError: a tar is missing.
    """
    if not re.fullmatch(home.COLUMN, column):
        raise ValueError(f"--column={column.removesuffix('.npy')}: use letters, digits, - and _")
    containers = {os.path.basename(name) for name, kind in table.card["files"] if kind == TAR}
    found = _Embeddings(stored, key, containers)
    inventory = Inventory(table.card["inventory"])
    for kind in (TEXTS, "no_caption"):
        inventory.counts.pop(kind, None)
        inventory.first.pop(kind, None)
    joined = _joined(table, found)
    if not (joined >= 0).any():
        first = ", ".join(found.names(range(min(3, len(found))))) or "none"
        raise ValueError(
            f"no embedding in {stored} has the name of a picture of {table.card['root']}: the "
            f"first embeddings are {first}. The "
            "embedding of the picture KEY must be named KEY or TAR/KEY, or be in a tar of the same name"
        )
    of_several = np.unique(joined[joined >= 0], return_counts=True)
    if len(several := of_several[0][of_several[1] > 1]):
        pictures = table.names(np.flatnonzero(joined == several[0])[:2].tolist())
        raise ValueError(
            f"{len(several):,} of the embeddings in {stored} have the names of several pictures, such as "
            f"{found.names(several[:1])[0]} that of {' and '.join(pictures)}: name embeddings TAR/KEY, "
            "or their tars like those of the pictures, and attach to each folder of pictures by itself "
            "if their tars have equal names"
        )
    texts = ([found.text(number)] if number >= 0 else [] for number in joined.tolist())
    used, bare = np.unique(joined[joined >= 0]), np.flatnonzero(joined < 0)
    alone = np.setdiff1d(np.arange(len(found)), [*used, *found.repeated])
    inventory.add(TEXTS, (), len(used))
    inventory.add("no_picture", found.names(alone[:3]), len(alone))
    inventory.add("duplicate_key", found.names(found.repeated[:3]), len(found.repeated))
    origin = f"KEY.{column.removesuffix('.npy')} in {stored}"
    table.join(home.column_card(column), column, texts, origin, inventory)
    rows = [("joined", f"{len(joined) - len(bare):,} of {len(joined):,} pictures")]
    for label, names, number in (
        ("damaged tars", found.damaged[:3], len(found.damaged)),
        ("no embedding", table.names(bare[:3].tolist()), len(bare)),
        ("no picture", found.names(alone[:3]), len(alone)),
        ("duplicates", found.names(found.repeated[:3]), len(found.repeated)),
        *_damage(found, used.tolist()),
    ):
        if number:
            names = ", ".join([*names, *["..."] * (number > len(names))])
            rows.append((label, untrusted.printable(f"{number:,}: {names}")))
    return rows


class _Embeddings:
    """The embeddings in tars, sorted by a hash of their names without suffix."""

    def __init__(self, stored: str, key: str, containers: Collection[str]):
        """List the embeddings. `containers` are the names of the pictures' tars."""
        url = storage.is_url(stored)
        self._tars = [path if url else os.path.abspath(path) for path in tars.find(stored)]
        self._formats = ["npy", "npz", "safetensors", f"pickle:{key}"]
        self._list(())
        same = [name for path in self._tars if (name := os.path.basename(path)) in containers]
        of_tars = self._rows["tar"]
        self.is_by_tar: bool = bool(same) and bool((of_tars[self.repeated] != of_tars[self.repeated + 1]).any())
        """Whether embeddings belong to the pictures of the tar of the same name."""
        if self.is_by_tar:
            self._list(containers)
            if twice := [name for name, number in collections.Counter(same).items() if number > 1]:
                raise ValueError(f"{stored} has several tars {twice[0]}: attach those of each folder by themselves")

    def _list(self, containers: Collection[str]) -> None:
        """List the embeddings, in these tars by the name of the tar and their own."""
        self.damaged, rows, containers = list[str](), list[np.ndarray](), {*containers}
        folders = {f"{name}/" for of in containers for name in (of, os.path.splitext(of)[0])}
        for number, index in enumerate(webdataset.indices(self._tars, "tars listed")):
            if isinstance(index, ValueError):
                self.damaged.append(str(index))
                continue
            if lost := index.inventory.damaged():
                self.damaged.append(f"{self._tars[number]} ({lost} files or more are lost)")
            own = os.path.basename(self._tars[number])
            is_bare = lambda stem, own=own: own in containers and stem[: stem.find("/") + 1] not in folders
            of_index = [
                (_hash(f"{own}/" * is_bare(stem) + stem), number, _FORMATS[last], at, size)
                for name, (at, size) in zip(tars.unpack(index.names), index.span.tolist(), strict=True)
                for stem, suffix in [tars.split(name)]
                if (last := suffix.rpartition(".")[2]) in _FORMATS
            ]
            rows.append(np.array(of_index, _ROW))
        every = np.concatenate(rows) if rows else np.zeros(0, _ROW)
        self._rows = every[np.argsort(every["hash"], kind="stable")]
        same = self._rows["hash"][1:] == self._rows["hash"][:-1]
        self.repeated: np.ndarray = np.flatnonzero(same)
        """All but the last of several embeddings with one name."""

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, hashes: Sequence[bytes]) -> np.ndarray:
        """Return the number of the last embedding with each hash, or -1."""
        wanted, known = np.array(hashes, _ROW["hash"]), self._rows["hash"]
        at = np.searchsorted(known, wanted, side="right") - 1
        return np.where((at >= 0) & (known[at] == wanted), at, -1) if len(known) else at

    def text(self, number: int) -> InPlace:
        row = self._rows[number]
        place = Place(self._tars[row["tar"]], int(row["at"]), int(row["size"]), TAR)
        return InPlace(place, self._formats[row["format"]])

    def names(self, numbers: Any) -> list[str]:
        """Return the names of a few embeddings in their tars."""
        found = []
        for tar, at in self._rows[list(numbers)][["tar", "at"]].tolist():
            index = tars.load_index(self._tars[tar])
            member = index.span[:, 0].tolist().index(at)
            found.append(f"{self._tars[tar]}/{tars.unpack(index.names)[member]}")
        return found


def _hash(stem: str) -> bytes:
    return hashlib.blake2b(os.fsencode(stem), digest_size=sorted_tables.KEY_SIZE).digest()


def _joined(table: Table, found: _Embeddings) -> np.ndarray:
    """Return the number of each picture's embedding, or -1."""
    joined = np.full(len(table), -1)
    for first in range(0, len(table), _NAMED):
        rows = range(first, min(first + _NAMED, len(table)))
        names = zip(table.names(rows), table.places(rows), strict=True)
        stems = [(tars.split(name.removeprefix(f"{of.file}/"))[0], of) for name, of in names]
        part = joined[first : first + len(rows)]
        for prefix in (  # The first name that exists wins.
            lambda tar: f"{tar.name}/",
            lambda tar: f"{tar.stem}/",
            *([] if found.is_by_tar else [lambda tar: ""]),
        ):
            hashes = [_hash(prefix(pathlib.PurePath(of.file)) + stem) for stem, of in stems]
            part[:] = np.where(part < 0, found.find(hashes), part)
    return joined


def _damage(found: _Embeddings, used: Sequence[int]) -> list[tuple[str, list[str], int]]:
    """Read the embeddings, and return (label, first names, number) of those that look wrong."""
    widths, damaged = collections.defaultdict[int, list[int]](list), list[tuple[int, str]]()
    batches = [used[first : first + _READ] for first in range(0, len(used), _READ)]
    for batch in progress.reported(batches, len(used), "embeddings read", size=len):
        texts = [found.text(number) for number in batch]
        (contents,) = reading.read([[text.place for text in texts]])
        for number, text, content in zip(batch, texts, contents, strict=True):
            if not isinstance(content, Unusable):
                content = read_text(content, text.format)
            if isinstance(content, Unusable):
                damaged.append((number, str(content)))
            else:
                widths[content.shape[1]].append(number)
    named = [f"{found.names([n])[0]} ({error})" for n, error in damaged[:3]]
    result = [("damaged", named, len(damaged))]
    for width in sorted(widths, key=lambda width: len(widths[width]))[:-1]:
        numbers = widths[width]
        result.append((f"width {width}", found.names(numbers[:3]), len(numbers)))
    return result
