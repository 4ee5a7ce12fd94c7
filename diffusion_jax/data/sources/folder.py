"""Read folders of image files, whose texts are in files beside the images or in tables.

A table is a .jsonl or .parquet file. Its layout is that of Hugging Face's image folders
(metadata.jsonl beside the images) or of img2dataset's output (00000.parquet beside the folder
00000).
"""

import os
import pathlib
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from diffusion_jax.config.settings import Data
from diffusion_jax.data import records, storage
from diffusion_jax.data.inventory import PICTURES, TEXTS, Inventory
from diffusion_jax.data.pictures import Shapes
from diffusion_jax.data.records import Record, Records
from diffusion_jax.data.transforms import Unusable
from diffusion_jax.machine import untrusted


def open_source(data: Data, _: Shapes) -> Records:
    """Open the folder of image files at a config's data.path, with its texts."""
    return Folder(records.path_of(data), data.text, data.uncaptioned)


class Folder(Records):
    """The images under a folder, in the order of their names, each with a text."""

    def __init__(self, path: str | os.PathLike[str], text: str = "txt", uncaptioned: str = "error"):
        """List the files and read the tables.

        Args:
            path: the folder, which is searched recursively.
            text: where the texts are. Files beside the images: "txt" or "json:FIELD" for captions,
                or a suffix such as "npy" or "t5.npz" for embeddings. Tables: the format and the
                caption column, such as "jsonl:caption" or "parquet:caption".
            uncaptioned: "error" raises ValueError if images lack a text, "drop" leaves them out,
                and "empty" gives them the text "".

        Raises:
            FileNotFoundError: the folder does not exist.
            ValueError: there are no images, images lack a text and `uncaptioned` is "error", all
                images lack a text and `uncaptioned` is "drop", or `text` names a table that is
                missing or damaged.
        """
        self._root, self._text = pathlib.Path(path), text
        records.check_exists([os.fspath(path)], "folder")
        suffix, field = records.check_text(text, tuple(_TABLES))
        self._inventory = Inventory()
        prefix = os.path.join(path, "")
        found = storage.walk(os.fspath(path), self._inventory)
        names = {name.removeprefix(prefix): records.suffix_of(name) for name in found}
        suffixes = names.values()
        is_image = lambda name: names[name].rpartition(".")[2] in untrusted.image_suffixes()
        images = [name for name in names if is_image(name)]
        records.check_any(len(images), self._root, suffixes, "pictures (jpg, png, webp, ...)")
        self._captions: Mapping[str, str | Unusable] = {}
        if suffix in _TABLES:
            self._captions = _captions(self._root, list(names), suffix, field)
            captioned = set(self._captions)
        else:
            captioned = {name for name in images if _text_name(name, suffix) in names}
        empty = uncaptioned == "empty"
        self._images = [name for name in images if empty or name in captioned]
        self._without = set(self._images) - captioned
        bare = sorted(set(images) - set(self._images))
        records.check_captions(len(bare), bare[:3], len(images), text, uncaptioned, suffixes)
        used = {_text_name(name, suffix) for name in captioned}
        for name, kind in names.items():
            if not is_image(name):
                self._inventory.add(
                    TEXTS
                    if name in used
                    else records.other_kind(kind, "" if suffix in _TABLES else suffix),
                    [name],
                )
        self._inventory.add(PICTURES, self._images)
        self._inventory.add("no_caption", bare)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Return the images with these indices and their texts.

        Raises:
            OSError: a file has been removed.
        """
        return [self._read(self._images[index]) for index in indices]

    def heads(self, indices: Sequence[int]) -> list[bytes]:
        return [_head(self._root / self._images[index]) for index in indices]

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """Return the caption or embeddings of each image, without reading the images.

        Raises OSError for a removed file.
        """
        return [self._read_text(self._images[index]) for index in indices]

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """Return a hash of each image's path relative to the folder."""
        return np.array([records.key_of(self._images[i]) for i in indices.tolist()], np.uint64)

    def inventory(self) -> Inventory:
        return self._inventory

    def _read(self, name: str) -> Record:
        image, text = self._contents(name), self._read_text(name)
        return (
            Record(b"", image, name) if isinstance(image, Unusable) else Record(image, text, name)
        )

    def _read_text(self, name: str) -> Any:
        if name in self._without:
            return ""
        if self._captions:
            return self._captions[name]
        text = self._contents(_text_name(name, self._text.partition(":")[0]))
        return text if isinstance(text, Unusable) else records.read_text(text, self._text)

    def _contents(self, name: str) -> bytes | Unusable:
        try:
            return (self._root / name).read_bytes()
        except PermissionError as error:
            return Unusable("unreadable", str(error))


def _head(path: pathlib.Path) -> bytes:
    with path.open("rb") as file:
        return file.read(records.HEAD)


def _text_name(image: str, text: str) -> str:
    return f"{os.path.splitext(image)[0]}.{text}"


def _captions(
    root: pathlib.Path, names: Sequence[str], format: str, field: str
) -> dict[str, str | Unusable]:
    """Return the captions in all tables under `root`, keyed by image path.

    In Hugging Face's metadata.jsonl, the column "file_name" holds the image's path relative to the
    table. In img2dataset's tables, the column "key" holds the image's name without suffix, and the
    image is in a folder with the table's stem, such as 00000 for 00000.parquet. Rows without an
    image or a caption are left out.

    Args:
        root: the folder.
        names: paths of all files, relative to `root`.
        format: "jsonl" or "parquet".
        field: the caption column.

    Raises:
        ValueError: there is no table, or no row with an image and a caption.
    """
    tables = [name for name in names if name.endswith(f".{format}")]
    if not tables:
        raise ValueError(
            f"no .{format} files in {root}, but data.text={format}:{field} reads the captions from "
            "such files: set data.text to the format that holds the captions, such as txt"
        )
    stems = {posixpath.splitext(n)[0]: n for n in names if not n.endswith(tuple(_TABLES))}
    images = set(names)
    captions, columns = {}, set()
    for table in tables:
        folder, stem = posixpath.dirname(table), posixpath.splitext(table)[0]
        for row in _TABLES[format](root / table, field):
            columns |= row.keys()
            if "file_name" in row:
                image = posixpath.normpath(posixpath.join(folder, row["file_name"]))
            else:
                image = stems.get(posixpath.join(stem, str(row.get("key"))), "")
            if image in images and isinstance(row.get(field), str):
                captions[image] = records.cell_text(row[field])
    if not captions:
        raise ValueError(
            f"no row of {', '.join(tables[:3])} in {root} has both an existing image and a "
            f"{field!r}; the columns are {', '.join(sorted(columns)) or 'none'}: set data.text to "
            f"{format}:COLUMN with the caption column"
        )
    return captions


def _read_jsonl(path: pathlib.Path, field: str) -> Iterator[dict[str, Any]]:
    del field
    # Bytes that are not UTF-8 become surrogates. For these, `cell_text` returns Unusable.
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = untrusted.parse_json(line) if line.strip() else {}
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: invalid JSON: {error}") from error
            yield row if isinstance(row, dict) else {}


def _read_parquet(path: pathlib.Path, field: str) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet  # Slow to import, and needed by few data sets.

    with pyarrow.parquet.ParquetFile(path) as file:
        columns = file.schema_arrow.names
        name = "file_name" if "file_name" in columns else "key"
        if missing := [column for column in (name, field) if column not in columns]:
            raise ValueError(
                f"{path} has no column {missing[0]!r}, but only {', '.join(columns)}: it needs the "
                f"columns {name!r} and {field!r} (the field in data.text)"
            )
        for batch in file.iter_batches(columns=[name, field]):
            yield from batch.to_pylist()


_TABLES = {"jsonl": _read_jsonl, "parquet": _read_parquet}
