"""TFDS data sets, read at random and without TensorFlow: ArrayRecord files, or TFRecord files.

TFRecord is what TFDS prepares by default. TensorFlow reads it from the beginning to the end; here
the frames of its files are found once (a length, its checksum, the contents, theirs), and what lies
in them is decoded by TFDS.
"""

import mmap
import os
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diffusion_jax.config.settings import Data
from diffusion_jax.data import records
from diffusion_jax.data.pictures import Shapes
from diffusion_jax.data.records import Record, Records

_LENGTH = struct.Struct("<Q")


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
        name, split = records.split_of(path)
        if not split:
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
            try:
                self._rows: Any = builder.as_data_source(split, decoders=decoders)
            except NotImplementedError:  # Of formats that TFDS cannot read at random.
                self._rows = _TfRecords(builder.info, split, decoders)
        except StopIteration:
            raise ValueError(f"{name} has no feature of images") from None
        except Exception as error:  # TFDS raises many kinds.
            raise ValueError(
                f"TFDS cannot read {path}: {error}\nPrepare it once with tfds build NAME (best for "
                "large sets: --file_format=array_record)"
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


class _TfRecords:
    """The examples of a split in TFRecord files, at random; ValueError for other formats."""

    def __init__(self, info: Any, split: str, decoders: Any):
        self._decode = lambda contents: info.features.deserialize_example_np(
            contents, decoders=decoders
        )
        if info.file_format.name != "TFRECORD":
            raise ValueError(f"its format is {info.file_format.name}, which is not read at random")
        self._files, spans = [], [np.zeros((0, 3), np.int64)]
        for part in info.splits[split].file_instructions:
            with pathlib.Path(part.filename).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            frames = _frames(mapped, part.filename)[part.skip :][: part.take]
            spans.append(np.insert(frames, 0, len(self._files), axis=1))
            self._files.append(mapped)
        self._spans = np.concatenate(spans)  # [N, (file, first, last)]

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Any:
        file, first, last = self._spans[index].tolist()
        return self._decode(self._files[file][first:last])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


def _frames(mapped: mmap.mmap, name: str) -> np.ndarray:
    """First and last byte of each record, [N, 2]; ValueError if the file ends in the middle."""
    spans, at = [], 0
    while at < len(mapped):
        (length,) = _LENGTH.unpack_from(mapped, at) if at + 12 <= len(mapped) else (len(mapped),)
        spans.append((at + 12, at + 12 + length))
        at += 12 + length + 4
    if at != len(mapped):
        raise ValueError(f"{name} is no whole TFRecord file")
    return np.array(spans, np.int64).reshape(-1, 2)


def _builder(tfds: Any, name: str) -> Any:
    if os.path.isdir(name):
        return tfds.builder_from_directory(name)
    from tensorflow_datasets.core import read_only_builder

    try:  # Most of TFDS's own sets need TensorFlow to be described, and their files none.
        return read_only_builder.builder_from_files(name)
    except tfds.core.DatasetNotFoundError:
        return tfds.builder(name)


def _inside(row: Any, path: Sequence[str]) -> Any:
    for name in path:
        row = row.get(name) if isinstance(row, Mapping) else None
    return row
