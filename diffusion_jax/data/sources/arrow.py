"""Hugging Face data sets: Arrow tables, mapped into memory and read at random.

The package `datasets` makes such tables of parquet and whatever else it opens, once, in its cache.
"""

import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from diffusion_jax.config.settings import Data
from diffusion_jax.data import records, storage, tars
from diffusion_jax.data.pictures import Shapes
from diffusion_jax.data.records import Record, Records

SAVED = ("state.json", "dataset_dict.json")  # What save_to_disk writes beside the tables.


def open_source(data: Data, _: Shapes) -> Records:
    """The rows of a config's folder that `save_to_disk` wrote."""
    return Arrow(records.path_of(data), data.text, data.uncaptioned)


def open_any(data: Data, _: Shapes) -> Records:
    """The rows of a config's data set, of any form that `load_dataset` opens."""
    path = records.path_of(data)
    place, split = records.split_of(path)
    if any((pathlib.Path(place) / name).exists() for name in SAVED):
        return Arrow(path, data.text, data.uncaptioned)
    return Rows(_load(place, split), path, data.text, uncaptioned=data.uncaptioned)


class Rows(Records):
    """The rows of a table that have an image in a column of datasets.Image, and a caption.

    `text` names the column of the captions; of several in a row the first is taken. Of several
    columns of images the first is taken. Where `uncaptioned` is "empty" and there is no such
    column, the texts are "".
    """

    def __init__(
        self, table: Any, name: str, text: str, root: str | os.PathLike[str] = ".",
        uncaptioned: str = "error",
    ):  # fmt: skip
        """`root` is where the paths of images outside begin; ValueError for other columns."""
        self._name, self._root = name, pathlib.Path(root)
        images = [field.name for field in table.schema if _is_image(field.type)]
        captioned = text in table.column_names
        if not images or not len(table) or not (captioned or uncaptioned == "empty"):
            raise ValueError(
                f"{name} has {len(table)} rows of {', '.join(table.column_names)}, images are in "
                f"{images or 'none of them'}: name the column of captions with data.text"
            )
        self._images, self._texts = table[images[0]], table[text] if captioned else None
        try:
            self._read(0)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{name} holds the paths of its images and not the images, and {error.filename} is "
                "not there: write it with the images in it, as push_to_hub and save_to_disk do"
            ) from error

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._images)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Copies the rows; OSError if an image that lies outside has gone."""
        return [self._read(index) for index in indices]

    def texts(self, indices: Sequence[int]) -> list[Any]:
        """Copies the captions alone."""
        if self._texts is None:
            return [""] * len(indices)
        return [records.cell_text(self._texts[index].as_py()) for index in indices]

    def _read(self, index: int) -> Record:
        image, (text,) = self._images[index].as_py() or {}, self.texts([index])
        contents = image.get("bytes")
        if contents is None and image.get("path"):
            inside = self._root / image["path"]  # Else as `datasets` takes it: from where one is.
            contents = (inside if inside.exists() else pathlib.Path(image["path"])).read_bytes()
        return Record(contents or b"", text, f"{self._name}, row {index}")


class Arrow(Rows):
    """The rows of a data set that Hugging Face's `save_to_disk` wrote; `datasets` is not needed.

    `path` is the folder of one split, which holds .arrow files, or "FOLDER@SPLIT" of several.
    """

    def __init__(
        self, path: str | os.PathLike[str], text: str = "text", uncaptioned: str = "error"
    ):
        """Maps the files; FileNotFoundError, or ValueError for other columns or no rows."""
        import pyarrow  # Slow to import, and few data sets need it.

        place, split = records.split_of(os.fspath(path))
        root = pathlib.Path(place)
        if not root.exists():
            raise FileNotFoundError(f"no data at {place}: write it with dataset.save_to_disk")
        paths = sorted((root / split).glob("*.arrow"))
        if not paths:
            splits = ", ".join(sorted(p.parent.name for p in root.glob("*/state.json")))
            raise ValueError(
                f"no .arrow in {root / split}: its splits are {splits or 'none'}, choose one as "
                f"{place}@SPLIT; parquet is read by the source 'huggingface'"
            )
        maps = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(f))).read_all() for f in paths]
        table = pyarrow.concat_tables(maps)
        super().__init__(table, os.fspath(path), text, root / split, uncaptioned)


def _load(place: str, split: str) -> Any:
    """The table of one split of a folder, a pattern of parquet files, or a name on the Hub."""
    import datasets  # Slow to import, and few data sets need it.

    is_parquet = place.endswith(".parquet")
    load: Any = functools.partial(datasets.load_dataset, place)
    if is_parquet:
        load = functools.partial(datasets.load_dataset, "parquet", data_files=tars.expand(place))
    if place.startswith(("/", ".", "~")) and not is_parquet and not storage.exists(place):
        raise FileNotFoundError(f"no data at {place}: check the path")
    try:
        opened = load(split=split or None)
    except Exception as error:  # It raises many kinds.
        raise ValueError(f"datasets cannot open {place}: {error}") from error
    if not split:
        if len(opened) > 1:
            raise ValueError(f"{place} has the splits {', '.join(opened)}: choose {place}@SPLIT")
        (opened,) = opened.values()
    return opened.with_format("arrow")[:]  # As it lies in the file that is mapped, no copy.


def _is_image(kind: Any) -> bool:
    """Arrow's form of datasets.Image: a struct of the file's bytes and of its path."""
    return "bytes" in {kind.field(i).name for i in range(kind.num_fields)}
