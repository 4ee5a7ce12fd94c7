"""Read Hugging Face data sets from Arrow tables, which are memory-mapped for random access.

The package `datasets` converts parquet and other formats to Arrow tables once, in its cache.
"""

import contextlib
import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from diffusion_jax.config import picture_fields
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.settings import Data
from diffusion_jax.data import captions, records, storage, tars
from diffusion_jax.data.pictures import TaskShapes
from diffusion_jax.data.records import Record, Records
from diffusion_jax.files import untrusted

SAVED = ("state.json", "dataset_dict.json")  # Files that save_to_disk writes beside the tables.


def open_source(data: Data, _: TaskShapes) -> Records:
    """Open a config's data.path, a folder that Hugging Face's `save_to_disk` wrote."""
    path, numbers = records.path_of(data), picture_fields.read(data.fields)
    return Arrow(path, data.text, data.uncaptioned, numbers)


def open_any(data: Data, _: TaskShapes) -> Records:
    """Open the Hugging Face data set at a config's data.path.

    The path may name a folder written by `save_to_disk`, or anything that `load_dataset` reads.
    """
    path = records.path_of(data)
    place, split = records.split_of(path)
    if any((pathlib.Path(place) / name).exists() for name in SAVED):
        return open_source(data, _)
    return TableRecords(
        _load(place, split), path, data.text, uncaptioned=data.uncaptioned,
        fields=picture_fields.read(data.fields),
    )  # fmt: skip


class TableRecords(Records):
    """The rows of a Hugging Face table with an image column and a caption column.

    Of several image columns, the one called "image" or, without it, the first one is read. A cell
    may hold several captions.
    """

    def __init__(
        self, table: Any, name: str, text: str, root: str | os.PathLike[str] = ".",
        uncaptioned: str = "error", fields: Sequence[Field] = (),
    ):  # fmt: skip
        """Check the table's columns and its first row.

        Args:
            table: the table.
            name: the table's name, for messages.
            text: the caption column, or several such as "text,long*0.5".
            root: if the table stores paths of image files, the folder that they are relative to.
            uncaptioned: "empty" gives all rows the text "" if there is no such column. With any
                other value, a missing column is an error.
            fields: the columns of the numbers of each image.

        Raises:
            FileNotFoundError: the image of the first row is a path that does not exist.
            ValueError: the table has no rows, no image column or no column of a number, or it has
                no column `text` and `uncaptioned` is not "empty".
        """
        self._name, self._root = name, pathlib.Path(root)
        images = [field.name for field in table.schema if _is_image(field.type)]
        names = [(text, 1.0)] if text in table.column_names else captions.alternatives(text)
        missing = [name for name, _ in names if name not in table.column_names]
        columns = ", ".join(table.column_names)
        if not len(table):
            raise ValueError(f"{name} has no rows: choose another data set or split")
        if not images:
            advice = "choose a data set with images"
            for field in table.schema:
                if str(field.type) in ("binary", "large_binary"):
                    cast = f"cast_column({field.name!r}, datasets.Image())"
                    advice = f"if {field.name} holds picture files, save the data set after {cast}"
            raise ValueError(
                f"{name} has no image column, but only the columns {columns}: {advice}"
            )
        if missing and (uncaptioned != "empty" or len(missing) < len(names)):
            raise ValueError(
                f"data.text is {text!r}, but {name} has only the columns {columns}: set data.text "
                "to the caption column"
            )
        records.check_places(fields, ())
        for field in fields:
            if field.name not in table.column_names:
                raise ValueError(
                    f"data.fields has {field.name!r}, but {name} has only the columns {columns}: "
                    "name one of these"
                )
        self._numbers = {field.name: table[field.name] for field in fields}
        self._images = table[records.image_column(images, name)]
        self._texts = [(table[name], weight) for name, weight in names if not missing]
        try:
            self._read(0)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{name} stores the paths of its images, and {error.filename} does not exist: "
                "write the table with embedded images, as push_to_hub and save_to_disk do"
            ) from error

    def __len__(self) -> int:
        return len(self._images)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Read the rows with these indices. Raises OSError if an image file was removed."""
        return [self._read(index) for index in indices]

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """Return the caption of each row, or Unusable. Images are not read."""
        if not self._texts:
            return [""] * len(indices)
        of = lambda index: ((_text(column[index]), weight) for column, weight in self._texts)
        return [captions.join(of(index)) for index in indices]

    def _read(self, index: int) -> Record:
        image, (text,) = self._images[index].as_py() or {}, self.texts([index])
        contents = image.get("bytes")
        if contents is None and image.get("path"):
            # Try the path relative to `root` first, then to the working directory, as `datasets`.
            inside = self._root / image["path"]
            contents = (inside if inside.exists() else pathlib.Path(image["path"])).read_bytes()
        numbers = {name: column[index].as_py() for name, column in self._numbers.items()}
        return Record(contents or b"", text, f"{self._name}, row {index}", numbers)


class Arrow(TableRecords):
    """The rows of a data set written by `save_to_disk`, read without the package `datasets`."""

    def __init__(
        self, path: str | os.PathLike[str], text: str = "text", uncaptioned: str = "error",
        fields: Sequence[Field] = (),
    ):  # fmt: skip
        """Map the files into memory.

        Args:
            path: the folder of one split, which holds .arrow files, or "FOLDER@SPLIT".
            text: the caption column.
            uncaptioned: "empty" gives all rows the text "" if there is no caption column. With any
                other value, a missing caption column is an error.
            fields: the columns of the numbers of each image.

        Raises:
            FileNotFoundError: the folder or one of its tables does not exist, or the image of the
                first row is a path that does not exist.
            ValueError: there are no .arrow files, no rows, no image column or no column of a
                number, a file is damaged, or there is no caption column and `uncaptioned` is not
                "empty".
        """
        import pyarrow  # Slow to import, and needed by few data sets.

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
        self._paths = paths
        try:
            table = pyarrow.concat_tables(map(_open, paths))
        except pyarrow.ArrowInvalid as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"the .arrow files in {root / split} have different columns ({reason:.200}): keep "
                "those of one data set"
            ) from error
        super().__init__(table, os.fspath(path), text, root / split, uncaptioned, fields)

    def files(self) -> list[str]:
        return list(map(str, self._paths))


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
        names = [
            str(table["filename"])
            for table in untrusted.parse_json(state.read_text())["_data_files"]
        ]
        for name in names:
            untrusted.check_inside(name, state)
        paths = [folder / name for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{state} is damaged: {error!r}; copy or write it again") from error
    if missing := [path for path in paths if not path.is_file()]:
        raise FileNotFoundError(
            f"{missing[0]} is missing, one of the {len(paths)} tables in {state}: copy it"
        )
    return paths


def _open(path: pathlib.Path) -> Any:
    """Map an .arrow file into memory, check its offsets, and return its table.

    By itself, pyarrow does not check the offsets. Captions that are not UTF-8 are accepted here;
    reading one later gives Unusable instead of a text.

    Raises:
        ValueError: the file is damaged.
    """
    import pyarrow

    storage.refuse_pointer(path)
    as_bytes = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    try:
        batches, unpacked = [], 0
        reader = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
        for batch in reader:  # Its buffers may be compressed.
            batches.append(batch)
            unpacked += batch.nbytes
            untrusted.check_unpacked(unpacked, path)
        table = pyarrow.Table.from_batches(batches, reader.schema)
        table.validate()
        for chunk in (chunk for column in table.columns for chunk in column.chunks):
            kind = as_bytes.get(chunk.type)
            (chunk.view(kind) if kind else chunk).validate(full=True)
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}; copy or write it again") from error
    return table


def _load(place: str, split: str) -> Any:
    """Load one split of a data set with `load_dataset`, as a memory-mapped table.

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
        opened = load(split=split or None)
    except Exception as error:  # `datasets` raises many types.
        names = list[str]()
        with contextlib.suppress(Exception):
            names = datasets.get_dataset_config_names(place) if pathlib.Path(place).is_dir() else []
        if names[1:]:
            folder = next((n for n in names if (pathlib.Path(place) / n).is_dir()), "FOLDER")
            raise ValueError(
                f"{place} holds the data sets {', '.join(names)}: name the folder of one, as in "
                f"{place}/{folder}"
            ) from error
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the package datasets cannot open {place}: {reason}; check the path or name"
        ) from error
    if not split:
        if len(opened) > 1:
            raise ValueError(
                f"{place} has the splits {', '.join(opened)}: choose one, as in {place}@SPLIT"
            )
        (opened,) = opened.values()
    return opened.with_format("arrow")[:]  # The memory-mapped table, without a copy.


def _text(cell: Any) -> Any:
    try:
        return records.cell_text(cell.as_py())
    except UnicodeDecodeError as error:
        return records.not_utf8(error.object[error.start])


def _is_image(kind: Any) -> bool:
    """Return whether an Arrow type is that of datasets.Image: a struct of "bytes" and "path"."""
    return "bytes" in {kind.field(i).name for i in range(kind.num_fields)}
