"""Tables of data sets: what is known of each picture, in small files that are mapped into memory.

An importer (data/sources) reads foreign files once, and yields a Row for each picture. `write`
stores the rows, and Table reads them in any order. So training knows one kind of data.

A table is a folder. Its card.json names the files of its parts. A part has at most PART rows:

    HASH.rows.arrow     place of the picture: file int32 (its number in the card; -1: the name is
                        the file), at int64, size int64; key uint64; text list<int32>, numbers of
                        rows in the next file; weight list<float64>, unless all texts have one;
                        number_NAME float64 for each field (NaN: unreadable or missing)
    HASH.texts.arrow    the distinct texts: text large_binary; kind uint8: a caption, an Unusable
                        error, or the format of embeddings in a file; file, at and size, the place
                        of these
    HASH.names.arrow    name, image, mask and note large_binary, origin list<int32>

Beside these, HASH.left.arrow holds name and reason, large_binary, of the files that are no rows,
HASH.without.arrow the rows that `leave_out` left out (row int64), and HASH.pictures the pictures
that lie in no file from which they can be read one by one.

A column is a second table of the same rows, with other texts. Its card is in the same folder, and
its parts share all files but HASH.texts.arrow and HASH.joined.arrow, whose columns text and origin
replace those of the rows.

The files are named by their values (see mapped.py): equal parts of several tables are stored once,
and an import that was killed leaves no file that another import could take for a different one.
"""

import array
import bisect
import contextlib
import copy
import hashlib
import itertools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt64

from diffusion_jax import files
from diffusion_jax.data import captions, mapped, reading, records
from diffusion_jax.data.captions import Captions
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import PICTURES, Inventory, LeftOut
from diffusion_jax.data.reading import Place
from diffusion_jax.data.records import Record, Records
from diffusion_jax.files import untrusted

PART = 2**18
"""The largest number of rows of a part."""
CARD = "card.json"
FILE = re.compile(r"[0-9a-f]{24}\.((rows|texts|joined|names|left|without)\.arrow|pictures)")
"""The pattern of the names of a table's other files."""
_VERSION = 2  # Of the rules that pair pictures with captions, too.
_CAPTION, _UNUSABLE, _IN_PLACE = range(3)  # The kinds of texts.
_KEPT = "kept"  # The kind of the file HASH.pictures in the card.
_LEFT_OUT = Unusable("left_out", "`data edit --leave_out` names it")


class InPlace(NamedTuple):
    """A text that stays in its file, such as embeddings."""

    place: Place
    format: str
    """The place in data.text, such as "t5.npy"; see records.read_text."""
    weight: float = 1.0


class Row(NamedTuple):
    """What an importer knows of a picture."""

    name: str
    """The name of the picture in messages. Of an image file in a folder, its path in it."""
    key: int
    """An integer from 0 to 2^64 - 1 that stays the same if other pictures are added."""
    image: Place | bytes
    """Where the picture is. Its bytes, if they are compressed there, are stored with the table."""
    text: str | Captions | Unusable | Sequence[InPlace] = ()
    """The caption, several captions, the reason for which they cannot be read, or the places of
    embeddings. An empty sequence: the picture has no text."""
    origins: Sequence[str] = ()
    """Where each of the texts comes from, for people: "NAME.txt", or "train.csv: text"."""
    numbers: Mapping[str, float | Unusable] = {}
    """The numbers of data.fields, keyed by Field.name."""
    mask: Place | None = None
    """The file of the loss's weights."""


class Table(Records):
    """A list of pictures with texts, read through a table.

    A view of a table has some of the rows, in the same order.
    """

    def __init__(self, home: str | os.PathLike[str] | Mapping[str, bytes], root: str | None = None, card: str = CARD):
        """Open the table in a folder, and check its files against the card.

        Args:
            home: the folder, or the dictionary that `write` filled.
            root: where the data set is now; None means where it was when the table was written.
            card: the name of the card; `card_of` returns that of an earlier table in the folder.

        Raises:
            FileNotFoundError: there is no table in the folder, or a file is missing.
            ValueError: a file has changed, or another version wrote the table.
        """
        self.home = None if isinstance(home, Mapping) else files.path(home)
        """The folder of the table, or None if it is in memory."""
        self.card = _read_card(home, card)
        self.card |= {} if root is None else {"root": root}
        self._contents = home if isinstance(home, Mapping) else {}
        for path in [self.home / name for name in files_of(self.card)] if self.home else ():
            if not path.exists():
                raise FileNotFoundError(f"there is no {path}: import the data again")
        opened = lambda part: {kind: mapped.open_columns(home, of) for kind, of in part.items()}
        self._parts = [_Part(**opened(part)) for part in self.card["parts"]]
        self._left = mapped.open_columns(home, self.card["left"])
        self._without = np.zeros(0, np.int64)
        if "without" in self.card:
            self._without = mapped.open_columns(home, self.card["without"])["row"]
        self._firsts = np.cumsum([0, *(len(part) for part in self._parts)])
        self._beside: Sequence[tuple[str, str]] = ()
        self.prefix = ""
        """What the names of all rows begin with, if it is not the file that holds them."""
        self._rows: np.ndarray | None = None  # The rows of a view.
        self._bare: Any = Unusable("no_caption", "it has no text")

    def view(self, rows: Int[np.ndarray, "N"], bare: str | None = None) -> "Table":
        """Return a view of these sorted rows. A row without texts has the caption `bare`."""
        view = copy.copy(self)
        view._rows = rows if len(rows) < self._firsts[-1] else None
        view._bare = self._bare if bare is None else bare
        return view

    def whole(self) -> "Table":
        """Return the table of which this is a view."""
        return self.view(np.arange(self._firsts[-1]))

    def copy(self, home: str | os.PathLike[str]) -> None:
        """Write the whole table into another folder. It names the data set by its absolute path."""
        folder, root = files.path(home), self.card["root"]
        folder.mkdir(parents=True, exist_ok=True)
        for name in files_of(self.card):
            content = self._contents.get(name) or (self.home / name).read_bytes()  # pyright: ignore
            files.write_whole(folder / name, content)
        left = _store_left(folder, self._named_left())
        card = self.card | {"root": root if "://" in root else os.path.abspath(root), "left": left}
        files.write_whole(folder / CARD, _written(card))

    def join(self, card: str, text: str, texts: Iterable[Sequence[InPlace]], origin: str, inventory: Inventory) -> None:
        """Write a second table with other texts into the folder of this one.

        Args:
            card: the name of its card.
            text: its data.text.
            texts: the texts of each row of the whole table.
            origin: where all of these come from, for people.
            inventory: the files that were used and left out.
        """
        shared, parts, texts = _Shared(self.card["root"], self.home), list[Any](), iter(texts)
        shared.files = [(name, kind) for name, kind in self.card["files"]]
        for part, of in zip(self._parts, self.card["parts"], strict=True):
            writer = _Writer(shared, ())
            for found in itertools.islice(texts, len(part)):
                writer.add_texts(found, [origin] * len(found))
            columns = writer.columns()
            joined = {"text": columns["rows"]["text"], "origin": columns["names"]["origin"]}
            files = {"texts": columns["texts"], "joined": joined}
            parts.append(of | {kind: mapped.store(self.home, kind, c) for kind, c in files.items()})
        changes = {
            "parts": parts,
            "files": shared.files,
            "origins": list(shared.origins),
            "rule": self.card["rule"] | {"text": text},
            "inventory": inventory.saved(),
        }
        self._write_card(card, changes)

    def leave_out(self, card: str, rows: Int[np.ndarray, "W"]) -> None:
        """From now on, skip these sorted rows of the whole table, and no others, when reading.

        `card` is the name of the table's card, which is replaced.
        """
        inventory = Inventory(self.card["inventory"])
        inventory.counts[PICTURES] += inventory.counts.pop(_LEFT_OUT.reason, 0) - len(rows)
        inventory.first.pop(_LEFT_OUT.reason, None)
        inventory.add(_LEFT_OUT.reason, self.whole().names(rows[:3].tolist()), len(rows))
        columns = mapped.flat({"row": array.array("q", rows.tolist())})
        without = mapped.store(self.home, "without", columns)
        self._write_card(card, {"without": without, "inventory": inventory.saved()})

    def _write_card(self, name: str, changes: Mapping[str, Any]) -> None:
        card = {**self.card, **changes}
        card["id"] = _digest(card)
        files.write_whole(self.home / name, _written(card))  # pyright: ignore[reportOptionalOperand]

    def id(self) -> str:
        """Return a digest of all rows with their texts. Copies of a data set have equal digests."""
        return self.card["id"]

    def __len__(self) -> int:
        return int(self._firsts[-1]) if self._rows is None else len(self._rows)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Return the pictures with these indices and their texts.

        Raises OSError if a file was removed, and ValueError if a file of several pictures changed.
        """
        found = [self._parts[part].row(row, self) for part, row in self._inside(indices)]
        groups = [[row.image, *([row.mask] if row.mask else []), *_places(row.text)] for row in found]
        for number in self._are_left_out(indices):
            groups[number] = []
        contents = reading.read(groups)
        return [self._record(row, of) for row, of in zip(found, contents, strict=True)]

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """Return the texts of the pictures. Only texts that stay in their files are read."""
        found = [self._parts[part].text(row, self) for part, row in self._inside(indices)]
        for number in self._are_left_out(indices):
            found[number] = _LEFT_OUT
        contents = reading.read([_places(text) for text in found])
        return [_joined(text, of) for text, of in zip(found, contents, strict=True)]

    def heads(self, indices: Sequence[int]) -> list[bytes]:
        return reading.ends(self.places(indices), records.HEAD)

    def ends(self, indices: Sequence[int]) -> list[bytes]:
        return reading.ends(self.places(indices), -records.HEAD)

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """Return the key of each row."""
        rows = indices if self._rows is None else self._rows[indices]
        parts = np.searchsorted(self._firsts, rows, side="right") - 1
        keys = np.zeros(len(rows), np.uint64)
        for part in np.unique(parts).tolist():
            at = parts == part
            keys[at] = self._parts[part].rows["key"][rows[at] - self._firsts[part]]
        return keys

    def places(self, indices: Sequence[int]) -> list[Place]:
        """Return where the picture of each row lies."""
        return [self._parts[part].place(row, self) for part, row in self._inside(indices)]

    def names(self, indices: Sequence[int]) -> list[str]:
        """Return the name of each row."""
        return [self._parts[part].name(row, self) for part, row in self._inside(indices)]

    def origins(self, indices: Sequence[int]) -> list[tuple[str, ...]]:
        """Return where each of the texts of each row comes from."""
        codes = (self._parts[part].origins(row) for part, row in self._inside(indices))
        return [tuple(self.card["origins"][code] for code in of_row) for of_row in codes]

    def row(self, index: int) -> Row:
        """Return all that is known of a row."""
        [(part, row)] = self._inside([index])
        return self._parts[part].row(row, self)._replace(origins=self.origins([index])[0])

    def distinct(self, column: str) -> Iterator[tuple[Any, int, int]]:
        """Yield (value, number, first row) of each distinct value in each part of the whole table.

        `column` is "text" or "origin". A text that is in several parts is yielded several times.
        """
        for part, start in zip(self._parts, self._firsts, strict=False):
            for number, count, row in part.distinct(column):
                text = column == "text"
                value = part.distinct_text(number, self) if text else self.card["origins"][number]
                yield value, count, int(start) + row

    def bare(self) -> Int[np.ndarray, "N"]:
        """Return the rows without any text, of the whole table."""
        parts = zip(self._parts, self._firsts, strict=False)
        return np.concatenate([part.bare() + first for part, first in parts])

    def lacks_number(self, field: str) -> Bool[np.ndarray, "N"]:
        """Return for each row of the whole table whether its number is missing, not just wrong."""
        return np.concatenate([part.lacks_number(field) for part in self._parts])

    def lacks_mask(self) -> Bool[np.ndarray, "N"]:
        """Return for each row of the whole table whether it has no file with a mask."""
        return np.concatenate([part.lacks_mask() for part in self._parts])

    def left(self) -> Iterator[tuple[str, str]]:
        """Yield (name, reason) of each file that is no row, and of pictures that are left out."""
        yield from self._named_left()
        for rows, reason in ((self._dropped(), "no_caption"), (self._without.tolist(), _LEFT_OUT.reason)):
            yield from ((name, reason) for name in self.whole().names(rows))

    def _named_left(self) -> Iterator[tuple[str, str]]:
        for name, reason in zip(self._left["name"], self._left["reason"], strict=True):
            yield os.fsdecode(name), reason.decode()
        yield from self._beside

    def add_beside(self, inventory: LeftOut) -> None:
        """Also name and count these files, which are no rows and may change without the rows."""
        whole = self.inventory()
        whole.update(inventory)
        self.card["inventory"], self._beside = whole.saved(), inventory.take()

    def inventory(self) -> Inventory:
        """Return the files that were used and left out, and the pictures that a view leaves out."""
        inventory = Inventory(self.card["inventory"])
        inventory.counts[PICTURES] -= int(self._firsts[-1]) - len(self)
        if dropped := self._dropped():
            inventory.add("no_caption", self.whole().names(dropped[:3]), len(dropped))
        return inventory

    def files(self) -> list[str]:
        """Return the files that are read again in training; the captions are in the table."""
        containers = (self.container(number)[0] for number in range(len(self.card["files"])))
        found = (self.path(name) for part in self._parts for name in part.files())
        return [*dict.fromkeys(containers), *found]

    def container(self, number: int) -> tuple[str, str]:
        """Return the path or URL of a file in the card, and the kind of the places in it."""
        name, kind = self.card["files"][number]
        if kind == _KEPT and self.home:
            return os.fspath(self.home / name), reading.BYTES
        return self.path(name), kind

    def path(self, name: str) -> str:
        """Return the path or URL of a file, whose `name` is relative to the data set's root."""
        return _beside(self.card["root"], name)

    def _are_left_out(self, indices: Sequence[int]) -> list[int]:
        """Return the positions in `indices` of the rows that `leave_out` left out."""
        rows = np.asarray(indices, np.int64)
        rows = rows if self._rows is None else self._rows[rows]
        return np.flatnonzero(np.isin(rows, self._without)).tolist() if len(self._without) else []

    def _inside(self, indices: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yield (part, row in the part) of each index."""
        firsts = self._firsts.tolist()
        for index in indices:
            row = int(index if self._rows is None else self._rows[index])
            part = bisect.bisect_right(firsts, row) - 1
            yield part, row - firsts[part]

    def _dropped(self) -> list[int]:
        """Return the rows of the whole table without any text that the view does not have."""
        return [] if self._rows is None else np.setdiff1d(self.bare(), self._rows).tolist()

    def _record(self, row: Row, contents: Sequence[bytes | Unusable]) -> Record:
        if not contents:
            return Record(b"", _LEFT_OUT, row.name)
        image, *rest = contents
        mask = rest.pop(0) if row.mask else None
        text = _joined(row.text, rest)
        for part in (image, mask):
            if isinstance(part, Unusable):
                return Record(b"", part, row.name)
        return Record(image, text, row.name, row.numbers, mask)  # pyright: ignore


class _Part:
    """The mapped columns of a part."""

    def __init__(
        self,
        rows: Mapping[str, Any],
        texts: Mapping[str, Any],
        names: Mapping[str, Any],
        joined: Mapping[str, Any] = {},
    ):
        """Join the columns of a part. Those in `joined` replace the texts of the rows."""
        kept = {name: column for name, column in rows.items() if name != "weight" or not joined}
        self.rows, self._texts, self._names = {**kept, **joined}, texts, {**names, **joined}

    def __len__(self) -> int:
        return len(self.rows["key"])

    def files(self) -> Iterator[str]:
        """Yield the names of the files that hold one picture, mask or text each."""
        for row in np.flatnonzero(self.rows["file"] < 0).tolist():
            yield os.fsdecode(self._names["image"][row] or self._names["name"][row])
        for row in np.flatnonzero(~self.lacks_mask()).tolist():
            yield os.fsdecode(self._names["mask"][row])
        alone = (self._texts["kind"] == _IN_PLACE) & (self._texts["file"] < 0)
        for number in np.flatnonzero(alone).tolist():
            yield os.fsdecode(self._texts["text"][number]).partition("\0")[2]

    def distinct(self, column: str) -> Iterator[tuple[int, int, int]]:
        """Yield (number, count, first row) of each distinct number in a column of lists."""
        lists = self.rows["text"] if column == "text" else self._names["origin"]
        numbers, first, counts = np.unique(lists.values, return_index=True, return_counts=True)
        rows = np.searchsorted(lists.firsts, first, side="right") - 1
        yield from zip(numbers.tolist(), counts.tolist(), rows.tolist(), strict=True)

    def bare(self) -> np.ndarray:
        return np.flatnonzero(np.diff(self.rows["text"].firsts) == 0)

    def lacks_number(self, field: str) -> np.ndarray:
        missing = np.isnan(self.rows[f"number_{field}"])
        for row in np.flatnonzero(missing).tolist():
            missing[row] = field not in json.loads(self._names["note"][row] or b"{}")
        return missing

    def lacks_mask(self) -> np.ndarray:
        return np.diff(self._names["mask"].firsts) == 0

    def row(self, row: int, table: Table) -> Row:
        mask = self._names["mask"][row]
        return Row(
            self.name(row, table),
            int(self.rows["key"][row]),
            self.place(row, table),
            self.text(row, table),
            (),
            {n: self._number(n, row) for n in table.card["fields"]},
            Place(table.path(os.fsdecode(mask))) if mask else None,
        )

    def name(self, row: int, table: Table) -> str:
        name, file = os.fsdecode(self._names["name"][row]), int(self.rows["file"][row])
        if file < 0 or table.prefix:
            return f"{table.prefix}{name}"
        path, kind = table.container(file)
        return name if kind == reading.BYTES else f"{path}/{name}"

    def place(self, row: int, table: Table) -> Place:
        file, at, size = (int(self.rows[name][row]) for name in ("file", "at", "size"))
        if file >= 0:
            path, kind = table.container(file)
            return Place(path, at, size, kind)
        name = self._names["image"][row] or self._names["name"][row]
        return Place(table.path(os.fsdecode(name)), at, size)

    def origins(self, row: int) -> list[int]:
        return self._names["origin"][row]

    def text(self, row: int, table: Table) -> Any:
        """Return the text of a row, or its InPlace texts."""
        numbers = self.rows["text"][row]
        if not numbers:
            return table._bare
        texts = [self.distinct_text(number, table) for number in numbers]
        weights = self.rows["weight"][row] if "weight" in self.rows else ()
        if isinstance(texts[0], InPlace):
            pairs = zip(texts, weights or [1.0] * len(texts), strict=True)
            return [text._replace(weight=weight) for text, weight in pairs]
        return Captions(tuple(texts), tuple(weights)) if len(texts) > 1 else texts[0]

    def distinct_text(self, number: int, table: Table) -> Any:
        text, kind = self._texts["text"][number], self._texts["kind"][number]
        if kind == _CAPTION:
            return text.decode()
        if kind == _UNUSABLE:
            return _unusable(text.decode(errors="surrogatepass"))
        file, at, size = (int(self._texts[name][number]) for name in ("file", "at", "size"))
        format, _, name = os.fsdecode(text).partition("\0")
        path, kind = table.container(file) if file >= 0 else (table.path(name), reading.FILE)
        return InPlace(Place(path, at, size, kind), format)

    def _number(self, field: str, row: int) -> Any:
        number = float(self.rows[f"number_{field}"][row])
        notes = json.loads(self._names["note"][row] or b"{}")
        return _unusable(notes[field]) if field in notes else number


def write(
    home: str | os.PathLike[str] | dict[str, bytes],
    rows: Iterable[Row],
    inventory: LeftOut,
    *,
    root: str = "",
    rule: Mapping[str, Any] = {},
    facts: Mapping[str, Any] = {},
    seen: str = "",
    stamps: Mapping[str, str] = {},
) -> None:
    """Write a table. It replaces the table in the same folder once it is complete.

    Args:
        home: the folder, or a dictionary that gets the files.
        rows: the rows, which are written part by part while they are read.
        inventory: the files that are no rows; the importer completes it while it yields the rows.
        root: the folder of the data set. Paths below it are stored relative to it.
        rule: everything in the config that the rows depend on. Its "fields" name the numbers.
        facts: JSON values that messages show. They may change until the last row is read.
        seen: a digest of the files' names, sizes and times, which is not part of the table's id.
            It is not kept if a file is damaged or unreadable: reading it again may succeed.
        stamps: for each path, a text that changes with the file. Those of files with several
            pictures are kept.
    """
    if not isinstance(home, dict):
        home = files.path(home)
        home.mkdir(parents=True, exist_ok=True)
    shared, parts, fields = _Shared(root, home), list[Any](), list(rule.get("fields", ()))
    rows = iter(rows)
    with shared:
        while True:
            part = _Writer(shared, fields)
            for row in itertools.islice(rows, PART):
                part.add(row)
            if len(part) or not parts:
                columns = part.columns().items()
                parts.append({kind: mapped.store(home, kind, of) for kind, of in columns})
            if len(part) < PART:
                break
    complete = not (inventory.damaged() or shared.unreadable)
    containers = {name for name, _ in shared.files}
    known = {shared.short(path): stamp for path, stamp in stamps.items()}
    card: dict[str, Any] = {
        "version": _VERSION,
        "root": root,
        "rule": rule,
        "fields": fields,
        "parts": parts,
        "files": shared.files,
        "origins": list(shared.origins),
        "left": _store_left(home, inventory.take()),
        "inventory": inventory.saved(),
        "facts": facts,
        "seen": seen if complete else "",
        "stamps": {name: stamp for name, stamp in known.items() if name in containers},
    }
    card["id"] = _digest(card)
    written = _written(card)
    if isinstance(home, dict):
        home[CARD] = written
    else:
        for name in (card_of(card["id"]), CARD):
            files.write_whole(home / name, written)


def _store_left(home: Any, left: Iterable[tuple[str, str]]) -> tuple[str, int, int]:
    columns = {"name": mapped.Buffer(), "reason": mapped.Buffer()}
    for name, reason in left:
        columns["name"].add(os.fsencode(name))
        columns["reason"].add(reason.encode())
    return mapped.store(home, "left", {name: of.column() for name, of in columns.items()})


def _digest(card: Mapping[str, Any]) -> str:
    """Return the id of the table with this card."""
    names = [[name for name, *_ in part.values()] for part in card["parts"]]
    values = [names, card["files"], card["fields"], *card.get("without", ())[:1]]
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def card_of(id: str) -> str:
    """Return the name of the card of the table with this id."""
    return f"card-{id}.json"


def files_of(card: Mapping[str, Any]) -> set[str]:
    """Return the names of the files of the table with this card.

    Raises ValueError if one is not the name of such a file.
    """
    names = {name for part in card["parts"] for name, *_ in part.values()} | {card["left"][0]}
    names |= set(card.get("without", ())[:1])
    names |= {name for name, kind in card["files"] if kind == _KEPT}
    if wrong := [name for name in names if not FILE.fullmatch(name)]:
        raise ValueError(f"the card of a table names the file {wrong[0]!r}: import the data again")
    return names


class _Shared(contextlib.ExitStack):
    """What the parts of a table share: numbers of containers and origins, and stored pictures."""

    def __init__(self, root: str, home: Any):
        super().__init__()
        self._home, self._pictures, self._digest = home, None, hashlib.blake2b(digest_size=12)
        self.root, self.files, self.origins = root, list[Any](), dict[str, int]()
        self.unreadable = False
        """Whether a text or number could not be read."""
        self._numbers = dict[tuple[str, str], int]()

    def short(self, path: str) -> str:
        """Return a path as the table stores it: relative to the root if it is below it."""
        root = self.root if self.root.endswith("/") else f"{self.root}/"
        return path.removeprefix(root) if self.root else path

    def file(self, path: str, kind: str) -> int:
        key = path, kind
        if key not in self._numbers:
            self._numbers[key] = len(self.files)
            self.files.append((self.short(path), kind))
        return self._numbers[key]

    def origin(self, text: str) -> int:
        return self.origins.setdefault(text, len(self.origins))

    def keep(self, content: bytes) -> Place:
        """Store a picture with the table. At the end, the file is named by its contents."""
        if self._pictures is None:
            if not isinstance(self._home, pathlib.Path):
                raise ValueError(
                    f"the pictures of {self.root} are compressed, and there is no local folder to "
                    "store them: set XDG_CACHE_HOME to a folder that can be written"
                )
            temporary = self.enter_context(files.whole(self._home / "pictures", self._rename))
            self._pictures = self.enter_context(temporary.open("wb"))
        place = Place("", self._pictures.tell(), len(content), _KEPT)
        self._pictures.write(content)
        self._digest.update(content)
        return place

    def _rename(self, temporary: pathlib.Path, _: pathlib.Path) -> None:
        name = f"{self._digest.hexdigest()}.pictures"
        self.files[self.files.index(("", _KEPT))] = name, _KEPT
        temporary.replace(temporary.with_name(name))


class _Writer:
    """Collects the rows of a part, in compact arrays."""

    def __init__(self, shared: _Shared, fields: Sequence[str]):
        self._shared, self._fields = shared, fields
        new = lambda kinds: {name: array.array(kind) for name, kind in kinds.items()}
        self._rows = new({"file": "i", "at": "q", "size": "q", "key": "Q"})
        self._numbers = new({f"number_{name}": "d" for name in fields})
        self._texts = new({"kind": "B", "file": "i", "at": "q", "size": "q"})
        self._entries, self._weights, self._origins = (array.array(k) for k in "idi")
        self._ends, self._origin_ends = array.array("i", [0]), array.array("i", [0])
        self._names = {name: mapped.Buffer() for name in ("name", "image", "mask", "note")}
        self._known = dict[Any, int]()  # The number of each distinct text.
        self._words = mapped.Buffer()

    def __len__(self) -> int:
        return len(self._rows["key"])

    def add(self, row: Row) -> None:
        """Add a row."""
        image = row.image if isinstance(row.image, Place) else self._shared.keep(row.image)
        own = image.kind == reading.FILE
        file = -1 if own else self._shared.file(image.file, image.kind)
        values = file, image.at, image.size, row.key
        for column, value in zip(self._rows.values(), values, strict=True):
            column.append(value)
        notes = {}
        for name in self._fields:
            number = row.numbers.get(name, float("nan"))
            if isinstance(number, Unusable):
                notes[name], number = self._note(number), float("nan")
            self._numbers[f"number_{name}"].append(number)
        self.add_texts(row.text, row.origins)
        name = self._shared.short(image.file) if own else ""
        mask = self._shared.short(row.mask.file) if row.mask else ""
        self._names["name"].add(os.fsencode(row.name))
        self._names["image"].add(os.fsencode(name if name != row.name else ""))
        self._names["mask"].add(os.fsencode(mask))
        self._names["note"].add(json.dumps(notes).encode() if notes else b"")

    def add_texts(self, text: Any, origins: Sequence[str]) -> None:
        """Add the texts of a row."""
        texts, weights = _texts(text)
        for text, weight in zip(texts, weights, strict=True):
            self._entries.append(self._number(text))
            self._weights.append(weight)
        self._ends.append(len(self._entries))
        self._origins.extend(map(self._shared.origin, origins))
        self._origin_ends.append(len(self._origins))

    def _number(self, text: Any) -> int:
        """Return the number of a text in the part."""
        place = -1, 0, 0
        if isinstance(text, InPlace):
            own, where = text.place.kind == reading.FILE, text.place
            file = -1 if own else self._shared.file(where.file, where.kind)
            place, kind = (file, where.at, where.size), _IN_PLACE
            name = f"\0{self._shared.short(where.file)}" if own else ""
            content = os.fsencode(f"{text.format}{name}")
        elif isinstance(text, Unusable):
            kind, content = _UNUSABLE, self._note(text).encode(errors="surrogatepass")
        else:
            kind, content = _CAPTION, text.encode()
        found = self._known.setdefault((kind, content, place), len(self._known))
        if found == len(self._words):
            self._words.add(content)
            for column, value in zip(self._texts.values(), (kind, *place), strict=True):
                column.append(value)
        return found

    def _note(self, error: Unusable) -> str:
        self._shared.unreadable |= error.reason == "unreadable"
        return str(error)

    def columns(self) -> dict[str, Any]:
        """Return the columns of the part's files, keyed by the kind of file."""
        texts = {"text": self._words.column(), **mapped.flat(self._texts)}
        rows = {**mapped.flat(self._rows), **mapped.flat(self._numbers)}
        rows["text"] = mapped.lists(self._ends, self._entries)
        if any(weight != 1 for weight in self._weights):
            rows["weight"] = mapped.lists(self._ends, self._weights)
        names: dict[str, Any] = {name: of.column() for name, of in self._names.items()}
        names["origin"] = mapped.lists(self._origin_ends, self._origins)
        return {"rows": rows, "texts": texts, "names": names}


def _read_card(home: Any, name: str) -> dict[str, Any]:
    try:
        in_memory = isinstance(home, Mapping)
        written = home[name] if in_memory else (files.path(home) / name).read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no table in {home}: import the data again") from None
    try:
        card = untrusted.parse_json(written)
        version, check = card["version"], card.pop("check")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{home}/{name} is damaged: import the data again") from error
    if version != _VERSION:
        raise ValueError(f"another version wrote the table in {home}: import the data again")
    if check != _check(card):
        raise ValueError(f"{home}/{name} has changed since it was written: import the data again")
    return card


def _written(card: dict[str, Any]) -> bytes:
    return json.dumps(card | {"check": _check(card)}, indent=1).encode()


def _check(card: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(card, sort_keys=True).encode())


def _beside(root: str, name: str) -> str:
    return name if "://" in name or not root else os.path.join(root, name)


def _unusable(text: str) -> Unusable:
    """Return the error whose message is `text`."""
    reason, _, detail = text.partition(": ")
    return Unusable(reason, detail)


def _texts(text: Any) -> tuple[Sequence[Any], Sequence[float]]:
    if isinstance(text, Captions):
        return text
    if isinstance(text, str | Unusable):
        return [text], [1.0]
    return text, [of.weight for of in text]


def _places(text: Any) -> list[Place]:
    return [of.place for of in text] if isinstance(text, list) else []


def _joined(text: Any, contents: Sequence[bytes | Unusable]) -> Any:
    """Return the text of a row, whose InPlace texts have these contents."""
    if not isinstance(text, list):
        return text
    pairs = zip(text, contents, strict=True)
    read = lambda of, c: c if isinstance(c, Unusable) else records.read_text(c, of.format)
    return captions.join((read(of, c), of.weight) for of, c in pairs)
