"""TFDS data sets, read through tfds.data_source: without TensorFlow if prepared as ArrayRecord."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_jax.data import records
from diffusion_jax.data.pictures import Shapes
from diffusion_jax.data.records import Record, Records
from diffusion_jax.settings import Data


def open_source(data: Data, _: Shapes) -> Records:
    """The examples of a config's split."""
    return Tfds(records.path_of(data), data.text)


class Tfds(Records):
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
        """The number of examples."""
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads the examples together."""
        rows = self._rows.__getitems__(list(indices))
        text = lambda row: records.cell_text(_inside(row, self._text))
        return [
            Record(row[self._image], text(row), f"{self._name}, {index}")
            for index, row in zip(indices, rows, strict=True)
        ]

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


def _inside(row: Any, path: Sequence[str]) -> Any:
    for name in path:
        row = row.get(name) if isinstance(row, Mapping) else None
    return row
