"""Infers the data source and the caption field of a data set from its files."""

import pathlib
import re
from collections.abc import Iterable

import numpy as np

from diffusion_jax.config.settings import Data
from diffusion_jax.data import records, sources, storage, tars
from diffusion_jax.data.inventory import Inventory
from diffusion_jax.data.sources.arrow import SAVED
from diffusion_jax.machine import untrusted

_NAMES = ("caption", "captions", "text", "prompt", "description", "title")
"""Common names of caption fields, the likeliest first. Other text fields come after these."""
# Text fields that never hold captions.
_OTHER = ("file_name", "key", "url", "image", "status", "error_message", "sha256", "exif")


def guess(path: str, text: str = "") -> Data:
    """Infer the data settings (source, caption field) for training on the pictures at `path`.

    With these settings, pictures without a caption are left out. If there are no captions at all,
    every picture gets the caption "".

    Args:
        path: a file, folder, URL, or pattern such as "shard-{00..99}.tar", or SOURCE:PATH::TEXT,
            as in sources.named.
        text: the value of data.text; "" infers it from the files.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: no data source can read the files, or they are tars without captions.
    """
    source, _, location = path.partition(":")
    if source in sources.SOURCES and location:
        named = sources.named(path)
        return _data(source, named.path, text or named.text)
    if path.endswith((".tar", ".pkl")) or "{" in path or storage.is_url(path):
        return _of_tars(path, text)
    root = pathlib.Path(records.split_of(path)[0])
    records.check_exists([str(root)] if path else [], "folder")
    if path.endswith(".jsonl"):
        return _data("folder", str(root.parent), text or _field("jsonl", _fields(_lines(root))))
    if root.is_file() or any((root / name).exists() for name in SAVED):
        return _of_table(path, root, text)
    return _of_folder(path, root, text)


def _of_folder(path: str, root: pathlib.Path, text: str) -> Data:
    """Infer the data settings for the folder `root`, which is `path` without "@SPLIT".

    If there are no image files, the settings are for the tars, ArrayRecord files or parquet tables
    in the folder.
    """
    kind = lambda file: records.suffix_of(file.name).rpartition(".")[2]
    files = [pathlib.Path(name) for name in storage.walk(str(root), Inventory())]
    stems = {f.with_suffix("") for f in files if kind(f) in untrusted.image_suffixes()}
    relevant = lambda file: kind(file) not in ("txt", "json") or file.with_suffix("") in stems
    first = {kind(f): f for f in reversed(files) if relevant(f)}  # The first file of each suffix.
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
    """Infer the data settings of webdataset tars from the first tar.

    Raises:
        ValueError: `text` is "" and the first tar holds no captions. Tars must hold captions.
    """
    first = tars.find(path)[0]
    index = tars.load_index(first)
    if not text and "txt" in index.suffix:
        text = "txt"
    elif not text and "json" in index.suffix:
        offset, size = index.span[np.flatnonzero(index.suffix == "json")[0]].tolist()
        contents = storage.read_ranges([first], [offset], [offset + size])
        text = _field("json", _fields(contents))
    if not text:
        suffixes = ", ".join(sorted(set(index.suffix.tolist())))
        raise ValueError(
            f"no captions in {first} (suffixes of its files: {suffixes or 'none'}): set --text to "
            "the captions' suffix, or unpack the tar into a folder: there, captions are optional"
        )
    return _data("webdataset", path, text)


def _of_table(path: str, root: pathlib.Path, text: str) -> Data:
    """Infer the data settings for Hugging Face tables of images (.parquet or .arrow).

    `root` is `path` without "@SPLIT".

    Raises:
        ValueError: there is no .parquet or .arrow file at `path`.
    """
    saved = not root.is_file() and any((root / name).exists() for name in SAVED)
    suffix = ".arrow" if saved else ".parquet"
    files = [root] if root.is_file() else sorted(root.rglob(f"*{suffix}"))
    if saved and not files:
        raise ValueError(f"no .arrow files in {root}: write the folder again with save_to_disk")
    if not files or files[0].suffix != suffix:
        raise ValueError(
            f"{path} is not a folder, .tar, .jsonl or .parquet: set its data source with "
            f"--data=SOURCE:PATH, where SOURCE is one of {', '.join(sources.SOURCES)}"
        )
    training = [
        f for f in files if re.search(r"(?<![a-z])train(?![a-z])", str(f.relative_to(root)))
    ]
    split = "" if "@" in path or not training or training == files == [root] else "@train"
    is_split = saved and files[0].parent == root  # The path names the folder of one split.
    text = text or _field("", _columns((training or files)[0]))
    return _data("arrow" if saved else "huggingface", path + split * (not is_split), text)


def _data(source: str, path: str, text: str) -> Data:
    uncaptioned = "drop" if text else "empty"
    return Data(source, path, text or "txt", uncaptioned=uncaptioned)


def _field(kind: str, names: Iterable[str]) -> str:
    """Return the value of data.text for the likeliest caption field, or "" if there is none.

    Args:
        kind: suffix of the files with the fields; "" for the columns of a Hugging Face table.
        names: names of the text fields.
    """
    texts = [name for name in names if name not in _OTHER]
    likely = [name for name in _NAMES if name in texts] + texts
    return ":".join(filter(None, (kind, likely[0]))) if likely else ""


def _fields(rows: Iterable[bytes | str]) -> list[str]:
    """Return the names of the string fields in the first row that is a JSON object."""
    for row in rows:
        value = untrusted.parse_json(row)
        if isinstance(value, dict):
            return [name for name, cell in value.items() if isinstance(cell, str)]
    return []


def _lines(path: pathlib.Path) -> Iterable[str]:
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        yield from filter(str.strip, lines)


def _columns(path: pathlib.Path) -> list[str]:
    """Return the names of a table's columns that hold strings or lists of strings."""
    import pyarrow.parquet  # Slow to import, and needed by few data sets.

    if path.suffix == ".arrow":
        schema = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).schema
    else:
        schema = pyarrow.parquet.read_schema(path)
    inner = lambda kind: getattr(kind, "value_type", kind)
    return [f.name for f in schema if pyarrow.types.is_string(inner(f.type))]
