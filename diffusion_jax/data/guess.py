"""Which source opens what a path holds, and where its captions are: told from the files there."""

import pathlib
import re
from collections.abc import Iterable

import numpy as np

from diffusion_jax.config.settings import Data
from diffusion_jax.data import records, sources, storage, tars
from diffusion_jax.data.sources.arrow import SAVED
from diffusion_jax.machine import untrusted

_NAMES = ("caption", "captions", "text", "prompt", "description", "title")
"""What people call captions, the likeliest first; other fields of text come after these."""
_OTHER = ("file_name", "key", "url", "image", "status", "error_message", "sha256", "exif")


def guess(path: str, text: str = "") -> Data:
    """The data group that opens `path`, which may also be SOURCE:PATH::TEXT.

    `text` is data.text, "" for what the files say. Pictures without a caption are left out, or, if
    none has one, have the text "". FileNotFoundError or ValueError for what no source opens.
    """
    source, _, rest = path.partition(":")
    if source in sources.SOURCES and rest:
        named = sources.named(path)
        return _data(source, named.path, text or named.text)
    if path.endswith((".tar", ".pkl")) or "{" in path or storage.is_url(path):
        return _of_tars(path, text)
    place = pathlib.Path(records.split_of(path)[0])
    records.check_exists([str(place)] if path else [], "folder")
    if path.endswith(".jsonl"):
        return _data("folder", str(place.parent), text or _field("jsonl", _fields(_lines(place))))
    if place.is_file() or any((place / name).exists() for name in SAVED):
        return _of_table(path, place, text)
    return _of_folder(path, place, text)


def _of_folder(path: str, root: pathlib.Path, text: str) -> Data:
    """Pictures with what stands beside them; without any, tars, tables or records."""
    kind = lambda file: records.suffix_of(file.name).rpartition(".")[2]
    files = sorted(f for f in root.rglob("*") if f.is_file() and not f.name.startswith("."))
    stems = {f.with_suffix("") for f in files if kind(f) in records.IMAGE_SUFFIXES}
    beside = lambda file: kind(file) not in ("txt", "json") or file.with_suffix("") in stems
    first = {kind(f): f for f in reversed(files) if beside(f)}  # The first file of each kind.
    if not stems:
        if "tar" in first:
            return _of_tars(path, text)
        if "array_record" in first:
            return _data("arrayrecord", path, text or "txt")
        if "parquet" in first:
            return _of_table(path, root, text)
    if text or "txt" in first:
        text = text or "txt"
    elif "jsonl" in first:
        text = _field("jsonl", _fields(_lines(first["jsonl"])))
    elif "parquet" in first:
        text = _field("parquet", _columns(first["parquet"]))
    elif "json" in first:
        text = _field("json", _fields([first["json"].read_bytes()]))
    return _data("folder", path, text)


def _of_tars(path: str, text: str) -> Data:
    """ValueError where the first tar holds no texts: tars cannot be trained on without."""
    first = tars.find(path)[0]
    index = tars.load_index(first)
    if not text and "txt" in index.suffix:
        text = "txt"
    elif not text and "json" in index.suffix:
        offset, size = index.span[np.flatnonzero(index.suffix == "json")[0]].tolist()
        contents = storage.read_ranges([first], [offset], [offset + size])
        text = _field("json", _fields(contents))
    if not text:
        there = ", ".join(sorted(set(index.suffix.tolist())))
        raise ValueError(
            f"{first} has files of {there or 'no kind'}, and no captions: say with --text where "
            "they are, or unpack it into a folder, whose pictures are trained on without"
        )
    return _data("webdataset", path, text)


def _of_table(path: str, place: pathlib.Path, text: str) -> Data:
    """A table with the pictures in it, as `datasets` writes and opens it."""
    saved = not place.is_file() and any((place / name).exists() for name in SAVED)
    suffix = ".arrow" if saved else ".parquet"
    files = [place] if place.is_file() else sorted(place.rglob(f"*{suffix}"))
    if not files or files[0].suffix != suffix:
        raise ValueError(
            f"{path} is no folder, no .tar, .jsonl or .parquet: say what it is with "
            f"--data=SOURCE:PATH, of the sources {', '.join(sources.SOURCES)}"
        )
    training = [
        f for f in files if re.search(r"(?<![a-z])train(?![a-z])", str(f.relative_to(place)))
    ]
    split = "" if "@" in path or not training or training == files == [place] else "@train"
    in_one = saved and files[0].parent == place  # The folder of a split.
    text = text or _field("", _columns((training or files)[0]))
    return _data("arrow" if saved else "huggingface", path + split * (not in_one), text)


def _data(source: str, path: str, text: str) -> Data:
    kept = "drop" if text else "empty"
    return Data(source, path, text or "txt", uncaptioned=kept)


def _field(kind: str, names: Iterable[str]) -> str:
    """data.text of the likeliest of these fields of text; "" for none of them."""
    texts = [name for name in names if name not in _OTHER]
    likely = [name for name in _NAMES if name in texts] + texts
    return ":".join(filter(None, (kind, likely[0]))) if likely else ""


def _fields(rows: Iterable[bytes | str]) -> list[str]:
    """The fields of text of the first row that is an object."""
    for row in rows:
        value = untrusted.parse_json(row)
        if isinstance(value, dict):
            return [name for name, cell in value.items() if isinstance(cell, str)]
    return []


def _lines(path: pathlib.Path) -> Iterable[str]:
    with path.open(encoding="utf-8") as lines:
        yield from filter(str.strip, lines)


def _columns(path: pathlib.Path) -> list[str]:
    """The columns of text, or of several texts, of a table."""
    import pyarrow.parquet  # Slow to import, and few data sets need it.

    if path.suffix == ".arrow":
        schema = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).schema
    else:
        schema = pyarrow.parquet.read_schema(path)
    inner = lambda kind: getattr(kind, "value_type", kind)
    return [f.name for f in schema if pyarrow.types.is_string(inner(f.type))]
