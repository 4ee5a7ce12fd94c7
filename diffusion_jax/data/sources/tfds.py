"""Read TFDS data sets from ArrayRecord or TFRecord files, in random order, without TensorFlow.

TFRecord is TFDS's default format, and TensorFlow only reads it sequentially. For random access, the
byte ranges of all records in TFRecord files are found when the data set is opened. A record in such
a file consists of the length of the contents, a checksum of the length, the contents, and a
checksum of the contents. TFDS decodes the contents.
"""

import functools
import mmap
import os
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np

from diffusion_jax.config import own_modules, picture_fields
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.settings import Data
from diffusion_jax.data import captions, records
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.pictures import TaskShapes
from diffusion_jax.data.records import Record, Records

_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")


def open_source(data: Data, _: TaskShapes) -> Records:
    """Open the TFDS split at a config's data.path, such as "NAME@train"."""
    return Tfds(records.path_of(data), data.text, picture_fields.read(data.fields))


class Tfds(Records):
    """The examples of one split of a TFDS data set, each with its captions."""

    def __init__(self, path: str, text: str = "caption", fields: Sequence[Field] = ()):
        """Open a split.

        Args:
            path: "NAME@SPLIT" of a data set prepared under TFDS_DATA_DIR, or "FOLDER@SPLIT" with
                the folder of one version of a data set.
            text: name of the caption feature. "/" joins the names of nested features, as in
                "captions/text". Commas join several features, as in "caption,long*0.5".
            fields: the numbers of each example, whose names are those of features, as for `text`.

        Raises:
            ValueError: `path` names no split, the data set is missing or empty, its file format has
                no random access, or it has no image feature, no feature `text` or no feature of
                a number.
        """
        name, split = records.split_of(path)
        if not split:
            raise ValueError(f"data.path is {path!r}: write NAME@SPLIT, such as {name}@train")
        import tensorflow_datasets as tfds  # Slow to import, and needed by few data sets.

        records.check_places(fields, ())
        self._name, self._texts = path, captions.alternatives(text)
        self._fields = [field.name for field in fields]
        try:
            builder = _builder(tfds, name)
            features = builder.info.features.items()
            images = [name for name, kind in features if isinstance(kind, tfds.features.Image)]
            if images:
                self._image = records.image_column(images, path)
                self._rows = _rows(tfds, builder, split, self._image)
        except Exception as error:  # TFDS raises many types.
            raise ValueError(
                f"TFDS cannot read {path}: {error}\nIf the data set is not prepared, run tfds "
                "build NAME (for large sets, with --file_format=array_record)"
            ) from error
        if not images:
            raise ValueError(f"{name} has no image feature: choose a data set of images")
        if not len(self._rows):
            raise ValueError(f"{path} holds no examples: choose another split")
        self._check_text()

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Return the examples with these indices as records."""
        rows = self._rows.__getitems__(list(indices))
        return [
            self._record(row, f"{self._name}, {i}") for i, row in zip(indices, rows, strict=True)
        ]

    def _record(self, row: Any, name: str) -> Record:
        if isinstance(row, Unusable):
            return Record(b"", row, name)
        numbers = {field: _inside(row, field) for field in self._fields}
        return Record(row[self._image], self._text(row), name, numbers)

    def _text(self, row: Mapping[str, Any]) -> Any:
        texts = ((records.cell_text(_inside(row, name)), weight) for name, weight in self._texts)
        return captions.join(texts)

    def _check_text(self) -> None:
        row = next((row for row in self._rows if not isinstance(row, Unusable)), None)
        needed = [(name, "text to the caption feature") for name, _ in self._texts]
        needed += [(name, "fields to the features of numbers") for name in self._fields]
        for name, advice in needed:
            if row and _inside(row, name) is None:
                raise ValueError(
                    f"{self._name} has no feature {name!r}: it has {', '.join(row)}. Set "
                    f"data.{advice}"
                )


def _rows(tfds: Any, builder: Any, split: str, image: str) -> Any:
    """Return the examples of a split as a list-like object. The feature `image` is not decoded."""
    decoders = {image: tfds.decode.SkipDecoding()}  # decoding.crop is faster.
    try:
        return builder.as_data_source(split, decoders=decoders)
    except NotImplementedError:  # TFDS has no random access to this format.
        return _TfRecords(builder.info, split, decoders)


class _TfRecords:
    """The examples of a split in TFRecord files, with random access. Damaged ones are Unusable."""

    def __init__(self, info: Any, split: str, decoders: Any):
        self._decode = lambda contents: info.features.deserialize_example_np(
            contents, decoders=decoders
        )
        if info.file_format.name != "TFRECORD":
            raise ValueError(f"the file format {info.file_format.name} has no random access")
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
        contents = self._files[file][first:last]
        if _checksum(contents) != _CHECKSUM.unpack_from(self._files[file], last)[0]:
            return Unusable("wrong_checksum", "the TFRecord file has changed since it was written")
        return self._decode(contents)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


def _checksum(contents: bytes) -> int:
    """Return the checksum of `contents` in a TFRecord file: CRC-32C, rotated, plus a constant."""
    crc = google_crc32c.value(contents)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _frames(mapped: mmap.mmap, name: str) -> np.ndarray:
    """Return the byte range [first, last) of each record's contents, as an array [N, 2].

    Raises ValueError if the TFRecord file is truncated. `name` is the file's path, for the message.
    """
    spans, position, end = [], 0, len(mapped)
    while position < end:
        (length,) = _LENGTH.unpack_from(mapped, position) if position + 12 <= end else (end,)
        spans.append((position + 12, position + 12 + length))
        position += 12 + length + 4
    if position != end:
        raise ValueError(f"{name} is not a complete TFRecord file: write it again")
    return np.array(spans, np.int64).reshape(-1, 2)


def _builder(tfds: Any, name: str) -> Any:
    _guard(tfds.features.FeatureConnector)
    if os.path.isdir(name):
        return tfds.builder_from_directory(name)
    from tensorflow_datasets.core import read_only_builder

    try:  # The classes of most TFDS data sets need TensorFlow, but their files do not.
        return read_only_builder.builder_from_files(name)
    except tfds.core.DatasetNotFoundError:
        return tfds.builder(name)


@functools.cache
def _guard(connector: Any) -> None:
    """Make TFDS import a class of features only if configs may name its module, or it is TFDS's."""
    find = connector.cls_from_name

    def checked(name: str) -> Any:
        module = name.rpartition(".")[0]
        if not module.startswith("tensorflow_datasets."):
            own_modules.find("a class in features.json", name, module)
        return find(name)

    connector.cls_from_name = checked


def _inside(row: Any, path: str) -> Any:
    for name in path.split("/"):
        row = row.get(name) if isinstance(row, Mapping) else None
    return row
