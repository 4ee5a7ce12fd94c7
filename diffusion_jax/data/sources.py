"""Where records come from: the shape of every source, and folders of image files."""

import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from diffusion_jax.data import embeddings, storage, tables
from diffusion_jax.data.transforms import Unusable

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")


class Record(NamedTuple):
    """One encoded image with its text."""

    image: bytes
    """A JPEG, PNG or WebP file, or one of moments."""
    text: Any
    """A caption, an array [tokens, width] of precomputed embeddings, or Unusable if damaged."""
    name: str
    """Where it was found, for messages."""


@runtime_checkable
class Records(Protocol):
    """A fixed list of records, read at random and by several threads."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads some; OSError if the data have gone since they were listed."""
        ...

    def left_out(self) -> dict[str, int]:
        """How many things were found but are not in the list, by reason."""
        ...


@runtime_checkable
class TextRecords(Protocol):
    """Records whose texts can be read without their images."""

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """The texts of `read(indices)`."""
        ...


class Folder:
    """The images under a folder, in the order of their names, each with a text.

    `text` says where the texts are: the suffix of files of the same stem ("txt", "json:caption",
    or precomputed embeddings such as "npy" or "t5.npz"), or tables that name the images
    ("jsonl:caption", "parquet:caption", see tables.captions). `uncaptioned` says what happens to
    images without a text: "error" or "drop".
    """

    def __init__(self, path: str | os.PathLike[str], text: str = "txt", uncaptioned: str = "error"):
        """Lists the files and reads tables; FileNotFoundError or ValueError if they cannot do."""
        self._root, self._text = pathlib.Path(path), text
        check_exists([os.fspath(path)], "folder")
        suffix, field = check_text(text, tables.FORMATS)
        names = _walk(self._root)
        images = [n for n in sorted(names) if suffix_of(n).rsplit(".")[-1] in IMAGE_SUFFIXES]
        suffixes = [suffix_of(name) for name in names]
        check_any(len(images), self._root, suffixes)
        self._captions: Mapping[str, str] = {}
        if suffix in tables.FORMATS:
            self._captions = tables.captions(self._root, sorted(names), suffix, field)
            self._images = [n for n in images if n in self._captions]
        else:
            self._images = [n for n in images if _text_name(n, suffix) in names]
        bare = sorted(set(images) - set(self._images))
        check_captions(len(bare), bare[:3], len(images), text, uncaptioned, suffixes)
        self._left_out = {"no_caption": len(bare)} if bare else {}

    def __len__(self) -> int:
        """How many images have a text."""
        return len(self._images)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads the files; OSError if they have gone."""
        return [self._read(self._images[index]) for index in indices]

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """Reads the texts alone; OSError if their files have gone."""
        return [self._read_text(self._images[index]) for index in indices]

    def left_out(self) -> dict[str, int]:
        """Images without a text, as {"no_caption": n}."""
        return self._left_out

    def _read(self, name: str) -> Record:
        return Record((self._root / name).read_bytes(), self._read_text(name), name)

    def _read_text(self, name: str) -> Any:
        if self._captions:
            return self._captions[name]
        beside = self._root / _text_name(name, self._text.partition(":")[0])
        return read_text(beside.read_bytes(), self._text)


def read_text(contents: bytes, text: str) -> Any:
    """What a file holds: a caption of "txt" or "json:FIELD", else embeddings; or Unusable."""
    suffix, _, field = text.partition(":")
    kind = suffix.rsplit(".")[-1]
    try:
        if field:
            return _field(json.loads(contents), field)
        if kind == "txt":
            return contents.decode("utf-8", errors="replace").strip()
        return embeddings.read(contents, suffix)
    except ValueError as error:
        return Unusable("broken_text", str(error))


def check_text(text: str, formats: Sequence[str] = ()) -> tuple[str, str]:
    """Suffix and field of what a config calls data.text; ValueError if nothing can read it.

    `formats` are those of tables, which may stand for the suffix besides "json".
    """
    suffix, _, field = text.partition(":")
    kind = suffix.rsplit(".")[-1]
    if kind in ("json", *formats):
        if not field:
            raise ValueError(f"data.text is {text!r}: say which field, such as {text}:caption")
    elif field:
        raise ValueError(f"data.text is {text!r}: only {', '.join(('json', *formats))} have fields")
    else:
        embeddings.check_suffix(suffix)
    return suffix, field


def suffix_of(name: str) -> str:
    """What follows the first dot of the last part, in lower case: "t5.npy" of "a/b.t5.npy"."""
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
    """ValueError if there are no `images`, saying what there is instead: the suffixes found."""
    if num_images == 0:
        found = _list(suffixes)
        tars = "; tars are read by the source 'webdataset'" if "tar" in found else ""
        raise ValueError(
            f"no images in {place}: looked for {', '.join(images)} "
            f"and found {found or 'nothing at all'}{tars}"
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
    if uncaptioned not in ("error", "drop"):
        raise ValueError(f"uncaptioned is {uncaptioned!r}: it must be 'error' or 'drop'")
    if num_bare and (uncaptioned == "error" or num_bare == num_images):
        raise ValueError(
            f"{num_bare} of {num_images} images have no .{text} beside them: "
            f"{_some(first, num_bare)}. Write a .{text} of the same stem for each (an empty one "
            f"will do), say with data.text where the texts are (there are files of "
            f"{_list(suffixes)}), or leave these images out with data.uncaptioned=drop"
        )


def _field(values: Any, field: str) -> str | Unusable:
    value = values.get(field) if isinstance(values, dict) else None
    return value.strip() if isinstance(value, str) else Unusable("no_caption", f"no {field!r}")


def _some(first: Sequence[str], total: int) -> str:
    return ", ".join(first[:3]) + (f" and {total - 3} more" if total > 3 else "")


def _list(suffixes: Iterable[str]) -> str:
    return ", ".join(sorted({suffix or "files without a suffix" for suffix in suffixes}))


def _walk(root: pathlib.Path) -> set[str]:
    """Every file under a folder, relative to it, but for hidden ones (macOS writes ._a.jpg)."""
    return {
        os.path.relpath(os.path.join(folder, file), root)
        for folder, _, files in os.walk(root)
        for file in files
        if not file.startswith(".")
    }


def _text_name(image: str, text: str) -> str:
    return f"{os.path.splitext(image)[0]}.{text}"
