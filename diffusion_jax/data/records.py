"""Define Records, the interface of data sources, and functions that read and check their files."""

import abc
import hashlib
import io
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Int, UInt64

from diffusion_jax import files
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.settings import EMBEDDINGS, TEXTS, UNCAPTIONED, Data
from diffusion_jax.data import captions, embeddings, storage
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import COMPANIONS, PICTURES, Inventory
from diffusion_jax.data.rows import READERS
from diffusion_jax.files import untrusted

_FACTS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "features.json", "state.json")
"""Files in which TFDS and Hugging Face's datasets describe the records beside them."""
KNOWN = (
    "txt",
    "caption",
    "json",
    "jsonl",
    "csv",
    "tsv",
    "parquet",
    "cls",
    "id",
    "npy",
    "npz",
    "safetensors",
    "pickle",
    "pkl",
    "pt",
    "index",
    "md",
    "html",
    "xml",
    "yaml",
    "yml",
    "log",
)
"""Suffixes of files that often lie beside images: texts, tables, arrays and notes."""
_LINES = "lines"  # The field of a text file with one caption per line.
HEAD = 2**16
"""Number of bytes to read from the start of an image file to find its height and width.

In almost all files, the header ends within these bytes."""


class Record(NamedTuple):
    """An encoded image with its caption or text embeddings."""

    image: bytes
    """The contents of an image file, or of an .npy file of VAE moments."""
    text: Any
    """A caption, text embeddings [tokens, width], captions.Captions with several of these, or an
    Unusable error if no text can be read."""
    name: str
    """The name of the record in messages, such as its path."""
    numbers: Mapping[str, Any] = {}
    """The values of data.fields as they are stored, keyed by Field.name, or Unusable errors."""
    mask: bytes | None = None
    """The contents of the image file of the loss's weights, with data.loss_mask="file"."""


class Records(abc.ABC):
    """Abstract base class of data sources: a thread-safe list of encoded images with texts."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, indices: Sequence[int]) -> list[Record]:
        """Return the records with these indices. Raises OSError if a file has been removed."""

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """Return the caption or embeddings of each record, or Unusable if the text cannot be read.

        The base class reads the images too. Formats that can read texts alone override this method.
        """
        return [record.text for record in self.read(indices)]

    def heads(self, indices: Sequence[int]) -> list[bytes]:
        """Return at least the first HEAD bytes of each image file, or all bytes of a shorter file.

        These bytes usually contain the image's height and width. The base class returns complete
        files.
        """
        return [record.image for record in self.read(indices)]

    def ends(self, indices: Sequence[int]) -> list[bytes]:
        """Return the last HEAD bytes of each image file, or all bytes of a shorter file.

        The base class returns no bytes, because its heads are complete files.
        """
        return [b""] * len(indices)

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """Return an integer key for each record.

        Formats whose records have names derive the key from the name, so that it stays the same
        when other records are added or removed. The base class returns the index.
        """
        return indices.astype(np.uint64)

    def inventory(self) -> Inventory:
        """Return the files that the source used and left out when it was opened.

        The base class returns the number of records.
        """
        inventory = Inventory()
        inventory.add(PICTURES, (), len(self))
        return inventory

    def files(self) -> list[str]:
        """Return the paths or URLs of the files that hold the records, in a fixed order.

        They show whether the records have changed. The base class returns none.
        """
        return []

    def id(self) -> str:
        """Return a digest of the texts that a table holds; "" in the base class."""
        return ""

    def left_out(self) -> dict[str, int]:
        """Return how many files the source left out when it was opened, keyed by reason.

        An example is {"no_caption": 3}.
        """
        return self.inventory().left_out()


def other_kind(suffix: str, texts: Collection[str]) -> str:
    """Return the inventory's kind of a file that is neither an image nor the text of an image.

    `suffix` is the file's suffix, and `texts` holds the suffixes of texts.
    """
    last = suffix.rpartition(".")[2]
    if suffix in texts or last in texts:
        return "no_picture"
    return COMPANIONS if last in KNOWN else "format"


def beside(name: str, kind: str) -> str:
    """Return the inventory's kind of a file beside the files that hold the records.

    It is `kind` if the file is a picture or a table, which may have been meant to be read.
    """
    suffix = os.path.splitext(name.lower())[1]
    is_read = suffix in READERS or suffix[1:] in untrusted.image_suffixes()
    return kind if is_read else other_kind(suffix[1:], ())


def count_beside(folder: str, own: Sequence[str], inventory: Inventory) -> list[str]:
    """Return the files under a folder that hold records, and add the others to the inventory.

    `own` holds parts of the names of files with records, such as ".array_record".
    """
    found = list[str]()
    for name in storage.walk(folder, inventory):
        base = os.path.basename(name)
        if any(part in base for part in own):
            found.append(name)
        elif base not in _FACTS:
            inventory.add(beside(name, "beside_records"), [name])
    return found


def key_of(name: str) -> int:
    """Return a 64-bit hash of a record's name."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")


def path_of(data: Data) -> str:
    """Return the config's data.path. Raises ValueError if it is empty."""
    if not data.path:
        raise ValueError(f"data.path is empty: the data source {data.source!r} needs a path")
    return data.path


def split_of(path: str) -> tuple[str, str]:
    """Split "PATH@SPLIT" into path and split name. Without "@", the split name is "".

    An "@" before the last slash, or in the name of a file or folder that exists, belongs to the
    path.
    """
    place, separator, split = path.rpartition("@")
    is_split = separator and "/" not in split and not os.path.exists(path)
    return (place, split) if is_split else (path, "")


class Alternative(NamedTuple):
    """One of the places in data.text, such as "json:long" in "txt,json:long*0.5"."""

    text: str
    suffix: str
    field: str
    """The part after the colon, or ""."""
    weight: float


def check_text(text: str, tables: Collection[str] = ()) -> list[Alternative]:
    """Check the config's data.text, and split it into the places that it names.

    Args:
        text: data.text, such as "txt", "txt:lines", "json:caption", "npy" or "txt,json:long*0.5".
        tables: the kinds of tables that the source can read, such as "parquet". Like "json",
            these need a field.

    Raises:
        ValueError: a place needs a field and none is given, allows no field and one is given, or
            is unknown; or captions and embeddings are mixed.
    """
    found = []
    for name, weight in captions.alternatives(text):
        suffix, _, field = name.partition(":")
        last = suffix.rsplit(".")[-1]
        if last in ("json", *tables):
            if not field:
                raise ValueError(f"data.text is {text!r}: add the field's name, such as {name}:caption")
        elif field and (last not in TEXTS or field != _LINES):
            raise ValueError(
                f"data.text is {text!r}: a colon and a field may only follow "
                f"{' or '.join(('json', *tables))}, so write {suffix}"
            )
        else:
            embeddings.check_suffix(suffix)
        found.append(Alternative(name, suffix, field, weight))
    if len({part.suffix.endswith(EMBEDDINGS) for part in found}) > 1:
        raise ValueError(f"data.text is {text!r}: name either captions or embeddings, not both")
    return found


def read_text(contents: bytes, text: str) -> Any:
    """Return the caption, Captions or embeddings in a text file, or an Unusable error.

    The result is Unusable if the file is damaged, if a JSON file has no text in the field FIELD, or
    if a caption is not UTF-8.

    Args:
        contents: the file's bytes.
        text: one place in data.text: "json:FIELD" for the captions in a field of a JSON file, "txt"
            or "caption", or a suffix that ends in one of these, for a file that holds only a
            caption, "txt:lines" for one caption per line, or the suffix of a file of embeddings.
    """
    suffix, _, field = text.partition(":")
    is_text = (last := suffix.rsplit(".")[-1]) in TEXTS
    if last not in ("json", *TEXTS):
        try:
            return embeddings.read(contents, text)
        except ValueError as error:
            return Unusable("broken_text", str(error))
    try:
        decoded = untrusted.decode(contents)
    except ValueError as error:
        return Unusable("broken_text", f"the text is {error}")
    if is_text:
        lines = untrusted.split_lines(decoded) if field else [decoded]
        return captions.join((line.strip(), 1.0) for line in lines if line.strip() or not field)
    try:
        values = untrusted.parse_json(decoded)
    except ValueError as error:
        return Unusable("broken_text", f"invalid JSON: {error}")
    value = values.get(field) if isinstance(values, dict) else None
    if value is None:
        return Unusable("no_caption", f"the JSON file has no text in the field {field!r}")
    return cell_text(value)


def check_places(fields: Sequence[Field], kinds: Collection[str]) -> None:
    """Raise ValueError if a place in data.fields is not one of the kinds that the source reads."""
    for field in fields:
        if field.place and field.place not in kinds:
            advice = f"use {' or '.join(kinds)}" if kinds else "leave out the kind"
            raise ValueError(
                f"data.fields has {field.place}:{field.name}, which this data source cannot read: {advice}"
            )


def read_numbers(contents: bytes, fields: Sequence[Field]) -> dict[str, Any]:
    """Return the values of data.fields in a JSON file, or Unusable errors, keyed by Field.name."""
    names = [field.name for field in fields]
    try:
        values = untrusted.parse_json(untrusted.decode(contents))
    except ValueError as error:
        return dict.fromkeys(names, Unusable("broken_number", f"invalid JSON: {error}"))
    return {name: values.get(name) for name in names} if isinstance(values, dict) else {}


def number_of(field: Field, value: Any) -> float | Unusable:
    """Return `value` as a number, or an Unusable error if it is no number in the field's range."""
    if isinstance(value, Unusable):
        return value
    try:
        return field.number(value)
    except ValueError as error:
        return Unusable("broken_number", str(error))


def checked_numbers(numbers: Mapping[str, Any], fields: Sequence[Field]) -> dict[str, float]:
    """Return the numbers of a record in the range of their fields, keyed by Field.name.

    Raises:
        Unusable: with the reason "broken_number" if a field is missing, is not a number, or is not
            in its range.
    """
    for value in numbers.values():
        if isinstance(value, Unusable):
            raise value
    try:
        return {field.name: field.number(numbers.get(field.name)) for field in fields}
    except ValueError as error:
        raise Unusable("broken_number", str(error)) from None


def write_text(text: Any, numbers: Mapping[str, float] = {}) -> dict[str, bytes]:
    """Return the files of a caption, of Captions or of embeddings, keyed by suffix.

    The suffix is "txt" for a caption, and "npy" for embeddings. Several captions are in the field
    "captions" of a "json" file, as pairs [text, weight]. Numbers are fields of this file.
    """
    values, files = dict[str, Any](numbers), dict[str, bytes]()
    if isinstance(text, captions.Captions):
        pairs = [[each, weight] for each, weight in zip(*text, strict=True)]
        values = {"captions": pairs, **values}
    elif isinstance(text, str):
        files = {"txt": text.encode()}
    else:
        array = io.BytesIO()
        np.save(array, text)
        files = {"npy": array.getvalue()}
    if values:
        files["json"] = json.dumps(values, ensure_ascii=False).encode()
    return files


def cell_text(cell: Any) -> Any:
    """Return the caption in a table cell, Captions if it holds a list, or an Unusable error.

    The cell may hold a string, bytes, None, or a list of these. An item of a list may also be a
    pair [text, weight].
    """
    if isinstance(cell, np.ndarray):
        cell = cell.tolist()
    if isinstance(cell, bytes):
        return read_text(cell, TEXTS[0])
    if isinstance(cell, list | tuple):
        return captions.join(_weighted(item) for item in cell)
    if cell is None:
        return Unusable("no_caption", "it holds no text")
    if not isinstance(cell, str):
        return Unusable("broken_text", f"{cell!r:.60} is not a text")
    try:
        cell.encode()
    except UnicodeEncodeError as error:
        # A byte that is not UTF-8 was decoded to 0xDC00 plus this byte.
        number = ord(cell[error.start])
        if 0xDC80 <= number <= 0xDCFF:
            return not_utf8(number - 0xDC00)
        half = f"the text holds one half (U+{number:04X}) of a character: write both halves"
        return Unusable("broken_text", half)
    return untrusted.without_marks(cell).strip()


def not_utf8(byte: int) -> Unusable:
    """Return the Unusable error for a caption with a byte that is not UTF-8."""
    return Unusable("broken_text", f"the text is not UTF-8 text (byte {byte & 0xFF:#04x})")


def _weighted(item: Any) -> tuple[Any, float]:
    match item:
        case [str() as text, int() | float() as weight] if 0 < weight < math.inf:
            return cell_text(text), float(weight)
    return cell_text(item), 1.0


def image_column(columns: Sequence[str], name: str) -> str:
    """Return "image", or the first of `columns` if none is called so, and warn if there are others.

    `name` is the name of the table with these columns of images, for the warning.
    """
    column = "image" if "image" in columns else columns[0]
    if len(columns) > 1:
        logging.warning("%s has several image columns (%s): reading %s", name, ", ".join(columns), column)
    return column


def suffix_of(name: str) -> str:
    """Return the part of a file name after the first dot, in lower case: "a/b.T5.npy" -> "t5.npy".

    The result is "" for a name without a dot.
    """
    return os.path.basename(name).partition(".")[2].lower()


def check_exists(paths: Sequence[str], format: str) -> None:
    """Check that the paths of a data set exist, and that none is a zip file.

    Args:
        paths: local paths or URLs.
        format: the value of --format in the command that the message suggests.

    Raises:
        FileNotFoundError: a path is missing. The message shows how to make an example data set.
        ValueError: a path is a zip file.
    """
    missing = [path for path in paths if not files.path(path).exists()]
    if not missing:
        for path in paths:
            if path.lower().endswith(".zip") and not storage.is_folder(path):
                raise ValueError(f"{path} is a zip file, which is not read: unpack it into a folder")
        return
    message = f"no data at {_some(missing[:3], len(missing))}: check the path"
    if not storage.is_url(missing[0]):
        out = missing[0] if len(paths) == 1 else os.path.dirname(missing[0])
        message += (
            ", or make a tiny example set with\n"
            f"  python -m diffusion_jax.data.digits --format={format} --num=100 --out={out}"
        )
    raise FileNotFoundError(message)


def check_any(num_images: int, place: Any, suffixes: Collection[str], images: str) -> None:
    """Check that a data source has images.

    Args:
        num_images: number of images found.
        place: the path that was searched, for the error message.
        suffixes: the suffixes of all files found, for the error message.
        images: the kind of files that count as images, for the error message.

    Raises:
        ValueError: `num_images` is 0.
    """
    if num_images == 0:
        others = _list(suffixes)
        advice = ", or read the tars with data.source=webdataset" if "tar" in suffixes else ""
        advice += ", or unpack the zip files" if "zip" in others else ""
        advice += ", or name a TFDS folder as tfds:FOLDER@SPLIT" if "record-0" in others else ""
        advice += ", or decompress the tars" if "tar." in others or "tgz" in others else ""
        endings = {suffix: suffix.rpartition(".") for suffix in suffixes}
        dotted = [s for s, (_, dot, last) in endings.items() if dot and last in untrusted.image_suffixes()]
        if dotted:
            advice += (
                f", or rename the files that end in .{min(dotted)}: in a tar, the name of a record "
                "ends at its first dot"
            )
        for suffix, package in (("heic", "pillow-heif"), ("jxl", "pillow-jxl-plugin")):
            advice += f", or install {package}, which reads .{suffix}" if suffix in others else ""
        raise ValueError(
            f"no images in {place}: looked for {images} and found {others or 'no files at all'}; check the path{advice}"
        )


def check_captions(
    num_bare: int, first: Sequence[str], num_images: int, text: str, uncaptioned: str, suffixes: Iterable[str]
) -> None:
    """Check that every image has a text, or that data.uncaptioned drops images without one.

    Args:
        num_bare: number of images without a text.
        first: names of some images without a text. The error message shows up to three.
        num_images: number of all images.
        text: the value of data.text, for the error message.
        uncaptioned: the value of data.uncaptioned.
        suffixes: the suffixes of all files, for the error message.

    Raises:
        ValueError: some images lack a text and `uncaptioned` is not "drop", all images lack a text,
            or `uncaptioned` is unknown.
    """
    if uncaptioned not in UNCAPTIONED:
        raise ValueError(
            f"data.uncaptioned is {uncaptioned!r}: it must be 'error' or 'drop', or, for a folder, 'empty'"
        )
    if num_bare and (uncaptioned != "drop" or num_bare == num_images):
        raise ValueError(
            f"{num_bare} of {num_images} images have no text (data.text={text}): "
            f"{_some(first, num_bare)}. Add the missing texts (they may be empty), change "
            f"data.text to where the texts are (suffixes found: {_list(suffixes)}), or leave these "
            "images out with data.uncaptioned=drop; in a folder, data.uncaptioned=empty gives them "
            "an empty text"
        )


def _some(first: Sequence[str], total: int) -> str:
    return ", ".join(first[:3]) + (f" and {total - 3} more" if total > 3 else "")


def _list(suffixes: Iterable[str]) -> str:
    return ", ".join(sorted({suffix or "files without a suffix" for suffix in suffixes}))
