"""Read the captions of a folder's images from tables, such as Hugging Face's metadata.jsonl.

In most tables, a column (one of rows.FILES) holds the image's path relative to the table. In
img2dataset's tables, the column "key" holds the image's name without suffix, and the image is in a
folder with the table's stem, such as 00000 for 00000.parquet. In COCO's annotations ("coco"), the
images may be in any folder.
"""

import collections
import functools
import itertools
import os
import pathlib
import posixpath
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from diffusion_jax.config.picture_fields import Field
from diffusion_jax.data import captions, records, rows, storage
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import TEXTS, Inventory
from diffusion_jax.files import untrusted

_LOOKED = 100  # Number of rows in which the column of image names is looked for.
_CAMERAS = (".heic", ".heif", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".raf", ".orf", ".rw2")

SUFFIXES = {"csv": ".csv", "tsv": ".tsv", "jsonl": ".jsonl", "parquet": ".parquet", "coco": ".json"}
"""The suffix of each kind of table in data.text."""


class Found(NamedTuple):
    """What tables say of an image."""

    value: Any
    """The caption, captions.Captions or the number."""
    origins: Sequence[str]
    """For each caption, the table, its column and how the row names the image. () for numbers."""


class _Images:
    """The images of a folder, found by names in several forms."""

    def __init__(self, root: pathlib.Path, images: Sequence[str]):
        self.paths = set(images)
        self._images, self._roots = images, (os.path.abspath(root), os.path.realpath(root))
        self.by = functools.cache(lambda form: unique(form, self._images))
        """by(form) maps form(path) to the path of each image, if no other path has this form."""

    def path(self, folder: str, name: str) -> str:
        """Return the path, relative to the root, of a name in a table in `folder`.

        Backslashes in names separate folders.
        """
        path = posixpath.join(folder, name)
        if path in self.paths:
            return path
        path = posixpath.join(folder, _slashed(name))
        full = posixpath.normpath(posixpath.join(self._roots[0], path))
        for root in self._roots:
            if full.startswith(f"{root}/"):
                return full[len(root) + 1 :]
        return path


def read(
    root: pathlib.Path,
    names: Sequence[str],
    images: Sequence[str],
    kind: str,
    field: str,
    inventory: Inventory,
    number: Field | None = None,
    also: Collection[str] = (),
) -> dict[str, Found]:
    """Return the captions or numbers in all tables of one kind, keyed by image.

    Several rows of one image are several captions (captions.Captions). A caption that is not UTF-8
    is an Unusable error.

    Args:
        root: the folder.
        names: sorted paths of all files, relative to `root`.
        images: the paths among these that are images.
        kind: the kind of tables, a key of SUFFIXES.
        field: the column of captions or numbers.
        inventory: gets the rows without an image, and the tables without its columns.
        number: the entry of data.fields, if the column holds numbers. None: it holds captions.
        also: other columns of captions that are read. Tables with one of them are not left out.

    Raises:
        ValueError: there is no table, a row is malformed, a number is not in its range, two tables
            describe one image, rows of one image have different numbers, or no row has both an
            image and a value.
    """
    setting, holds = ("data.fields", "numbers") if number else ("data.text", "captions")
    tables = [name for name in names if name.lower().endswith(SUFFIXES[kind])]
    if not tables:
        raise ValueError(
            f"no {SUFFIXES[kind]} files in {root}, but {setting}={kind}:{field} reads the {holds} "
            f"from such files: set {setting} to the format that holds the {holds}, such as "
            + ("json" if number else "txt")
        )
    found, table_of, columns, opened = {}, {}, set[str](), _Images(root, images)
    lost: list[tuple[str, str]] = []
    for table in tables:
        texts, later = _read_table(root, table, field, opened, columns, inventory, number, {field, *also})
        lost += later
        for image, several in texts.items():
            if image in found:
                raise ValueError(
                    f"both {root / table_of[image]} and {root / table} describe {image}: remove one of the tables"
                )
            if number and len({value for value, _ in several}) > 1:
                raise ValueError(
                    f"{root / table} has several numbers in the column {field} for {image}: "
                    f"{several[0][0]:g} and others; keep one"
                )
            parts = ((text, 1.0, f"{table}: {field}, {how}") for text, how in several)
            found[image] = Found(*((several[0][0], ()) if number else captions.with_origins(parts)))
            table_of[image] = table
    left_out = [f"{_inside(root, place)}: {untrusted.printable(name)}" for place, name in lost]
    inventory.add("row_without_image", left_out)
    if not found and lost:
        raise ValueError(_no_picture(*lost[0], images))
    if not found:
        place, row = next(rows.read(root / tables[0]), ("", {}))
        if isinstance(row, rows.Alone):
            raise ValueError(f"{place} {_no_name(row)}: write an object for each image on a line")
        raise ValueError(
            f"no row of {', '.join(tables[:3])} in {root} has both an existing image and a value "
            f"of {field!r}; the columns are {', '.join(sorted(columns)) or 'none'}: set {setting} "
            f"to {kind}:COLUMN{'=LOW..HIGH' if number else ''} with the column of the "
            f"{'numbers' if number else 'captions'}"
        )
    return found


def _no_picture(place: str, name: str, images: Sequence[str]) -> str:
    """Return the error message for tables without the name of an image. The place names `name`."""
    match [image for image in images if _tail(1)(_stem(image)) == _tail(1)(_stem(name))]:
        case []:
            reason = "it does not exist"
        case [image]:
            reason = f"the picture of its name is {image}"
        case same:
            reason = f"several pictures have its name: {', '.join(same[:3])}"
    return (
        f"{place} names {rows.shown(name)}, but {reason}; no other row with a caption names a "
        "picture either: write paths relative to the table"
    )


def _no_name(row: Mapping[str, Any]) -> str:
    if isinstance(row, rows.Alone):
        return f"is {rows.shown(row[rows.CAPTION])}, not an object"
    return f"has no {rows.FILES[0]}, but only {', '.join(row) or 'an empty object'}"


def _read_table(
    root: pathlib.Path,
    table: str,
    field: str,
    images: _Images,
    columns: set[str],
    inventory: Inventory,
    number: Field | None,
    wanted: set[str],
) -> tuple[Mapping[str, list[Any]], list[tuple[str, str]]]:
    """Return (value, how it was found) of each image, and (place, name) of rows without an image.

    The table's columns are added to `columns`. Raises ValueError if a row is malformed.
    """
    folder, stem = posixpath.dirname(table), posixpath.splitext(table)[0]
    texts, column = collections.defaultdict[str, list[Any]](list), ""
    later: list[tuple[str, str, Any]] = []
    is_wanted = False
    depths = dict[str, int]()  # The number of parts of each name, with its folders.
    cells = rows.read(root / table)
    first = list(itertools.islice(cells, _LOOKED))
    likeliest = _name_columns([row for _, row in first], folder, images)
    for place, row in (cells := itertools.chain(first, cells)):
        columns.update(row)
        is_wanted |= not wanted.isdisjoint(row)
        if not column or (column != rows.KEY and column not in row):  # Rows of .jsonl may differ.
            found = (name for name in likeliest if name in row)
            column = next(found, column or rows.name_column(row))
        if not column:
            named = (other for other, later in cells if rows.name_column(later))
            if table.lower().endswith(".jsonl") and (other := next(named, "")):
                raise ValueError(f"{place} {_no_name(row)}; {other} names an image: correct or remove the row")
            inventory.add("table_without_file_name", [table])
            return {}, []
        name, cell = row.get(column), row.get(field)
        if not (isinstance(name, str) and name) and type(name) is not int:
            raise ValueError(
                f"{place}: {column} is {rows.shown(name)}, not the name of an image: correct or remove the row"
            )
        if cell is None and not (number and field in row):
            continue  # The image counts as one without a caption or number.
        text = _numeric(place, cell, number) if number else _caption(root, place, field, cell)
        if column == rows.KEY:
            image = images.by(_stem).get(posixpath.join(stem, str(name)), "")
        else:
            image = images.path(folder, str(name))
        if image in images.paths:
            texts[image].append((text, "by key" if column == rows.KEY else "exact path"))
        else:
            later.append((place, str(name) if "://" in str(name) else image or str(name), text))
            depths[later[-1][1]] = _slashed(str(name)).removeprefix("./").count("/") + 1
    if column:
        inventory.add(TEXTS if is_wanted else "table_without_column", [table])
    if column != rows.KEY:
        # Prefer exact names: these rows may only describe images that no other row describes.
        for form, how in _FORMS.items():
            later = _assign(texts, later, images, form, how)
        if not texts:  # The images may be in another folder, but in all folders that a row names.
            parts = collections.defaultdict[int, list[Any]](list)
            for row in later:
                parts[depths[row[1]]].append(row)
            later = []
            for depth, rest in parts.items():
                for form, how in _ends(depth).items():
                    rest = _assign(texts, rest, images, form, how)
                later += rest
    return texts, [(place, name) for place, name, _ in later]


def _name_columns(first: Sequence[Mapping[str, Any]], folder: str, images: _Images) -> list[str]:
    """Return rows.FILES, beginning with the column that names the most images in the first rows."""
    is_name = lambda cell: rows.is_picture(cell) and not storage.is_url(cell)
    score = lambda cell: is_name(cell) + (images.path(folder, cell) in images.paths)
    return sorted(rows.FILES, key=lambda name: -sum(score(str(row[name])) for row in first if name in row))


def _numeric(place: str, cell: Any, number: Field) -> float:
    try:
        return number.number(cell)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _caption(root: pathlib.Path, place: str, field: str, cell: Any) -> Any:
    if not isinstance(cell, str | list):
        raise ValueError(f"{place}: {field} is {rows.shown(cell)}, not a text: correct it")
    text = records.cell_text(cell)
    if isinstance(text, Unusable):
        detail = str(text).partition(": ")[2]
        return Unusable(text.reason, f"{_inside(root, place)}: {detail}")
    return text


def _inside(root: pathlib.Path, place: str) -> str:
    """Return a row's place relative to the root, which is equal in copies of the data set."""
    return place.removeprefix(f"{root}/")


def _assign(
    texts: dict[str, list[Any]],
    rows_left: Sequence[tuple[str, str, Any]],
    images: _Images,
    form: Callable[[str], str],
    how: str,
) -> list[tuple[str, str, Any]]:
    """Add the texts of rows (place, name, text) whose names have the same form as an image's path.

    Return the other rows, including those about an image that another row names differently.
    """
    if not rows_left:
        return []
    exact, others, names = set(texts), [], collections.defaultdict[str, set[str]](set)
    found = [images.by(form).get(form(name), "") for _, name, _ in rows_left]
    for image, (_, name, _) in zip(found, rows_left, strict=True):
        names[image].add(name)
    for image, row in zip(found, rows_left, strict=True):
        if not image or image in exact or len(names[image]) > 1:
            others.append(row)
        else:
            texts[image].append((row[2], how))
    return others


def _stem(name: str) -> str:
    """Return a name without the suffix of a picture. The name "v1.5" has none."""
    has_suffix = rows.is_picture(name) or name.lower().endswith(_CAMERAS)
    return posixpath.splitext(name)[0] if has_suffix else name


def _folded_stem(name: str) -> str:
    return folded(_stem(name))


def folded(name: str) -> str:
    """Return the form of a name that is the same in other case or Unicode form."""
    return unicodedata.normalize("NFC", name).casefold()


_FORMS = {
    folded: "other case or Unicode form",
    _stem: "without the suffix",
    _folded_stem: "without the suffix and in other case or Unicode form",
}
"""How the names of rows may differ from an image's path."""


def _slashed(name: str) -> str:
    return name.strip().replace("\\", "/")


@functools.cache
def _tail(depth: int) -> Callable[[str], str]:
    """Return the function that maps a path to its last `depth` parts, folded."""
    return lambda name: "/".join(folded(name).split("/")[-depth:])


@functools.cache
def _ends(depth: int) -> dict[Callable[[str], str], str]:
    """Return {form: origin} for rows that name the last `depth` parts of an image's path."""
    how = "by the file name alone" if depth == 1 else f"by the last {depth} parts of the path"
    return {_tail(depth): how, lambda name: _tail(depth)(_stem(name)): f"{how} without the suffix"}


def unique(form: Callable[[str], str], names: Collection[str]) -> dict[str, str]:
    """Return {form(name): name} for the names whose form no other name has."""
    forms = {name: form(name) for name in names}
    counts = collections.Counter(forms.values())
    return {form: name for name, form in forms.items() if counts[form] == 1}
