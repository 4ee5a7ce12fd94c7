"""Records: encoded images with their texts, as they lie in files of any format."""

import abc
import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt64

from diffusion_jax.config.settings import UNCAPTIONED, Data
from diffusion_jax.data import embeddings, storage
from diffusion_jax.data.transforms import Unusable
from diffusion_jax.engines import Portable
from diffusion_jax.machine import untrusted

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")


class Record(NamedTuple):
    """One encoded image with its text."""

    image: bytes
    """A JPEG, PNG or WebP file, or one of moments."""
    text: Any
    """A caption, an array [tokens, width] of precomputed embeddings, or Unusable if damaged."""
    name: str
    """The place of the record's file, for messages."""


class Records(Portable, abc.ABC):
    """A fixed list of records, read at random and by several threads: the base of file formats."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of records."""

    @abc.abstractmethod
    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads some; OSError if the data have gone since they were listed."""

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """The texts of `read(indices)`, without reading the images where a format can."""
        return [record.text for record in self.read(indices)]

    def keys(self, indices: Int[np.ndarray, "B"]) -> UInt64[np.ndarray, "B"]:
        """What stays a record's own when others come or go: here its number."""
        return indices.astype(np.uint64)

    def left_out(self) -> dict[str, int]:
        """The number of images in the files that are not in the list, by reason."""
        return {}


def key_of(name: str) -> int:
    """64 bits of a hash of a name, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def path_of(data: Data) -> str:
    """data.path; ValueError if it is empty, which would mean the current folder."""
    if not data.path:
        raise ValueError(f"the data source {data.source!r} needs data.path: what is it to read?")
    return data.path


def split_of(path: str) -> tuple[str, str]:
    """Place and split of "PLACE@SPLIT"; a place alone has the split ""."""
    place, at, split = path.rpartition("@")
    return (place, split) if at and "/" not in split else (path, "")


def read_text(contents: bytes, text: str) -> Any:
    """The text in a file: a caption of "txt" or "json:FIELD", else embeddings; or Unusable."""
    suffix, _, field = text.partition(":")
    try:
        if field:
            return _field(untrusted.parse_json(contents), field)
        if suffix.rsplit(".")[-1] == "txt":
            return contents.decode("utf-8", errors="replace").strip()
        return embeddings.read(contents, suffix)
    except ValueError as error:
        return Unusable("broken_text", str(error))


def cell_text(cell: Any) -> str | Unusable:
    """The caption in a table's cell: text, bytes, or the first of several."""
    while isinstance(cell, list | tuple | np.ndarray) and len(cell):
        cell = cell[0]
    if isinstance(cell, bytes):
        return read_text(cell, "txt")
    return cell.strip() if isinstance(cell, str) else Unusable("no_caption", "the cell is empty")


def check_text(text: str, tables: Sequence[str] = ()) -> tuple[str, str]:
    """Suffix and field of what a config calls data.text; ValueError if nothing can read it.

    `tables` are suffixes of tables, which have fields as "json" has.
    """
    suffix, _, field = text.partition(":")
    if suffix.rsplit(".")[-1] in ("json", *tables):
        if not field:
            raise ValueError(f"data.text is {text!r}: say which field, such as {text}:caption")
    elif field:
        raise ValueError(f"data.text is {text!r}: only {', '.join(('json', *tables))} have fields")
    else:
        embeddings.check_suffix(suffix)
    return suffix, field


def suffix_of(name: str) -> str:
    """All after the first dot of a file's name, in lower case: "t5.npy" of "a/b.t5.npy"."""
    return os.path.basename(name).partition(".")[2].lower()


def check_exists(paths: Sequence[str], format: str) -> None:
    """FileNotFoundError with a command that makes an example in place of what is missing."""
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


def check_any(
    num_images: int, place: Any, suffixes: Iterable[str], images: Sequence[str] = IMAGE_SUFFIXES
) -> None:
    """ValueError if there are no `images`; it names the suffixes of the files that are there."""
    if num_images == 0:
        there = _list(suffixes)
        tars = "; tars are read by the source 'webdataset'" if "tar" in there else ""
        raise ValueError(
            f"no images in {place}: looked for {', '.join(images)} "
            f"and found {there or 'nothing at all'}{tars}"
        )


def check_captions(
    num_bare: int,
    first: Sequence[str],
    num_images: int,
    text: str,
    uncaptioned: str,
    suffixes: Iterable[str],
) -> None:
    """ValueError if images lack their text, unless they are to be dropped and some are left.

    `first` are the names of up to three of them; `suffixes` are those of all files.
    """
    if uncaptioned not in UNCAPTIONED:
        raise ValueError(
            f"uncaptioned is {uncaptioned!r}: it must be 'error' or 'drop', or of a folder 'empty'"
        )
    if num_bare and (uncaptioned != "drop" or num_bare == num_images):
        raise ValueError(
            f"{num_bare} of {num_images} images have no .{text} beside them: "
            f"{_some(first, num_bare)}. Write a .{text} of the same stem for each (an empty one "
            f"will do), say with data.text where the texts are (there are files of "
            f"{_list(suffixes)}), or leave these images out with data.uncaptioned=drop; a "
            "folder's are trained without a text with data.uncaptioned=empty"
        )


def _field(values: Any, field: str) -> str | Unusable:
    value = values.get(field) if isinstance(values, dict) else None
    return value.strip() if isinstance(value, str) else Unusable("no_caption", f"no {field!r}")


def _some(first: Sequence[str], total: int) -> str:
    return ", ".join(first[:3]) + (f" and {total - 3} more" if total > 3 else "")


def _list(suffixes: Iterable[str]) -> str:
    return ", ".join(sorted({suffix or "files without a suffix" for suffix in suffixes}))
