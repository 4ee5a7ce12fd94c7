"""Read and write ArrayRecord files, the random-access format of Grain and TFDS.

Each record is a tf.train.Example, which holds an encoded image and texts as named features. The
image feature is called "image", or by a suffix such as "jpg". A text feature may have any name. If
the name ends in npy, npz or safetensors, the feature holds embeddings, otherwise a caption. Numbers
are features of their own (float or int64), or fields of a feature "json" that holds JSON. The
optional feature "__key__" holds the record's name.
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

from diffusion_jax import files
from diffusion_jax.config import picture_fields
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.settings import EMBEDDINGS, Data
from diffusion_jax.data import captions, records, storage, tars
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.pictures import TaskShapes
from diffusion_jax.data.records import Record, Records
from diffusion_jax.files import untrusted

SUFFIX = ".array_record"
_Example: Any = tf_example_pb2.Example  # pyright: ignore[reportAttributeAccessIssue]


def open_source(data: Data, _: TaskShapes) -> Records:
    """Open the ArrayRecord files at a config's data.path as a list of records."""
    return ArrayRecords(records.path_of(data), data.text, picture_fields.read(data.fields))


class ArrayRecords(Records):
    """The records of one or more ArrayRecord files, in the order of the files.

    An Example without the text feature is counted as unusable when it is read.
    """

    def __init__(
        self, path: str | os.PathLike[str], text: str = "txt", fields: Sequence[Field] = ()
    ):
        """Open the files and check the features of the first record.

        Args:
            path: a local file, a folder, or a pattern such as "train-{00000..00099}.array_record".
            text: name of the feature with the text. If the name ends in npy, npz or safetensors,
                the feature holds embeddings, otherwise captions. "json:FIELD" names a field in a
                feature that holds JSON, and "txt,json:long*0.5" names several places.
            fields: the numbers of each record.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or the first record lacks an image or the text.
        """
        records.check_places(fields, ("json",))
        self._fields = fields
        self._texts, self._paths = captions.alternatives(text), _find(os.fspath(path))
        self._readers = [_open(name) for name in self._paths]
        self._firsts = np.cumsum([0, *(reader.num_records() for reader in self._readers)])
        if not len(self):
            raise ValueError(f"no records in {path}: all {len(self._paths)} files are empty")
        # A first record that cannot be read passes, because `read` reports it as unusable.
        first = next((m for m in self._messages(0, [0]) if m is not None), b"")
        features, texts = decode(first), [text.partition(":")[0] for text, _ in self._texts]
        for kinds, name, advice in (
            (_images(), "image or a suffix such as jpg", ". Rename the image feature accordingly"),
            (texts, " or ".join(texts), ". Set data.text to the caption feature"),
        ):
            if features and not any(kind in features for kind in kinds):
                raise ValueError(
                    f"the first record of {self._paths[0]} has no feature {name}: "
                    f"it has {', '.join(features)}{advice}"
                )

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Read the records with these indices. All records of a file are read in one request."""
        files = np.searchsorted(self._firsts, indices, side="right") - 1
        result: list[Record] = [Record(b"", "", "")] * len(indices)
        for file in set(files.tolist()):
            rows = np.flatnonzero(files == file).tolist()
            inside = [int(indices[row] - self._firsts[file]) for row in rows]  # Within the file.
            for row, index, message in zip(rows, inside, self._messages(file, inside), strict=True):
                result[row] = self._record(f"{self._paths[file]}/{index}", message)
        return result

    def files(self) -> list[str]:
        return self._paths

    def _messages(self, file: int, indices: list[int]) -> Sequence[bytes | None]:
        """Return the serialized Examples at these indices of a file; None for a damaged Example."""
        reader = self._readers[file]
        try:
            return reader.read(indices)
        except (RuntimeError, ValueError):  # At least one is damaged: read them one by one.
            return [_read_one(reader, index) for index in indices]

    def _record(self, path: str, message: bytes | None) -> Record:
        try:
            features = decode(message) if message is not None else {}
        except ValueError:
            features = {}
        if not features:
            return Record(b"", Unusable("broken_record", "not a tf.train.Example"), path)
        key = features.get(tars.KEY, [b""])[0].decode(errors="replace")
        name = f"{path} ({key})" if key else path
        images = next((features[kind] for kind in _images() if kind in features), [b""])
        if len(images) > 1:
            reason = Unusable("broken_record", f"it holds {len(images)} images instead of one")
            return Record(b"", reason, name)
        texts = [(read_feature(features, place), weight) for place, weight in self._texts]
        return Record(images[0], captions.join(texts), name, self._numbers(message, features))

    def _numbers(
        self, message: bytes | None, features: Mapping[str, Sequence[bytes]]
    ) -> dict[str, Any]:
        if not self._fields or message is None:
            return {}
        numbers = records.read_numbers(features.get("json", [b"{}"])[0], self._fields)
        for kind in ("float_list", "int64_list"):
            alone = decode(message, kind)
            values = {f.name: alone[f.name] for f in self._fields if f.name in alone}
            numbers |= {n: value[0] if len(value) == 1 else value for n, value in values.items()}
        return numbers


def _images() -> tuple[str, ...]:
    return ("image", *untrusted.image_suffixes())


def read_feature(features: Mapping[str, Sequence[bytes]], text: str) -> Any:
    """Read the text of a record from one feature of its tf.train.Example.

    Args:
        features: The features of the Example, keyed by name. Each is a list of bytes.
        text: The name of the feature, or "json:FIELD" for a field of a feature that holds JSON.

    Returns:
        A caption, Captions if the feature holds several, or text embeddings. If the feature is
        missing or damaged, an Unusable that says why.
    """
    name, _, field = text.partition(":")
    if name not in features:
        return Unusable("no_caption", f"no feature {name!r} among {', '.join(features)}")
    kind = text if field or name.rsplit(".")[-1] in EMBEDDINGS else "txt"
    return captions.join((records.read_text(value, kind), 1.0) for value in features[name])


def encode(features: Mapping[str, bytes]) -> bytes:
    """Serialize features as a tf.train.Example with one byte string per feature."""
    message = _Example()
    for name, value in features.items():
        message.features.feature[name].bytes_list.value.append(value)
    return message.SerializeToString(deterministic=True)


def decode(message: bytes, kind: str = "bytes_list") -> dict[str, Sequence[Any]]:
    """Return the values of the features of one kind in a serialized tf.train.Example, by name.

    The kinds are "bytes_list", "float_list" and "int64_list".

    Raises:
        ValueError: the bytes are not an Example.
    """
    try:
        features = _Example.FromString(message).features.feature
    except DecodeError as error:
        raise ValueError(f"not a tf.train.Example: {error}") from error
    lists = {name: list(getattr(features[name], kind).value) for name in sorted(features)}
    return {name: values for name, values in lists.items() if values}


def write(path: str | os.PathLike[str], examples: Iterable[Mapping[str, bytes]]) -> None:
    """Write records to an ArrayRecord file atomically. The file's folder must exist.

    Records are compressed individually, so that each can be read alone.

    Args:
        path: the file.
        examples: for each record, a dictionary from feature names to contents.
    """
    with files.whole(path) as temporary:
        writer = array_record_module.ArrayRecordWriter(str(temporary), "group_size:1")
        with contextlib.closing(writer):
            for features in examples:
                writer.write(encode(features))


def _find(path: str) -> list[str]:
    paths = tars.expand(path)
    if storage.is_url(paths[0]):
        raise ValueError(f"{path} is a URL, but ArrayRecord files must be local: mount the bucket, "
                         "or use tars, which are read by URL")  # fmt: skip
    records.check_exists(paths, "arrayrecord")
    if len(paths) == 1 and storage.is_folder(paths[0]):
        folder = paths[0]
        # TFDS's names are like train.array_record-00000-of-00010; hidden files are incomplete.
        paths = pathlib.Path(folder).rglob(f"[!.]*{SUFFIX}*")
        paths = sorted(str(path) for path in paths if path.is_file())
        if not paths:
            raise ValueError(f"no {SUFFIX} files in {folder}: check the path")
        storage.warn_of_missing_shards(paths)
    return paths


def _open(path: str) -> array_record_module.ArrayRecordReader:
    storage.refuse_pointer(path)
    reader = array_record_module.ArrayRecordReader(path)
    if not reader.ok():
        raise ValueError(f"{path} is not a complete ArrayRecord file: write it again")
    return reader


def _read_one(reader: array_record_module.ArrayRecordReader, index: int) -> bytes | None:
    try:
        return reader.read([index])[0]
    except (RuntimeError, ValueError):
        return None
