"""Reads the captions of a folder's images from tables, such as Hugging Face's metadata.jsonl.

In most tables, a column (one of _FILES) holds the image's path relative to the table. In
img2dataset's tables, the column "key" holds the image's name without suffix, and the image is in a
folder with the table's stem, such as 00000 for 00000.parquet. In COCO's annotations ("coco"), the
images may be in any folder.
"""

import collections
import os
import pathlib
import posixpath
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from diffusion_jax.data import captions, records, rows
from diffusion_jax.data.inventory import TEXTS, Inventory

SUFFIXES = {
    "csv": ".csv", "tsv": ".tsv", "jsonl": ".jsonl", "parquet": ".parquet", "coco": ".json"
}  # fmt: skip
"""The suffix of each kind of table in data.text."""
_FILES, _KEY = ("file_name", "filename", "image", "path"), "key"


class _Images(NamedTuple):
    """The images of a folder, found by several kinds of names.

    An image that shares its name of a kind with another image is missing from that kind.
    """

    path: Mapping[str, str]
    stem: Mapping[str, str]
    """By the path without suffix."""
    folded: Mapping[str, str]
    """By the path without regard to case and to the form of accents."""
    base: Mapping[str, str]
    """By the folded name without folders."""


def read(
    root: pathlib.Path,
    names: Sequence[str],
    images: Sequence[str],
    kind: str,
    field: str,
    inventory: Inventory,
) -> dict[str, Any]:
    """Return the captions in all tables of one kind, keyed by image.

    Several rows of one image are several captions
    (captions.Captions). A caption that is not UTF-8 is an Unusable error.

    Args:
        root: the folder.
        names: sorted paths of all files, relative to `root`.
        images: the paths among these that are images.
        kind: the kind of tables, a key of SUFFIXES.
        field: the column of captions.
        inventory: gets the rows without an image, and the tables without names of images.

    Raises:
        ValueError: there is no table, a row is malformed, two tables describe one image, or no row
            has both an image and a caption.
    """
    tables = [name for name in names if name.lower().endswith(SUFFIXES[kind])]
    if not tables:
        raise ValueError(
            f"no {SUFFIXES[kind]} files in {root}, but data.text={kind}:{field} reads the captions "
            "from such files: set data.text to the format that holds the captions, such as txt"
        )
    stem = lambda name: posixpath.splitext(name)[0]
    base = lambda name: _folded(posixpath.basename(name))
    opened = _Images(*(_unique(images, of) for of in (str, stem, _folded, base)))
    found, table_of, columns = {}, {}, set[str]()
    for table in tables:
        texts = _read_table(root, table, field, opened, columns, inventory)
        for image, several in texts.items():
            if image in found:
                raise ValueError(
                    f"both {root / table_of[image]} and {root / table} describe {image}: remove "
                    "one of the tables"
                )
            found[image] = captions.join((text, 1.0) for text in several)
            table_of[image] = table
    if not found:
        raise ValueError(
            f"no row of {', '.join(tables[:3])} in {root} has both an existing image and a "
            f"{field!r}; the columns are {', '.join(sorted(columns)) or 'none'}: set data.text to "
            f"{kind}:COLUMN with the caption column"
        )
    return found


def name_column(row: Mapping[str, Any]) -> str:
    """Return the column of a row that names an image, or "" if there is none."""
    return next((name for name in (*_FILES, _KEY) if name in row), "")


def _read_table(
    root: pathlib.Path,
    table: str,
    field: str,
    images: _Images,
    columns: set[str],
    inventory: Inventory,
) -> Mapping[str, list[Any]]:
    """Return the captions of each image in a table. The table's columns are added to `columns`.

    Raises ValueError if a row is malformed.
    """
    folder, stem = posixpath.dirname(table), posixpath.splitext(table)[0]
    texts, column = collections.defaultdict[str, list[Any]](list), ""
    later: list[tuple[str, str, Any]] = []
    for place, row in rows.read(root / table):
        columns.update(row)
        column = column or name_column(row)
        if not column:
            inventory.add("table_without_file_name", [table])
            return {}
        name, cell = row.get(column), row.get(field)
        if not (isinstance(name, str) and name) and not (column == _KEY and type(name) is int):
            raise ValueError(
                f"{place}: {column} is {rows.shown(name)}, not the name of an image: correct or "
                "remove the row"
            )
        if cell is None:  # The image counts as one without a caption.
            continue
        if not isinstance(cell, str | list):
            raise ValueError(f"{place}: {field} is {rows.shown(cell)}, not a text: correct it")
        text = records.cell_text(cell)
        if column == _KEY:
            image = images.stem.get(posixpath.join(stem, str(name)))
        else:
            name = _relative(root, folder, str(name))
            image = images.path.get(name)
        if image is None:
            later.append((place, str(name), text))
        else:
            texts[image].append(text)
    if column:
        inventory.add(TEXTS, [table])
    if column != _KEY:
        # Prefer exact names: these rows may only describe images that no other row describes.
        later = _assign(texts, later, images.folded, _folded)
        later = _assign(texts, later, images.stem, str)
        if not texts:
            later = _assign(texts, later, images.base, lambda n: _folded(posixpath.basename(n)))
    inventory.add("row_without_image", [f"{place}: {name}" for place, name, _ in later])
    return texts


def _assign(
    texts: dict[str, list[Any]],
    unnamed: Iterable[tuple[str, str, Any]],
    images: Mapping[str, str],
    fold: Callable[[str], str],
) -> list[tuple[str, str, Any]]:
    """Add the texts of rows (place, name, text) whose names differ from an image's only in form.

    `images` maps names to images after `fold`. Return the rows that name no image, or one that
    another row names differently.
    """
    exact, left, names = set(texts), [], collections.defaultdict[str, set[str]](set)
    unnamed = list(unnamed)
    for _, name, _ in unnamed:
        names[images.get(fold(name), "")].add(name)
    for row in unnamed:
        image = images.get(fold(row[1]), "")
        if not image or image in exact or len(names[image]) > 1:
            left.append(row)
        else:
            texts[image].append(row[2])
    return left


def _relative(root: pathlib.Path, folder: str, name: str) -> str:
    """Return the path in a table as a path relative to `root`. Backslashes separate folders."""
    name = posixpath.join(folder, name.strip().replace("\\", "/"))
    full = posixpath.normpath(posixpath.join(os.path.abspath(root), name))
    for base in (os.path.abspath(root), os.path.realpath(root)):
        if full.startswith(f"{base}/"):
            return full[len(base) + 1 :]
    return name


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _unique(images: Sequence[str], of: Callable[[str], str]) -> dict[str, str]:
    counts = collections.Counter(map(of, images))
    return {of(image): image for image in images if counts[of(image)] == 1}
