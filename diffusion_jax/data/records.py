"""Define Records, the interface of data sources, and functions that read and check their files."""

import abc
import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt64

from diffusion_jax.config.settings import UNCAPTIONED, Data
from diffusion_jax.data import embeddings, storage
from diffusion_jax.data.inventory import COMPANIONS, PICTURES, Inventory
from diffusion_jax.data.transforms import Unusable
from diffusion_jax.engines import Portable
from diffusion_jax.machine import untrusted

KNOWN = ("txt", "caption", "json", "jsonl", "csv", "tsv", "parquet", "cls", "id", "npy", "npz",
              "safetensors", "pickle", "pkl", "pt", "index", "md", "html", "xml", "yaml", "yml",
              "log")  # fmt: skip
"""Suffixes of files that often lie beside images: texts, tables, arrays and notes."""
HEAD = 2**16
"""Number of bytes to read from the start of an image file to find its height and width.

In almost all files, the header ends within these bytes."""


class Record(NamedTuple):
    """An encoded image with its caption or text embeddings."""

    image: bytes
    """The contents of a JPEG, PNG or WebP file, or of an .npy file of VAE moments."""
    text: Any
    """A caption, text embeddings [tokens, width], or an Unusable error if no text can be read."""
    name: str
    """The name of the record in messages, such as its path."""


class Records(Portable, abc.ABC):
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

    def left_out(self) -> dict[str, int]:
        """Return how many files the source left out when it was opened, keyed by reason.

        An example is {"no_caption": 3}.
        """
        return self.inventory().left_out()


def other_kind(suffix: str, text: str) -> str:
    """Return the inventory's kind of a file that is neither an image nor the text of an image.

    `suffix` is the file's suffix, and `text` the suffix of texts.
    """
    if suffix == text:
        return "no_picture"
    return COMPANIONS if suffix.rpartition(".")[2] in KNOWN else "format"


def key_of(name: str) -> int:
    """Return a 64-bit hash of a record's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def path_of(data: Data) -> str:
    """Return the config's data.path. Raises ValueError if it is empty."""
    if not data.path:
        raise ValueError(f"data.path is empty: the data source {data.source!r} needs a path")
    return data.path


def split_of(path: str) -> tuple[str, str]:
    """Split "PATH@SPLIT" into path and split name. Without "@", the split name is "".

    An "@" before the last slash belongs to the path.
    """
    place, separator, split = path.rpartition("@")
    return (place, split) if separator and "/" not in split else (path, "")


def read_text(contents: bytes, text: str) -> Any:
    """Return the caption or embeddings in a text file, or an Unusable error if it has none.

    The result is Unusable if the file is damaged, if a JSON file has no text in the field FIELD, or
    if the caption is not UTF-8.

    Args:
        contents: the file's bytes.
        text: "json:FIELD" for a caption in a field of a JSON file, "txt" or a suffix that ends in
            ".txt" for a file that holds only a caption, or the suffix of a file of embeddings.
    """
    suffix, _, field = text.partition(":")
    try:
        if field:
            return _field(untrusted.parse_json(contents), field)
        if suffix.rsplit(".")[-1] == "txt":
            return contents.decode("utf-8").strip()
        return embeddings.read(contents, suffix)
    except UnicodeDecodeError:
        return not_utf8()
    except ValueError as error:
        return Unusable("broken_text", str(error))


def not_utf8() -> Unusable:
    """Return the Unusable error for a caption that is not UTF-8."""
    return Unusable("broken_text", "the text is not UTF-8")


def cell_text(cell: Any) -> str | Unusable:
    """Return the caption in a table cell, or an Unusable error if the cell holds no UTF-8 text.

    The cell may hold a string, bytes, or a list. If it holds a list, the list's first item is used.
    """
    while isinstance(cell, list | tuple | np.ndarray) and len(cell):
        cell = cell[0]
    if isinstance(cell, bytes):
        return read_text(cell, "txt")
    return _caption(cell) if isinstance(cell, str) else Unusable("no_caption", "it holds no text")


def check_text(text: str, tables: Sequence[str] = ()) -> tuple[str, str]:
    """Check the config's data.text, and split it into (file suffix, field name or "").

    Args:
        text: data.text, such as "txt", "json:caption" or "npy".
        tables: suffixes of the tables that the source can read, such as "parquet". Like "json",
            these suffixes need a field.

    Raises:
        ValueError: the suffix needs a field and none is given, the suffix allows no field and one
            is given, or the suffix is unknown.
    """
    suffix, _, field = text.partition(":")
    if suffix.rsplit(".")[-1] in ("json", *tables):
        if not field:
            raise ValueError(f"data.text is {text!r}: add the field's name, such as {text}:caption")
    elif field:
        raise ValueError(
            f"data.text is {text!r}: a colon and a field may only follow "
            f"{' or '.join(('json', *tables))}, so write {suffix}"
        )
    else:
        embeddings.check_suffix(suffix)
    return suffix, field


def suffix_of(name: str) -> str:
    """Return the part of a file name after the first dot, in lower case: "a/b.T5.npy" -> "t5.npy".

    The result is "" for a name without a dot.
    """
    return os.path.basename(name).partition(".")[2].lower()


def check_exists(paths: Sequence[str], format: str) -> None:
    """Check that the paths of a data set exist.

    Args:
        paths: local paths or URLs.
        format: the value of --format in the command that the message suggests.

    Raises:
        FileNotFoundError: a path is missing. The message shows how to make an example data set.
    """
    missing = [path for path in paths if not storage.exists(path)]
    if not missing:
        return
    message = f"no data at {_some(missing[:3], len(missing))}: check the path"
    if not storage.is_url(missing[0]):
        out = missing[0] if len(paths) == 1 else os.path.dirname(missing[0])
        message += (
            ", or make a tiny example set with\n"
            f"  python -m diffusion_jax.data.digits --format={format} --num=100 --out={out}"
        )
    raise FileNotFoundError(message)


def check_any(num_images: int, place: Any, suffixes: Iterable[str], images: str) -> None:
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
        tars = ", or read the tars with data.source=webdataset" if "tar" in others else ""
        raise ValueError(
            f"no images in {place}: looked for {images} and found {others or 'no files at all'}; "
            f"check the path{tars}"
        )


def check_captions(
    num_bare: int,
    first: Sequence[str],
    num_images: int,
    text: str,
    uncaptioned: str,
    suffixes: Iterable[str],
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
            f"data.uncaptioned is {uncaptioned!r}: it must be 'error' or 'drop', or, for a "
            "folder, 'empty'"
        )
    if num_bare and (uncaptioned != "drop" or num_bare == num_images):
        raise ValueError(
            f"{num_bare} of {num_images} images have no text (data.text={text}): "
            f"{_some(first, num_bare)}. Add the missing texts (they may be empty), change "
            f"data.text to where the texts are (suffixes found: {_list(suffixes)}), or leave these "
            "images out with data.uncaptioned=drop; in a folder, data.uncaptioned=empty gives them "
            "an empty text"
        )


def _field(values: Any, field: str) -> str | Unusable:
    value = values.get(field) if isinstance(values, dict) else None
    return (
        _caption(value)
        if isinstance(value, str)
        else Unusable("no_caption", f"the JSON file has no text in the field {field!r}")
    )


def _caption(text: str) -> str | Unusable:
    """Return a caption without white space at its ends, or Unusable if UTF-8 cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return not_utf8()
    return text.strip()


def _some(first: Sequence[str], total: int) -> str:
    return ", ".join(first[:3]) + (f" and {total - 3} more" if total > 3 else "")


def _list(suffixes: Iterable[str]) -> str:
    return ", ".join(sorted({suffix or "files without a suffix" for suffix in suffixes}))
