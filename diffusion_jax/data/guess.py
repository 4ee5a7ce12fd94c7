"""Infers the data source and the caption field of a data set from its files."""

import contextlib
import itertools
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from absl import logging

from diffusion_jax.config.settings import TEXTS, Data
from diffusion_jax.data import records, rows, sources, storage, tars
from diffusion_jax.data.inventory import Inventory
from diffusion_jax.data.sources import metadata
from diffusion_jax.data.sources.arrow import SAVED
from diffusion_jax.data.sources.folder import Folder
from diffusion_jax.files import untrusted

# Text fields that never hold captions.
_OTHER = ("file_name", "filename", "path", "key", "url", "image", "status", "error_message",
          "sha256", "exif")  # fmt: skip
_READ = ("txt", "caption", "csv", "tsv", "json", "jsonl", "parquet")
"""Suffixes of files that may hold captions."""
_LOOKED = 100  # Number of rows or JSON files in which text fields are looked for.


def guess(path: str, text: str = "") -> Data:
    """Infer the data settings (source, caption field) for training on the pictures at `path`.

    With these settings, pictures without a caption are left out. If the files hold no captions,
    every picture gets the caption "", and the other files are logged.

    Args:
        path: a file, folder, URL, or pattern such as "shard-{00..99}.tar", or SOURCE:PATH::TEXT,
            as in sources.named.
        text: the value of data.text; "" infers it from the files.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: no data source can read the files, they are tars without captions, or there are
            tables or texts for the pictures, but no captions can be read from them.
    """
    source, _, location = path.partition(":")
    if source in sources.SOURCES and location:
        named = sources.named(path)
        return _data(source, named.path, text or named.text)
    if path.endswith((".tar", ".pkl")) or "{" in path or storage.is_url(path):
        return _of_tars(path, text)
    root = pathlib.Path(records.split_of(path)[0])
    records.check_exists([str(root)] if path else [], "folder")
    kind = root.suffix[1:].lower()
    if root.is_file() and kind in ("csv", "tsv", "jsonl"):
        if not (text := text or _field(kind, _texts(rows.read(root)))):
            raise ValueError(
                f"{path} has no column file_name or no column of captions: add it, or name the "
                "captions with --text"
            )
        return _data("folder", path, text)
    if root.is_file() or any((root / name).exists() for name in SAVED):
        return _of_table(path, root, text)
    return _of_folder(path, root, text)


def _of_folder(path: str, root: pathlib.Path, text: str) -> Data:
    """Infer the data settings for the folder `root`, which is `path` without "@SPLIT".

    Of several kinds of captions, those of the most pictures are chosen. If there are no image
    files, the settings are for the tars, ArrayRecord files or parquet tables in the folder.
    """
    kind = lambda file: records.suffix_of(file.name).rpartition(".")[2]
    files = [pathlib.Path(name) for name in storage.walk(str(root), Inventory())]
    images = {f for f in files if kind(f) in untrusted.image_suffixes()}
    stems = {f.with_suffix("") for f in images}
    kinds = {kind(f) for f in files}
    if not stems:
        if "tar" in kinds:
            return _of_tars(path, text)
        if "array_record" in kinds:
            return _data("arrayrecord", path, text or "txt")
        if "parquet" in kinds:
            return _of_table(path, root, text)
    if text or not stems:
        return _data("folder", path, text)
    named = stems | images
    beside = [f for f in files if f.with_suffix("") in named]
    places = [suffix for suffix in TEXTS if suffix in map(kind, beside)]
    places.append(_field("json", _fields(f.read_bytes() for f in beside if kind(f) == "json")))
    counts, errors = {}, []
    for place in filter(None, [*places, *_of_tables(set(files) - set(beside), errors)]):
        try:
            counts[place] = len(Folder(path, place, "drop"))
        except ValueError as error:
            errors.append(error)
    if errors and not counts:
        raise errors[0]
    if not counts:
        unread = [f for f in files if kind(f) in _READ]
        named = {stem.name for stem in stems}
        for file in unread:
            if file.stem in named:
                raise ValueError(
                    f"{file} has the name of a picture in another folder, and no picture has a "
                    "caption beside it: move each text into the folder of its picture"
                )
        if unread:
            names = ", ".join(map(str, unread[:3])) + ", ..." * (len(unread) > 3)
            logging.warning("no captions were found: %s belong to no picture", names)
    return _data("folder", path, max(counts, key=lambda place: counts[place], default=""))


def _of_tables(files: Collection[pathlib.Path], errors: list[ValueError]) -> Iterator[str]:
    """Yield the values of data.text for the tables of image captions among files.

    The error of a table that cannot be read, or has captions without names of images, is appended
    to `errors`. Other JSON than tables is ignored.
    """
    for kind, suffix in metadata.SUFFIXES.items():
        for file in sorted(file for file in files if file.suffix.lower() == suffix):
            try:
                if field := _field(kind, _texts(rows.read(file))):
                    yield field
                    break
                if likely := rows.likely(next((row for _, row in rows.read(file)), {})):
                    errors.append(ValueError(
                        f"{file} has the column {likely[0]!r}, but no column of image names: call "
                        "this column file_name, or move the table to another folder"
                    ))  # fmt: skip
            except ValueError as error:
                if suffix != ".json":
                    errors.append(error)


def _of_tars(path: str, text: str) -> Data:
    """Infer the data settings of webdataset tars from the first tar.

    Raises:
        ValueError: `text` is "" and the first tar holds no captions. Tars must hold captions.
    """
    first = tars.find(path)[0]
    index = tars.load_index(first)
    if not text:
        text = next((suffix for suffix in TEXTS if suffix in index.suffix), "")
    if not text and "json" in index.suffix:
        spans = index.span[index.suffix == "json"][:_LOOKED]
        ends = spans.sum(axis=1).tolist()
        contents = storage.read_ranges([first] * len(spans), spans[:, 0].tolist(), ends)
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
    files = [file for file in files if not file.name.startswith("cache-")]  # Results of `map`.
    if saved and not files:
        raise ValueError(f"no .arrow files in {root}: write the folder again with save_to_disk")
    if not files or files[0].suffix != suffix:
        raise ValueError(
            f"{path} is not a folder, .tar, .csv, .tsv, .jsonl or .parquet: set its data source "
            f"with --data=SOURCE:PATH, where SOURCE is one of {', '.join(sources.SOURCES)}"
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
    first = [*rows.likely(texts), *texts][:1]
    return ":".join(filter(None, (kind, *first))) if first else ""


def _fields(contents: Iterable[bytes]) -> list[str]:
    """Return the names of the text fields in JSON files that hold objects."""
    return _text_cells(value for value in map(_parsed, contents) if isinstance(value, dict))


def _parsed(content: bytes) -> Any:
    with contextlib.suppress(ValueError):  # Training counts damaged files.
        return untrusted.parse_json(content)


def _texts(table: Iterable[rows.Row]) -> list[str]:
    return _text_cells(row for _, row in table if rows.name_column(row))


def _text_cells(objects: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the fields that hold texts, or lists of texts, in the first objects."""
    is_text = lambda cell: isinstance(cell, str) and not re.fullmatch(r"[\d.+-]*", cell)
    names = {}
    for row in itertools.islice(objects, _LOOKED):
        cells = ((name, cell if isinstance(cell, list) else [cell]) for name, cell in row.items())
        names |= {name: None for name, cell in cells if any(map(is_text, cell))}
    return list(names)


def _columns(path: pathlib.Path) -> list[str]:
    import pyarrow.parquet  # Slow to import, and needed by few data sets.

    try:
        if path.suffix == ".arrow":
            schema = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).schema
        else:
            schema = pyarrow.parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}; copy or write it again") from error
    inner = lambda kind: getattr(kind, "value_type", kind)
    is_text = lambda kind: pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
    return [f.name for f in schema if is_text(inner(f.type))]
