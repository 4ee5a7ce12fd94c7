"""Read the rows of tables: .csv, .tsv, .jsonl, .json and .parquet.

Prompts and the captions of folders come from such tables. A .csv may begin with Excel's line sep=;
and needs no header if it holds only pictures and captions. A .json holds one of these:

- a list of texts or of objects;
- an object that maps each image's name to a text, texts or an object (kohya's meta_cap.json);
- an object that maps each column to its values (pandas);
- COCO's annotations;
- an object with lists of objects that name images (Karpathy's splits, TextCaps);
- an object on each line, as in .jsonl.

Only CR and LF end a line.
"""

import contextlib
import csv
import json
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from diffusion_jax.data import storage
from diffusion_jax.files import untrusted

Row = tuple[str, dict[str, Any]]
"""The place of a row for messages, such as "metadata.csv, line 3", and its cells, keyed by column.

Bytes of the cells that are not UTF-8 are surrogates, as by the error handler "surrogateescape"."""


class Alone(dict[str, Any]):
    """The cells of a row of .jsonl that is a text or another value, not an object."""


CAPTION = "caption"
"""The column of a JSON row that is a text alone, not an object."""
_LIKELY = (CAPTION, "text", "prompt", "description", "title", "comment", "tag_string")
FILES = ("file_name", "filename", "image", "path", "image_name", "image_path", "img_path", "filepath", "image_file")
"""The columns that may hold the path of an image, the likeliest first."""
KEY = "key"
"""The column of an image's name without suffix in img2dataset's tables."""
_NUMBER = re.compile(r"\s*[-+]?\d+([.,]\d+)?\s*")
_COUNTER = re.compile(r"#\d+$")  # Flickr8k.token.txt numbers the captions of a picture.
_SHOWN = 60  # The largest number of characters of a value in a message.


def read(path: pathlib.Path) -> Iterator[Row]:
    """Yield the rows of a table. The suffix of the path, a key of READERS, selects the format.

    Blank lines are skipped. COCO's annotations come in the order of their ids, and their image's
    name is the cell "file_name".

    Raises:
        ValueError: a row is malformed, or the file is not in the format of its suffix.
        OSError: the file cannot be read.
    """
    untrusted.refuse_pipe(path)
    storage.refuse_pointer(path)
    if path.suffix.lower() not in READERS:
        raise ValueError(f"{path} is not a table: use {', '.join(READERS)}")
    return READERS[path.suffix.lower()](path)


def likely(columns: Collection[str]) -> list[str]:
    """Return the columns with common names for captions, the likeliest first."""
    names = lambda name: (name, f"{name}s")
    return [column for name in _LIKELY for column in columns if column.lower() in names(name)]


def name_column(row: Collection[str]) -> str:
    """Return the column of a row that names an image, or "" if there is none."""
    return next((name for name in (*FILES, KEY) if name in row), "")


def shown(value: Any) -> str:
    """Return a value of a row for a message, as short JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _decoded(path: pathlib.Path) -> str:
    try:
        return untrusted.decode(path.read_bytes(), "surrogateescape")
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from error


def _separated(path: pathlib.Path, delimiters: str) -> Iterator[Row]:
    """Yield the rows of a table whose cells are separated by one of `delimiters`."""
    numbered, width = _cells(path, delimiters)
    if not numbered:
        return
    header = [name.lower() if name.lower() in FILES else name for name in map(str.strip, numbered[0][1])]
    if pictures := [cell for cell in header if is_picture(cell)]:
        if width != 2 or len(pictures) != 1:
            raise ValueError(
                f"{path} begins with {shown(pictures[0])} instead of names of columns: add a first "
                "line with names, such as file_name,caption"
            )
        header = [FILES[0] if cell in pictures else CAPTION for cell in header]
        at = header.index(FILES[0])
        cut = lambda cells: [_COUNTER.sub("", c) if i == at else c for i, c in enumerate(cells)]
        numbered = [(0, header), *((number, cut(cells)) for number, cells in numbered)]
    named = [name for name in header if name]  # Excel and pandas write columns without a name.
    if twice := {name for name in named if named.count(name) > 1}:
        raise ValueError(f"{path} has several columns {min(twice)!r}: give each its own name")
    for number, cells in numbered[1:]:
        place = f"{path}, line {number}"
        if len(cells) != width:
            advice = "quote a cell that holds a separator" if len(cells) > width else "add the missing separators"
            raise ValueError(
                f"{place} has {len(cells)} cells, but the first line names {width} columns: {shown(cells)}; {advice}"
            )
        if any(cells):
            yield place, {n: cell for n, cell in zip(header, cells, strict=True) if n}


def _cells(path: pathlib.Path, delimiters: str) -> tuple[list[tuple[int, list[str]]], int]:
    """Return (line number, cells) of each row, and the number of columns.

    A quote at the start of a cell may begin a quoted cell, which may have several lines, or be part
    of the text. Of these two readings, the one that fills all columns in all rows is used.

    If both do, it is the one in which a column holds only names of pictures, or only numbers.

    Raises:
        ValueError: both readings fill all columns, and no column tells which is right; or a quote
            is never closed, and quoted cells before it have several lines.
    """
    lines = untrusted.split_lines(_decoded(path))
    at = next((at for at, line in enumerate(lines) if line.strip()), 0)
    begins = lambda d: any(map(is_picture, lines[at].replace('"', "").split(d)))
    delimiter = max(delimiters, key=lambda d: (begins(d), lines[at].count(d)))
    if match := re.fullmatch(r'"?sep=(.)"?', lines[at].strip("\r\n "), re.IGNORECASE):
        delimiter, lines[at] = match[1], ""  # Excel's first line.
    options = {"delimiter": delimiter, "strict": True, "skipinitialspace": delimiter != "\t"}
    try:
        alone = [(n, _line(line, options)) for n, line in enumerate(lines, 1)]
    except csv.Error as error:
        raise ValueError(f"{path} is no table: {error}; write .jsonl") from error
    alone = [(number, cells) for number, cells in alone if cells not in ([], [""])]
    width = len(alone[0][1]) if alone else 0
    joined, start = [], 1
    reader = csv.reader((line + "\n" for line in lines), **options)
    try:
        for cells in reader:
            if cells not in ([], [""]):
                joined.append((start, cells))
            start = reader.line_num + 1
    except csv.Error as error:  # A quote inside a quoted cell, or one that is never closed.
        wrong = next((number for number, cells in alone if len(cells) != width), start)
        if wrong < start and all(len(cells) == width for _, cells in joined):
            raise ValueError(
                f"{path}, line {start}: a quote opens here and is never closed, but cells before "
                f"it have several lines ({shown(lines[start - 1])}): close or double the quote, or "
                "write .jsonl"
            ) from error
        return alone, width
    if alone == joined or any(len(cells) != width for _, cells in alone):
        return joined, width
    if any(len(cells) != width for _, cells in joined):
        return alone, width
    if _alike(joined) > _alike(alone):
        return joined, width
    number = next(a[0] for a, b in zip(alone, joined, strict=False) if a != b)
    raise ValueError(
        f"{path}, line {number}: a quote opens here and closes on a later line, so it may be text "
        f"or enclose several lines ({shown(lines[number - 1])}): double the quote, or write .jsonl"
    )


def _alike(numbered: Sequence[tuple[int, list[str]]]) -> int:
    """Return how many columns hold only names of pictures, or only numbers, below the header."""
    columns = list(zip(*(cells for _, cells in numbered[1:]), strict=True))
    return sum(all(map(is_picture, c)) or all(map(_NUMBER.fullmatch, c)) for c in columns)


def is_picture(cell: str) -> bool:
    """Return whether a cell is the name of an image file, perhaps with a number, as in a.jpg#0."""
    _, dot, suffix = _COUNTER.sub("", cell.strip()).rpartition(".")
    return bool(dot) and suffix.lower() in untrusted.image_suffixes()


def _line(line: str, options: Mapping[str, Any]) -> list[str]:
    """Return the cells of one line. A quote that is not closed before a separator is text."""
    try:
        return next(csv.reader([line], **options), [])
    except csv.Error:
        return next(csv.reader([line], **options, quoting=csv.QUOTE_NONE))


def _jsonl(path: pathlib.Path) -> Iterator[Row]:
    for number, line in enumerate(untrusted.split_lines(_decoded(path)), 1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _object(_parsed(line, place))


def _json(path: pathlib.Path) -> Iterator[Row]:
    if re.match(r"\s*\{[^\r\n]*+(?<=\})\r?\n\s*\{", text := _decoded(path)):  # An object, and another on the next line.
        return (yield from _jsonl(path))
    content, images, noun = _parsed(text, str(path)), {}, "item"
    if isinstance(content, dict) and isinstance(content.get("annotations"), list):
        listed = content.get("images")
        images = _coco_images(path, listed) if isinstance(listed, list) else {}
        content, noun = content["annotations"], "annotation"
        if all(type(a.get("id")) is int for a in map(_object, content)):
            content = sorted(content, key=lambda a: a["id"])
    elif isinstance(content, dict) and (columns := _columns(content)):
        cells = zip(*columns.values(), strict=True)
        content = [dict(zip(columns, row, strict=True)) for row in cells]
    elif isinstance(content, dict) and _is_by_image(content):
        content = [{"file_name": name, **_object(value)} for name, value in content.items()]
    elif isinstance(content, dict):
        lists = [of for of in content.values() if isinstance(of, list) and any(map(name_column, map(_object, of)))]
        content = [row for of in lists for row in of] or content
    if not isinstance(content, list):
        raise ValueError(
            f"{path} holds {shown(content)}: it needs a list of texts or of objects, an object "
            "with a text for each image's name, the columns of a table, or COCO's annotations; move "
            "other .json files to another folder"
        )
    for number, item in enumerate(content, 1):
        row = _object(item)
        label = f" (id {row['id']})" if "id" in row else ""
        if (image := str(row.get("image_id"))) in images:
            row = {**row, "file_name": images[image]}
        elif images and not name_column(row):
            raise ValueError(
                f"{path}, {noun} {number}{label}: its image_id {shown(row.get('image_id'))} is the "
                "id of no image: add the image, or remove the annotation"
            )
        yield f"{path}, {noun} {number}{label}", row


def _coco_images(path: pathlib.Path, listed: Sequence[Any]) -> dict[str, Any]:
    """Return the file name of each image in COCO's annotations, keyed by its id.

    Raises ValueError if an id is missing, or if two images have the same one.
    """
    images = dict[str, Any]()
    for image in map(_object, listed):
        number, name = image.get("id"), image.get("file_name")
        if number is None:
            raise ValueError(
                f"{path}: the image {shown(name)} has no id, so no annotation can name it: add its id, or remove it"
            )
        if images.setdefault(str(number), name) != name:
            raise ValueError(
                f"{path}: the images {shown(images[str(number)])} and {shown(name)} both have the "
                f"id {number}, so their captions cannot be told apart: number the images of joined "
                "files anew"
            )
    return images


def _columns(content: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return the columns of a table in JSON, as from pandas and datasets, or {} if it is none."""
    match content:
        case {"columns": [*names], "data": [*table]} if table:  # pandas, with orient="split".
            return dict(zip(map(str, names), zip(*table, strict=True), strict=True))
        case {"schema": dict(), "data": [*table]} if all(isinstance(row, dict) for row in table):
            return {name: [row.get(name) for row in table] for name in table[0]} if table else {}
    if not name_column(content) or not all(isinstance(c, dict | list) for c in content.values()):
        return {}
    first = next(iter(content.values()))
    rows = list(first) if isinstance(first, dict) else range(len(first))
    if any(len(column) != len(rows) for column in content.values()):
        return {}
    with contextlib.suppress(KeyError):
        return {name: [column[row] for row in rows] for name, column in content.items()}
    return {}


def _is_by_image(content: Mapping[str, Any]) -> bool:
    """Return whether the keys of an object are names of images, as in kohya's meta_cap.json.

    Lists may also be columns, whose names have no suffix. An object that names its image is a row.
    """
    of_image = lambda key, value: isinstance(value, dict | str) or (isinstance(value, list) and "." in key)
    is_row = likely(content) or is_picture(str(content.get(name_column(content))))
    return not is_row and all(of_image(*item) for item in content.items())


def _parsed(text: str, place: str) -> Any:
    try:
        return untrusted.parse_json(text)
    except ValueError as error:
        raise ValueError(f"{place}: invalid JSON: {error}") from error


def _object(value: Any) -> dict[str, Any]:
    """Return the cells of an object. LLaVA's only answer and Karpathy's sentences are captions."""
    match value:
        case {"conversations": [*turns]} if CAPTION not in value:
            said = [t.get("value") for t in turns if isinstance(t, dict) and t.get("from") == "gpt"]
            return {**value, CAPTION: said[0]} if len(said) == 1 else value
        case {"sentences": [{"raw": _}, *_] as texts} if CAPTION not in value:
            return {**value, CAPTION: [_object(text).get("raw") for text in texts]}
        case dict():
            return value
    return Alone({CAPTION: value})


def _parquet(path: pathlib.Path) -> Iterator[Row]:
    import pyarrow.parquet  # Slow to import, and needed by few data sets.

    number, unpacked = 0, 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [*map(file.schema.column, range(len(file.schema)))]
            # Arrow cannot do this for lists, so fewer of their rows are read together.
            flat = [c.path for c in columns if c.path == c.name]
            texts = [c.path for c in columns if c.physical_type == "BYTE_ARRAY" and c.path in flat]
        # Equal texts are stored once, so that a small file cannot fill memory before it is noticed.
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            # Structs are embedded images.
            names = [f.name for f in file.schema_arrow if not pyarrow.types.is_struct(f.type)]
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"{path} has several columns {min(twice)!r}: keep one")
            groups = map(file.metadata.row_group, range(file.num_row_groups))
            untrusted.check_unpacked(sum(group.total_byte_size for group in groups), path)
            number_of_rows = 1024 if len(flat) == len(columns) else 64
            for batch in file.iter_batches(number_of_rows, columns=names):
                unpacked += sum(map(_size, batch.columns))
                untrusted.check_unpacked(unpacked, path)
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}; copy or write it again") from error


def _size(column: Any) -> int:
    """Return the bytes of an Arrow array, in which equal texts count each time they occur."""
    import pyarrow.compute

    pc: Any = pyarrow.compute  # Its functions are made at import.
    if hasattr(column, "dictionary"):
        lengths = pc.binary_length(column.dictionary).take(column.indices)
        return column.indices.nbytes + (pc.sum(lengths).as_py() or 0)
    return column.nbytes


READERS = {
    # Excel writes semicolons where a comma is the decimal point.
    ".csv": lambda path: _separated(path, ",;|\t"),
    ".tsv": lambda path: _separated(path, "\t"),
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
}
