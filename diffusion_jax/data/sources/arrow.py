"""Read Hugging Face data sets from Arrow tables.

The package `datasets` converts parquet and other formats to Arrow tables once, in its cache. An
Arrow file holds the bytes of pictures as they are, so that they can be read at their places in it.
"""

import contextlib
import functools
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from diffusion_jax.config import picture_fields
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.settings import Data
from diffusion_jax.data import captions, home, reading, records, storage, tars
from diffusion_jax.data.inventory import PICTURES, LeftOut
from diffusion_jax.data.pictures import TaskShapes
from diffusion_jax.data.reading import Place
from diffusion_jax.data.table import Row, Table
from diffusion_jax.files import untrusted

SAVED = ("state.json", "dataset_dict.json")  # Files that save_to_disk writes beside the tables.


def open_source(data: Data, _: TaskShapes) -> Table:
    """Open a config's data.path, a folder that Hugging Face's `save_to_disk` wrote."""
    path, numbers = records.path_of(data), picture_fields.read(data.fields)
    return open_saved(path, data.text, data.uncaptioned, numbers)


def open_any(data: Data, _: TaskShapes) -> Table:
    """Open the Hugging Face data set at a config's data.path.

    The path may name a folder written by `save_to_disk`, or anything that `load_dataset` reads.
    """
    path = records.path_of(data)
    place, split = records.split_of(path)
    if any((pathlib.Path(place) / name).exists() for name in SAVED):
        return open_source(data, _)
    opened = _load(place, split)
    paths = list(dict.fromkeys(file["filename"] for file in opened.cache_files))
    columns = Columns(path, data.text, data.uncaptioned, picture_fields.read(data.fields))
    rule = {"source": "huggingface", "split": split}
    beside = LeftOut()
    if opened.info.builder_name == "parquet" and os.path.isdir(place):
        records.count_beside(place, [".parquet"], beside)
    return columns.open(os.path.dirname(paths[0]), paths, rule, lambda: _loaded(opened), beside)


def open_saved(
    path: str | os.PathLike[str], text: str = "text", uncaptioned: str = "error", fields: Sequence[Field] = ()
) -> Table:
    """Open a data set written by `save_to_disk`, without the package `datasets`.

    Args:
        path: the folder of one split, which holds .arrow files, or "FOLDER@SPLIT".
        text: the caption column, or several such as "text,long*0.5".
        uncaptioned: "empty" gives all rows the text "" if there is no caption column. With any
            other value, a missing caption column is an error.
        fields: the columns of the numbers of each image.

    Raises:
        FileNotFoundError: the folder or one of its tables does not exist, or the image of the first
            row is a path that does not exist.
        ValueError: there are no .arrow files, no rows, no image column or no column of a number, a
            file is damaged, or there is no caption column and `uncaptioned` is not "empty".
    """
    place, split = records.split_of(os.fspath(path))
    root = pathlib.Path(place)
    if not root.exists():
        raise FileNotFoundError(
            f"there is no folder {place}: check the path, or write the folder with "
            "save_to_disk of Hugging Face's datasets"
        )
    if not (paths := _tables(root / split)):
        splits = ", ".join(sorted(p.parent.name for p in root.glob("*/state.json")))
        raise ValueError(
            f"no .arrow files in {root / split} (splits of {place}: {splits or 'none'}): "
            f"choose a split as {place}@SPLIT, or read parquet files with the source "
            "'huggingface'"
        )
    columns = Columns(os.fspath(path), text, uncaptioned, fields)
    batches = functools.partial(_saved, root / split, paths)
    records.count_beside(str(root), [".arrow"], beside := LeftOut())
    return columns.open(str(root / split), list(map(str, paths)), {"source": "arrow"}, batches, beside)


class Columns(NamedTuple):
    """What is read of a Hugging Face table: an image column, caption columns and numbers.

    Of several image columns, the one called "image" or, without it, the first one is read. A cell
    may hold several captions.
    """

    name: str
    """The table's name, for messages."""
    text: str
    uncaptioned: str = "error"
    fields: Sequence[Field] = ()

    def open(self, root: str, paths: Sequence[str], rule: dict[str, Any], batches: Any, beside: LeftOut) -> Table:
        """Open the table of the data set in these files, which batches() reads; see `rows`.

        `beside` holds the other files beside them.
        """
        records.check_places(self.fields, ())
        rule = home.rule(text=self.text, fields=self.fields, uncaptioned=self.uncaptioned == "empty", **rule)
        read = lambda inventory: self.rows(batches(), root, inventory)
        table = home.open_table(home.Source(root, paths, rule, read, LeftOut(), {}))
        table.prefix = f"{self.name}, "
        table.add_beside(beside)
        (first,) = table.places([0])
        if first.kind == reading.FILE and not os.path.exists(first.file):
            raise FileNotFoundError(
                f"{self.name} stores the paths of its images, and {first.file} does not exist: "
                "write the table with embedded images, as push_to_hub and save_to_disk do"
            )
        return table

    def rows(self, batches: Iterable[tuple[Any, str]], root: str, inventory: LeftOut) -> Iterator[Row]:
        """Yield the rows of record batches.

        Args:
            batches: pairs of a batch and the file that is mapped into its buffers.
            root: if the table stores paths of image files, the folder that they are relative to.
            inventory: gets the number of rows.

        Raises:
            ValueError: the table has no rows, no image column or no column of a number, or it has
                no column of texts and `uncaptioned` is not "empty".
        """
        number, image, names = 0, "", []
        for batch, path in batches:
            if not batch.num_rows:
                continue
            if not number:
                image, names = self._check(batch.schema)
            images = _pictures(batch.column(image), path, root)
            texts = [(batch.column(name), weight, f"column {name}") for name, weight in names]
            numbers = [(field, batch.column(field.name)) for field in self.fields]
            for row, of in enumerate(images):
                cells = ((_text(cells[row]), weight, origin) for cells, weight, origin in texts)
                text, origins = captions.with_origins(cells) if texts else ("", [])
                values = {f.name: records.number_of(f, cells[row].as_py()) for f, cells in numbers}
                yield Row(f"row {number}", number, of, text, origins, values)
                number += 1
            del batch, texts, numbers  # Before the next compressed batch is unpacked.
        if not number:
            raise ValueError(f"{self.name} has no rows: choose another data set or split")
        inventory.add(PICTURES, (), number)

    def _check(self, schema: Any) -> tuple[str, list[tuple[str, float]]]:
        """Return the image column, and the caption columns with their weights."""
        images = [field.name for field in schema if _is_image(field.type)]
        names = [(self.text, 1.0)] if self.text in schema.names else captions.alternatives(self.text)
        missing = [name for name, _ in names if name not in schema.names]
        columns = ", ".join(schema.names)
        if not images:
            advice = "choose a data set with images"
            for field in schema:
                if str(field.type) in ("binary", "large_binary"):
                    cast = f"cast_column({field.name!r}, datasets.Image())"
                    advice = f"if {field.name} holds picture files, save the data set after {cast}"
                elif field.name.lower() == "url":
                    advice = f"download the pictures that {field.name} names, as `prepare download` does"
            raise ValueError(f"{self.name} has no image column, but only the columns {columns}: {advice}")
        if missing and (self.uncaptioned != "empty" or len(missing) < len(names)):
            raise ValueError(
                f"data.text is {self.text!r}, but {self.name} has only the columns {columns}: set "
                "data.text to the caption column"
            )
        for field in self.fields:
            if field.name not in schema.names:
                raise ValueError(
                    f"data.fields has {field.name!r}, but {self.name} has only the columns {columns}: name one of these"
                )
        return records.image_column(images, self.name), [] if missing else names


def _pictures(column: Any, path: str, root: str) -> Iterator[Place | bytes]:
    """Yield the place of the picture in each cell of an image column, or else its bytes.

    `path` is the file that is mapped into the column's buffers, and `root` the folder of relative
    paths.
    """
    names = [column.type.field(i).name for i in range(column.type.num_fields)]
    cells = dict(zip(names, column.flatten(), strict=True))
    for row, content in enumerate(_contents(cells["bytes"], path)):
        name = cells["path"][row].as_py() if content is None and "path" in cells else None
        if name:  # Relative to `root` or else, as for `datasets`, to the current folder.
            inside = name if storage.is_url(name) else os.path.join(root, name)
            is_inside = inside == name or os.path.exists(inside)
            yield Place(inside if is_inside else os.path.abspath(name))
        else:
            yield content or (Place(path, 0, 0, reading.BYTES) if path else b"")


def _contents(cells: Any, path: str) -> Iterator[Place | bytes | None]:
    """Yield the place of each cell in the mapped file or, if it is not there, its bytes."""
    import pyarrow

    narrow = pyarrow.types.is_binary(cells.type)
    if not narrow and not pyarrow.types.is_large_binary(cells.type):
        yield from (None if (of := cell.as_py()) is None else bytes(of) for cell in cells)
        return
    offsets, data = cells.buffers()[1:]
    mapped = data  # Buffers of a mapped file are slices of one buffer: the whole file.
    while mapped is not None and mapped.parent is not None:
        mapped = mapped.parent
    if data is None or mapped is None or mapped is data or mapped.size != _size(path):
        # It was unpacked, or all cells are null.
        yield from (cell.as_py() for cell in cells)
        return
    ends = np.frombuffer(offsets, np.int32 if narrow else np.int64)[cells.offset :]
    ends = ends[: len(cells) + 1].astype(np.int64) + (data.address - mapped.address)
    spans = itertools.pairwise(ends.tolist())
    for is_valid, (first, last) in zip(cells.is_valid(), spans, strict=True):
        yield Place(path, first, last - first, reading.BYTES) if is_valid.as_py() else None


def _size(path: str) -> int:
    return os.path.getsize(path) if path else -1


def _saved(folder: pathlib.Path, paths: Sequence[pathlib.Path]) -> Iterator[tuple[Any, str]]:
    """Yield the batches of .arrow files.

    Raises ValueError if a file is damaged, or has other columns than the first one.
    """
    import pyarrow  # Slow to import, and needed by few data sets.

    try:
        pyarrow.concat_tables([_open(path).schema.empty_table() for path in paths])
    except pyarrow.ArrowInvalid as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the .arrow files in {folder} have different columns ({reason:.200}): keep those of one data set"
        ) from error
    for path in paths:
        # An expression with `for` would keep each batch while the next one is unpacked.
        yield from map(lambda batch, path=path: (batch, str(path)), _batches(path))


def _loaded(opened: Any) -> Iterator[tuple[Any, str]]:
    """Yield the batches of a data set that `load_dataset` opened."""
    for row in getattr(opened.data, "blocks", [[opened.data]]):
        (block,) = row
        for batch in block.to_batches():
            yield batch, getattr(block, "path", "")


def _tables(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the .arrow files that save_to_disk wrote last, or all without its state.json.

    The folder may also hold tables of an earlier save_to_disk, and results of `map` and `filter`.

    Raises:
        FileNotFoundError: a table is missing.
        ValueError: state.json is damaged.
    """
    state = folder / SAVED[0]
    if not state.is_file():
        return sorted(folder.glob("*.arrow"))
    try:
        names = [str(table["filename"]) for table in untrusted.parse_json(state.read_text())["_data_files"]]
        for name in names:
            untrusted.check_inside(name, state)
        paths = [folder / name for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{state} is damaged: {error!r}; copy or write it again") from error
    if missing := [path for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is missing, one of the {len(paths)} tables in {state}: copy it")
    return paths


def _open(path: pathlib.Path) -> Any:
    """Map an .arrow file into memory. Raises ValueError if it is damaged."""
    import pyarrow

    storage.refuse_pointer(path)
    try:
        return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _batches(path: pathlib.Path) -> Iterator[Any]:
    """Yield the batches of an .arrow file with valid offsets.

    By itself, pyarrow does not check the offsets. Captions that are not UTF-8 are accepted here;
    reading one later gives Unusable instead of a text.

    Raises:
        ValueError: the file is damaged.
    """
    import pyarrow

    as_bytes = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    reader, unpacked = _open(path), 0
    try:
        for batch in reader:  # Its buffers may be compressed.
            unpacked += batch.nbytes
            untrusted.check_unpacked(unpacked, path)
            batch.validate()
            for column in batch.columns:
                kind = as_bytes.get(column.type)
                (column.view(kind) if kind else column).validate(full=True)
                del column
            yield batch
            del batch
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: pathlib.Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged: {error}; copy or write it again")


def _load(place: str, split: str) -> Any:
    """Load one split of a data set with `load_dataset`, which maps the files of its cache.

    `place` is a folder, a pattern of parquet files, or a name on the Hugging Face Hub.
    """
    import datasets  # Slow to import, and needed by few data sets.

    is_parquet = place.endswith(".parquet")
    load: Any = functools.partial(datasets.load_dataset, place)
    if is_parquet:
        load = functools.partial(datasets.load_dataset, "parquet", data_files=tars.expand(place))
    if place.startswith(("/", ".", "~")) and not is_parquet and not pathlib.Path(place).exists():
        raise FileNotFoundError(f"no data at {place}: check the path")
    shards = [str(file) for file in pathlib.Path(place).rglob("*.parquet")]
    storage.warn_of_missing_shards(shards)
    for file in tars.expand(place) if is_parquet else shards:
        storage.refuse_pointer(file)
    try:
        opened = load(split=split or None, keep_in_memory=False)
    except Exception as error:  # `datasets` raises many types.
        names = list[str]()
        with contextlib.suppress(Exception):
            names = datasets.get_dataset_config_names(place) if pathlib.Path(place).is_dir() else []
        if names[1:]:
            folder = next((n for n in names if (pathlib.Path(place) / n).is_dir()), "FOLDER")
            raise ValueError(
                f"{place} holds the data sets {', '.join(names)}: name the folder of one, as in {place}/{folder}"
            ) from error
        reason = " ".join(str(error).split())
        raise ValueError(f"the package datasets cannot open {place}: {reason}; check the path or name") from error
    if not split:
        if len(opened) > 1:
            raise ValueError(f"{place} has the splits {', '.join(opened)}: choose one, as in {place}@SPLIT")
        (opened,) = opened.values()
    return opened


def _text(cell: Any) -> Any:
    try:
        return records.cell_text(cell.as_py())
    except UnicodeDecodeError as error:
        return records.not_utf8(error.object[error.start])


def _is_image(kind: Any) -> bool:
    """Return whether an Arrow type is that of datasets.Image: a struct of "bytes" and "path"."""
    is_struct = str(kind).startswith("struct<")
    return is_struct and "bytes" in {kind.field(i).name for i in range(kind.num_fields)}
