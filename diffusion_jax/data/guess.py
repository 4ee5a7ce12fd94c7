"""Infers the data source and the caption field of a data set from its files."""

import collections
import contextlib
import itertools
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from absl import logging

from diffusion_jax.config.settings import TEXTS, Data
from diffusion_jax.data import home, records, rows, sources, storage, tars
from diffusion_jax.data.inventory import Inventory, LeftOut
from diffusion_jax.data.sources import folder, metadata
from diffusion_jax.data.sources.arrow import SAVED
from diffusion_jax.data.table import Table
from diffusion_jax.files import untrusted
from diffusion_jax.logs import progress

# Text fields that never hold captions.
_OTHER = (*rows.FILES, "key", "url", "html", "status", "error_message", "sha256", "exif")
_OTHER += ("negative_prompt", "negative", "license", "copyright")
_READ = ("txt", "caption", "csv", "tsv", "json", "jsonl", "parquet", "token", "jsonlines", "ndjson")
"""Suffixes of files that may hold captions."""
_LETTER = re.compile(r"[a-zA-Z]|[^\x00-\x7f]")
_LOOKED = 100  # Number of rows or JSON files in which text fields are looked for.
_LARGE = 2**26  # Number of bytes of a table that takes long to read.
_MOST = 2**22  # Number of bytes in which names of pictures are looked for.


def guess(path: str, text: str = "") -> Data:
    """Infer the data settings (source, caption field) for training on the pictures at `path`.

    With these settings, pictures without a caption are left out. If the files hold no captions,
    every picture gets the caption "", and the other files are logged.

    Args:
        path: a file, folder, URL, or pattern such as "shard-{00..99}.tar", SOURCE:PATH::TEXT, as in
            sources.named, or the folder of a table that `data import --out` wrote.
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
    if home.is_home(path):
        table = Table(path)
        rule, is_bare = table.card["rule"], len(table.bare()) == len(table)
        return Data(
            rule["source"],
            path,
            text or rule["text"],
            uncaptioned="empty" if is_bare else "drop",
            fields=tuple(rule.get("ranges", ())),
            loss_mask="file" if rule.get("mask") else "",
        )
    is_pattern = "{" in path and not os.path.exists(path)
    if path.endswith((".tar", ".pkl")) or is_pattern or storage.is_url(path):
        return _of_tars(path, text)
    root = pathlib.Path(records.split_of(path)[0])
    records.check_exists([str(root)] if path else [], "folder")
    kind = root.suffix[1:].lower()
    if root.is_file() and kind in ("csv", "tsv", "jsonl", "json"):
        errors: list[ValueError] = []
        if not (text := text or "".join(_of_tables([root], errors))):
            list(rows.read(root))  # Raises ValueError for other JSON.
            advice = "add it, or name the captions with --text"
            raise (*errors, ValueError(f"{path} has no column file_name or no column of captions: {advice}"))[0]
        return _data("folder", path, text)
    if root.is_file() or any((root / name).exists() for name in SAVED):
        return _of_table(path, root, text)
    return _of_folder(path, root, text)


def _of_folder(path: str, root: pathlib.Path, text: str) -> Data:
    """Infer the data settings for the folder `root`, which is `path` without "@SPLIT".

    Of several places of captions, the one with the most pictures is chosen, and each text file or
    field with a common name that only has captions of other pictures. If there are no image files,
    the settings are for the tars, ArrayRecord files or parquet tables in the folder.
    """
    kind = lambda file: records.suffix_of(file.name).rpartition(".")[2]
    files = [pathlib.Path(name) for name in storage.walk(str(root), Inventory())]
    images = {f for f in files if kind(f) in untrusted.image_suffixes()}
    stems = {f.with_suffix("") for f in images}
    kinds = {kind(f) for f in files}
    packed = [k for k in ("tar", "array_record", "parquet") if k in kinds]
    if not stems and packed:
        return _of_packed(packed[0], path, root, text)
    if text or not stems:
        return _data("folder", path, text)
    forms = {metadata.folded(str(name)) for name in stems | images}
    beside = [f for f in files if metadata.folded(str(f.with_suffix(""))) in forms]
    places, errors = [suffix for suffix in TEXTS if suffix in map(kind, beside)], []
    jsons = [file for file in beside if kind(file) == "json"]
    objects = (_parsed(file.read_bytes()) for file in jsons)
    if jsons and (field := _field("json", objects, str(jsons[0]), errors)):
        places.append(field)
    counts = {}
    for place in [*places, *_of_tables(set(files) - set(beside), errors)]:
        try:
            counts[place] = folder.captioned(path, place)
        except ValueError as error:
            errors.append(error)
    if not counts and packed and (packed[0] != "parquet" or has_pictures(files)):
        logging.info("the %d pictures in %s have no captions: reading the other files instead", len(images), path)
        return _of_packed(packed[0], path, root, text)
    if errors and not counts:
        raise errors[0]
    if not counts:
        named = {stem.name for stem in stems}
        likeliest = lambda file: (file.stem in named, file.stat().st_size)
        for file in sorted((f for f in files if kind(f) in _READ), key=likeliest, reverse=True):
            if file.stem in named:
                reason = "lies in another folder: move each text into the folder of its picture"
                if file in beside:
                    reason = 'has no field with a text: write an object such as {"caption": "a cat"}'
                raise ValueError(f"{file} has the name of a picture, but {reason}")
            if names_pictures(file, sorted(image.name for image in images)):
                if kind(file) == "json" and _parsed(file.read_bytes()):
                    list(rows.read(file))  # Raises ValueError for faulty annotations of COCO.
                raise ValueError(
                    f"{file} names pictures, but no captions were found in it: write a .csv with the columns "
                    "file_name and caption (rename a table to .csv or .jsonl), or move the file to another folder"
                )
    chosen, captioned = list[str](), set[str]()
    for place in sorted(counts, key=lambda place: (len(counts[place]), _is_likely(place)), reverse=True):
        if not chosen or (_is_likely(place) and captioned.isdisjoint(counts[place])):
            chosen, captioned = [*chosen, place], captioned | counts[place]
    for place, pictures in counts.items():
        if lost := pictures - captioned:
            number, both = progress.counted(len(lost), "picture"), ",".join([*chosen, place])
            logging.warning(
                "the captions of %s are in %s, which is not read: read both with --text=%s", number, place, both
            )
    return _data("folder", path, ",".join(chosen))


def _is_likely(place: str) -> bool:
    """Return whether a place of captions is a text file, or a field with a common name."""
    return place in TEXTS or bool(rows.likely([place.partition(":")[2]]))


def _of_packed(kind: str, path: str, root: pathlib.Path, text: str) -> Data:
    """Infer the data settings for the files of one kind, which hold pictures, in a folder."""
    if kind == "tar":
        return _of_tars(path, text)
    if kind == "array_record":
        return _data("arrayrecord", path, text or "txt")
    return _of_table(path, root, text)


def has_pictures(files: Iterable[pathlib.Path]) -> bool:
    """Return whether some of these files are parquet tables with embedded pictures."""
    import pyarrow.parquet  # Slow to import, and needed by few data sets.

    parquet = (file for file in files if file.suffix.lower() == ".parquet")
    with contextlib.suppress(pyarrow.ArrowException, OSError):
        schemas = map(pyarrow.parquet.read_schema, parquet)
        return any(pyarrow.types.is_struct(f.type) for schema in schemas for f in schema)
    return False


def names_pictures(file: pathlib.Path, pictures: Iterable[str]) -> bool:
    """Return whether a file contains the names of several of the pictures, or of all."""
    with file.open("rb") as opened:
        content = opened.read(_MOST)
    content = content.replace(b"\0", b"")  # Of UTF-16.
    sought = list(itertools.islice(pictures, _LOOKED))
    return sum(os.fsencode(name) in content for name in sought) >= min(2, len(sought))


def describes(path: str, pictures: Collection[str]) -> bool:
    """Return whether a table holds captions of pictures, by its first rows.

    Its columns say so, or one of them holds the names of these pictures, perhaps without a suffix,
    and another has texts of several words. Large tables and those at URLs are not read.
    """
    if storage.is_url(path) or os.path.getsize(path) > _LARGE:
        return False
    stems = {os.path.splitext(name)[0] for name in pictures}
    with contextlib.suppress(ValueError, OSError):
        first = [row for _, row in itertools.islice(rows.read(pathlib.Path(path)), _LOOKED)]
        columns = {name: {str(row.get(name)).partition(".")[0] for row in first} for name in dict(*first[:1])}
        if not columns or {rows.KEY, "status"} <= columns.keys():  # What img2dataset did.
            return False
        named = any(len(cells & stems) >= max(1, min(2, len(stems))) for cells in columns.values())
        has_texts = any(has_several_words(str(cell)) for row in first for cell in row.values())
        return (named and has_texts) or bool(rows.name_column(columns) and rows.likely(columns))
    return False


def _of_tables(files: Collection[pathlib.Path], errors: list[ValueError]) -> list[str]:
    """Return the values of data.text for the tables of image captions among files.

    The error of a table that cannot be read, or has captions without names of images, is appended
    to `errors`. Other JSON than tables is ignored.
    """
    fields, seen = list[str](), set[tuple[str, ...]]()
    for kind, suffix in metadata.SUFFIXES.items():
        for file in sorted(file for file in files if file.suffix.lower() == suffix):
            storage.refuse_pointer(file)
            try:
                table = list(itertools.islice((row for _, row in rows.read(file)), _LOOKED))
                if named := [row for row in table if rows.name_column(row)]:
                    if (columns := (kind, *named[0])) in seen:
                        continue
                    seen.add(columns)
                    if (field := _field(kind, named, str(file), errors)) not in ("", *fields):
                        fields.append(field)
                elif likely := rows.likely(next(iter(table), {})):
                    errors.append(
                        ValueError(
                            f"{file} has the column {likely[0]!r}, but no column of image names: call "
                            "the column that holds them file_name, or move the table to another folder"
                        )
                    )
            except ValueError as error:
                if suffix != ".json":
                    errors.append(error)
    return fields


def _of_tars(path: str, text: str) -> Data:
    """Infer the data settings of webdataset tars from the first tar.

    Raises:
        ValueError: `text` is "" and the first tar holds no captions. Tars must hold captions.
    """
    beside = LeftOut()
    first = tars.find_stamped(path, beside)[0][0]
    index = tars.load_index(first)
    if not len(index.suffix):
        raise ValueError(f"{first} holds no files: copy or write it again, or remove it")
    suffixes, taken = {*index.suffix.tolist()}, np.zeros(len(index.key), bool)
    pictured = np.isin(index.record, index.record[np.isin(index.suffix, untrusted.image_suffixes())])
    places, errors = list[str](), list[ValueError]()
    for suffix in (*TEXTS, "json") if not text else ():
        of = pictured & (index.suffix == suffix)
        if of.any() and not taken[index.record[of]].any():
            place, spans = suffix, index.span[of][:_LOOKED]
            if suffix == "json":
                contents = storage.read_ranges([first] * len(spans), spans[:, 0].tolist(), spans.sum(axis=1).tolist())
                place = _field("json", map(_parsed, contents), f"a .json in {first}", errors)
            places += [place] * bool(_is_likely(place) if places else place)
            taken[index.record[of]] = True
    if errors and not places:
        raise errors[0]
    # Without pictures, as in tars of names with dots, open_tars says what is wrong.
    text = text or ",".join(places) or next((s for s in TEXTS if s in suffixes or not pictured.any()), "")
    if not text:
        others = [name for name, why in beside.take() if why == "beside_tars" and describes(name, ())]
        tables = f", and may be in a table, such as {others[0]}" if others else ""
        raise ValueError(
            f"no captions in {first} (suffixes of its files: {', '.join(sorted(suffixes))}): set --text to "
            f"the captions' suffix, or unpack the tar into a folder: there, captions are optional{tables}"
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
    files = [file for file in files if not storage.is_hidden(str(file.relative_to(root)))]
    files = [file for file in files if not file.name.startswith("cache-")]  # Results of `map`.
    if saved and not files:
        raise ValueError(f"no .arrow files in {root}: write the folder again with save_to_disk")
    if not files or files[0].suffix != suffix:
        raise ValueError(
            f"{path} is not a folder, .tar, .csv, .tsv, .jsonl, .json or .parquet: rename it if it is one of these, "
            f"or write its data source before it, as in SOURCE:PATH, with one of {', '.join(sources.SOURCES)}"
        )
    training = [f for f in files if re.search(r"(?<![a-z])train(?![a-z])", str(f.relative_to(root)))]
    split = "" if records.split_of(path)[1] or not training or training == files == [root] else "@train"
    is_split = saved and files[0].parent == root  # The path names the folder of one split.
    if split and not is_split and (others := [str(f.relative_to(root)) for f in files if f not in training]):
        number = progress.counted(len(others), "file")
        logging.info("reading %s%s, not %s of other splits, such as %s", path, split, number, others[0])
    errors: list[ValueError] = []
    text = text or _field("", _cells((training or files)[0]), str((training or files)[0]), errors)
    if errors:
        raise errors[0]
    return _data("arrow" if saved else "huggingface", path + split * (not is_split), text)


def _data(source: str, path: str, text: str) -> Data:
    uncaptioned = "drop" if text else "empty"
    return Data(source, path, text or "txt", uncaptioned=uncaptioned)


def _field(kind: str, objects: Iterable[Any], place: str, errors: list[ValueError]) -> str:
    """Return the value of data.text for the likeliest caption field, or "" if there is none.

    If there are texts, but none looks like a caption, an error is appended to `errors`.

    Args:
        kind: suffix of the files with the fields; "" for the columns of a Hugging Face table.
        objects: the first objects or rows.
        place: a name of the file, for the error.
        errors: gets the error.
    """
    texts = collections.defaultdict[str, list[str]](list)
    others = dict[str, None]()
    for row in itertools.islice(objects, _LOOKED):
        for name, cell in row.items() if isinstance(row, dict) else ():
            cells = cell if isinstance(cell, list) else [cell]
            cells = [c.decode(errors="replace") if isinstance(c, bytes) else c for c in cells]
            found = [c for c in cells if isinstance(c, str) and _LETTER.search(c)]
            if found and name not in _OTHER:
                texts[name] += found
            elif any(isinstance(c, dict) for c in cells) and (not kind or rows.likely([name])):
                others[name] = None
    words = [name for name in texts if _are_captions(texts[name])]
    words.sort(key=lambda name: (len({*texts[name]}), sum(map(len, texts[name]))), reverse=True)
    if names := list(dict.fromkeys([*(likely := rows.likely(texts)), *words])):
        if others := [name for name in words if name != names[0]]:
            log, known = (logging.info, "") if likely else (logging.warning, ", by its values alone")
            log("captions in %s: reading %s, not %s%s", place, names[0], ", ".join(others), known)
        if kind and re.search("[,*]", names[0]):
            errors.append(
                ValueError(f"{place}: data.text cannot name {names[0]!r}: rename it, without commas and stars")
            )
            return ""
        return ":".join(filter(None, (kind, names[0])))
    example = ":".join(filter(None, (kind, *list(texts)[:1])))
    if others:
        errors.append(
            ValueError(
                f"{place} holds objects in the field {next(iter(others))}: write a text, or a list of "
                "texts" + f", or name another field, as in --text={example}" * bool(texts)
            )
        )
    elif texts:
        errors.append(
            ValueError(
                f"{place} has no field of captions, as far as its names and values tell, but "
                f"{', '.join(list(texts)[:8])}: name the captions' field, as in --text={example}, or, if "
                "there are none, move such files to another folder"
            )
        )
    return ""


def _are_captions(texts: Sequence[str]) -> bool:
    """Return whether most texts have several words, and not all are equal."""
    several = sum(map(has_several_words, texts))
    return 2 * several >= len(texts) and (len(set(texts)) > 1 or len(texts) == 1)


def has_several_words(text: str) -> bool:
    """Return whether a text has several words. Identifiers, paths and URLs have one, dates none.

    Chinese and Japanese have no spaces between words.
    """
    return bool(_LETTER.search(text)) and (len(text.replace(",", " ").split()) > 1 or not text.isascii())


def _parsed(content: bytes) -> Any:
    if content.startswith(untrusted.POINTER):
        raise ValueError(f"a .json is {untrusted.IS_POINTER}")
    with contextlib.suppress(ValueError):  # Training counts damaged files.
        return untrusted.parse_json(content)


def _cells(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the texts in the first rows of a .parquet or .arrow file.

    Raises ValueError if the file is damaged, or if its only texts are the names of classes.
    """
    import pyarrow.parquet  # Slow to import, and needed by few data sets.

    storage.refuse_pointer(path)
    is_arrow = path.suffix == ".arrow"
    try:
        opened: Any = (
            pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))) if is_arrow else pyarrow.parquet.ParquetFile(path)
        )
        schema = opened.schema if is_arrow else opened.schema_arrow
        kinds = {f.name: str(f.type) for f in schema if "bytes: " not in str(f.type)}
        names = [name for name in kinds if "string" in kinds[name] or rows.likely([name])]
        batches = opened if is_arrow else opened.iter_batches(_LOOKED, columns=names)
        first = next(iter(batches), None)
        found = [] if first is None else first.select(names)[:_LOOKED].to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}; copy or write it again") from error
    about = _parsed((schema.metadata or {}).get(b"huggingface", b"{}")) or {}
    features = about.get("info", {}).get("features", {})
    classes = [name for name, kind in features.items() if "names" in kind]
    if classes and not names:
        raise ValueError(
            f"{path} has no captions, but numbers of classes in {classes[0]}: add a column of "
            "texts, such as the names of the classes"
        )
    return found
