"""Data sets of columns: those that Hugging Face's `datasets` wrote to a disk, and TFDS's.

Hugging Face's save_to_disk writes Arrow files, which are mapped into memory and read at random by
pyarrow. TFDS data sets are read through tfds.data_source, which needs no TensorFlow if they were
prepared as ArrayRecord.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diffusion_jax.data import sources
from diffusion_jax.data.sources import Record
from diffusion_jax.data.transforms import Unusable


class Arrow:
    """The rows of a data set that Hugging Face's `save_to_disk` wrote.

    `path` is the folder with the .arrow files of one split; `text` the column of the captions.
    Images are those of a column of datasets.Image (the first, if there are several).
    """

    def __init__(self, path: str | os.PathLike[str], text: str = "text"):
        """Maps the files; FileNotFoundError, or ValueError for other columns or no rows."""
        import pyarrow  # Slow to import, and few data sets need it.

        self._root = pathlib.Path(path)
        if not self._root.exists():
            raise FileNotFoundError(f"no data at {path}: write it with dataset.save_to_disk")
        found = sorted(self._root.glob("*.arrow"))
        if not found:
            splits = ", ".join(sorted(p.parent.name for p in self._root.glob("*/state.json")))
            raise ValueError(f"no .arrow in {path}: its splits are {splits or 'none'}, choose one")
        maps = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(f))).read_all() for f in found]
        table = pyarrow.concat_tables(maps)
        images = [f.name for f in table.schema if _is_image(f.type)]
        if not images or text not in table.column_names or not len(table):
            raise ValueError(
                f"{path} has {len(table)} rows of {', '.join(table.column_names)}, images are in "
                f"{images or 'none of them'}: name the column of captions with data.text"
            )
        self._images, self._texts = table[images[0]], table[text]

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._texts)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Copies the rows; OSError if an image that lies outside has gone."""
        return [self._read(index) for index in indices]

    def left_out(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def _read(self, index: int) -> Record:
        image, text = self._images[index].as_py() or {}, self._texts[index].as_py()
        contents = image.get("bytes")
        if contents is None and image.get("path"):
            contents = (self._root / image["path"]).read_bytes()
        return Record(contents or b"", _caption(text), f"{self._root}, row {index}")


class Tfds:
    """The examples of a split of a TFDS data set.

    `path` is "NAME@SPLIT", prepared before under TFDS_DATA_DIR, or "FOLDER@SPLIT" with the folder
    of one version; `text` is the feature of the captions, parts joined by "/" ("captions/text").
    Of several captions the first is taken.
    """

    def __init__(self, path: str, text: str = "caption"):
        """Opens it; ValueError if it is absent, lies in another format, or has other features."""
        name, at, split = path.partition("@")
        if not at or not split:
            raise ValueError(f"data.path is {path!r}: write NAME@SPLIT, such as {name}@train")
        import tensorflow_datasets as tfds  # Slow to import, and few data sets need it.

        self._name, self._text = path, text.split("/")
        try:
            builder = _builder(tfds, name)
            self._image = next(
                feature
                for feature, kind in builder.info.features.items()
                if isinstance(kind, tfds.features.Image)
            )
            decoders = {self._image: tfds.decode.SkipDecoding()}  # Files, to be decoded small.
            self._rows: Any = builder.as_data_source(split, decoders=decoders)
        except StopIteration:
            raise ValueError(f"{name} has no feature of images") from None
        except Exception as error:  # TFDS raises many kinds.
            raise ValueError(
                f"TFDS cannot read {path}: {error}\nPrepare it once as ArrayRecord (this step may "
                "need TensorFlow): tfds build NAME --file_format=array_record"
            ) from error
        if not len(self._rows):
            raise ValueError(f"no examples in {path}")
        self._check_text()

    def __len__(self) -> int:
        """How many examples there are."""
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads the examples together."""
        rows = self._rows.__getitems__(list(indices))
        return [
            Record(row[self._image], _caption(_inside(row, self._text)), f"{self._name}, {index}")
            for index, row in zip(indices, rows, strict=True)
        ]

    def left_out(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def _check_text(self) -> None:
        row = self._rows[0]
        if _inside(row, self._text) is None:
            raise ValueError(
                f"{self._name} has no feature {'/'.join(self._text)!r}: it has {', '.join(row)}. "
                "Name the one of the captions with data.text"
            )


def _builder(tfds: Any, name: str) -> Any:
    if os.path.isdir(name):
        return tfds.builder_from_directory(name)
    return tfds.builder(name)


def _is_image(kind: Any) -> bool:
    """Arrow's form of datasets.Image: a struct of the file's bytes and of its path."""
    names = {kind.field(i).name for i in range(kind.num_fields)}
    return names == {"bytes", "path"}


def _inside(row: Any, path: Sequence[str]) -> Any:
    for name in path:
        row = row.get(name) if isinstance(row, Mapping) else None
    return row


def _caption(text: Any) -> Any:
    """The caption of a cell: text, bytes, or the first of several."""
    while isinstance(text, list | tuple | np.ndarray) and len(text):
        text = text[0]
    if isinstance(text, bytes):
        return sources.read_text(text, "txt")
    return text.strip() if isinstance(text, str) else Unusable("no_caption", "the cell is empty")
