"""ArrayRecord files of tf.train.Examples, the format that Grain and TFDS read at random.

An Example holds an image file and texts under names: those of a tar's members ("jpg", "txt", "npy",
and "__key__" for the record's own name), or any other ("image", "caption").
"""

import contextlib
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]
from google.protobuf.message import DecodeError
from tensorflow_datasets.proto import tf_example_pb2  # Needs no TensorFlow.

from diffusion_jax.config.settings import EMBEDDINGS, Data
from diffusion_jax.data import records, storage, tars
from diffusion_jax.data.pictures import Shapes
from diffusion_jax.data.records import Record, Records
from diffusion_jax.data.transforms import Unusable
from diffusion_jax.machine import files

SUFFIX = ".array_record"
_Example: Any = tf_example_pb2.Example  # pyright: ignore[reportAttributeAccessIssue]
_IMAGES = (*records.IMAGE_SUFFIXES, "image")


def open_source(data: Data, _: Shapes) -> Records:
    """The Examples of a config's files."""
    return ArrayRecords(records.path_of(data), data.text)


class ArrayRecords(Records):
    """The Examples of one or many files, in the order of their names.

    `path` is a file, a folder, or a pattern such as "train-{00000..00099}.array_record"; local
    files only. `text` is the name of the texts' feature: captions, or embeddings if it ends in
    npy, npz or safetensors. Records without it are counted as they are met.
    """

    def __init__(self, path: str | os.PathLike[str], text: str = "txt"):
        """Opens the files; FileNotFoundError or ValueError if they cannot do."""
        self._text, self._paths = text, _find(os.fspath(path))
        self._readers = [_open(name) for name in self._paths]
        self._firsts = np.cumsum([0, *(reader.num_records() for reader in self._readers)])
        if not len(self):
            raise ValueError(f"no records in {path}: {len(self._paths)} files, all empty")
        self._check_features()

    def __len__(self) -> int:
        """The number of Examples."""
        return int(self._firsts[-1])

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads the Examples, those of one file together."""
        files = np.searchsorted(self._firsts, indices, side="right") - 1
        read: list[Record] = [Record(b"", "", "")] * len(indices)
        for file in set(files.tolist()):
            rows = np.flatnonzero(files == file).tolist()
            places = [int(indices[row] - self._firsts[file]) for row in rows]
            for row, place, message in zip(rows, places, self._messages(file, places), strict=True):
                read[row] = self._record(f"{self._paths[file]}/{place}", message)
        return read

    def _messages(self, file: int, places: list[int]) -> Sequence[bytes | None]:
        """The serialized Examples at these places of a file; None for damaged ones."""
        reader = self._readers[file]
        try:
            return reader.read(places)
        except (RuntimeError, ValueError):  # One is damaged: find out which.
            return [_read_one(reader, place) for place in places]

    def _record(self, place: str, message: bytes | None) -> Record:
        try:
            features = decode(message) if message is not None else {}
        except ValueError:
            features = {}
        if not features:
            return Record(b"", Unusable("broken_record", "no tf.train.Example"), place)
        key = features.get(tars.KEY, b"").decode(errors="replace")
        name = f"{place} ({key})" if key else place
        image = next((features[kind] for kind in _IMAGES if kind in features), b"")
        return Record(image, read_feature(features, self._text), name)

    def _check_features(self) -> None:
        """ValueError if the first record has no image, or no text and others are not likely to."""
        first = next((m for m in self._messages(0, [0]) if m is not None), b"")
        features = decode(first)
        for kinds, advice in ((_IMAGES, ""), ((self._text,), ": name the feature with data.text")):
            if features and not any(kind in features for kind in kinds):
                raise ValueError(
                    f"the first record of {self._paths[0]} has no feature {' or '.join(kinds)}: "
                    f"it has {', '.join(features)}{advice}"
                )


def read_feature(features: Mapping[str, bytes], text: str):
    """The text of an Example: a caption or embeddings, as the feature's name says, or Unusable."""
    if text not in features:
        return Unusable("no_caption", f"no feature {text!r} among {', '.join(features)}")
    is_array = text.rsplit(".")[-1] in EMBEDDINGS
    return records.read_text(features[text], text if is_array else "txt")


def encode(features: Mapping[str, bytes]) -> bytes:
    """An Example of one byte string a feature."""
    message = _Example()
    for name, value in features.items():
        message.features.feature[name].bytes_list.value.append(value)
    return message.SerializeToString(deterministic=True)


def decode(message: bytes) -> dict[str, bytes]:
    """The first value of each feature of byte strings; ValueError if it is no Example."""
    try:
        features = _Example.FromString(message).features.feature
    except DecodeError as error:
        raise ValueError(f"no tf.train.Example: {error}") from error
    lists = {name: features[name].bytes_list.value for name in sorted(features)}
    return {name: values[0] for name, values in lists.items() if values}


def write(path: str | os.PathLike[str], examples: Iterable[Mapping[str, bytes]]) -> None:
    """A file of these Examples, whole or absent; its folder must exist.

    Each record is compressed by itself, so that reading one reads no other.
    """
    with files.whole(path) as temporary:
        writer = array_record_module.ArrayRecordWriter(str(temporary), "group_size:1")
        with contextlib.closing(writer):
            for features in examples:
                writer.write(encode(features))


def _find(path: str) -> list[str]:
    paths = tars.expand(path)
    if storage.is_url(paths[0]):
        raise ValueError(f"{path}: ArrayRecord files are read from local disks; mount the bucket, "
                         "or write tars, which are read by URL")  # fmt: skip
    records.check_exists(paths, "arrayrecord")
    if len(paths) == 1 and storage.is_folder(paths[0]):
        folder = paths[0]
        # TFDS writes train.array_record-00000-of-00010.
        paths = pathlib.Path(folder).rglob(f"[!.]*{SUFFIX}*")  # A hidden one is half written.
        paths = sorted(str(path) for path in paths if path.is_file())
        if not paths:
            raise ValueError(f"no {SUFFIX} in {folder}")
    return paths


def _open(path: str) -> array_record_module.ArrayRecordReader:
    reader = array_record_module.ArrayRecordReader(path)
    if not reader.ok():
        raise ValueError(f"{path} is no whole ArrayRecord file: write it again")
    return reader


def _read_one(reader: array_record_module.ArrayRecordReader, place: int) -> bytes | None:
    try:
        return reader.read([place])[0]
    except (RuntimeError, ValueError):
        return None
