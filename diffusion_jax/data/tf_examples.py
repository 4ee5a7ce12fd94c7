"""Read tf.train.Examples in ArrayRecord and TFRecord files, without TensorFlow.

A record in a TFRecord file consists of the length of the contents, a checksum of the length, the
contents, and a checksum of the contents.
"""

import collections
import functools
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import google_crc32c
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]
from google.protobuf.message import DecodeError
from tensorflow_datasets.proto import tf_example_pb2  # Needs no TensorFlow.

from diffusion_jax.data import storage
from diffusion_jax.data.decoding import Unusable

CHECKSUM = struct.Struct("<I")
Example: Any = tf_example_pb2.Example  # pyright: ignore[reportAttributeAccessIssue]
Features = Mapping[str, Sequence[bytes]]
"""The features of an Example that hold bytes, by name; none if the Example is damaged."""


def read_records(places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Features]:
    """Return the Examples at places (path, number) in ArrayRecord files, keyed by place.

    The records of a file are read together. Raises OSError if a file was removed.
    """
    by_file = collections.defaultdict[str, list[int]](list)
    for path, number in dict.fromkeys(places):
        by_file[path].append(number)
    found = dict[tuple[str, int], Features]()
    for path, numbers in by_file.items():
        read = messages(_reader(path, storage.stamp(path)), numbers)
        found |= {(path, n): features_of(m) for n, m in zip(numbers, read, strict=True)}
    return found


def read_frames(spans: Sequence[tuple[str, int, int]]) -> list[Features | Unusable]:
    """Return the Examples at (path, offset, size) in TFRecord files, or Unusable for damaged ones.

    Raises OSError if a file was removed.
    """
    ranges = [(path, first, first + size + CHECKSUM.size) for path, first, size in spans]
    contents = storage.read_ranges(*zip(*ranges, strict=True)) if ranges else ()
    checked_ = map(checked, contents)
    return [of if isinstance(of, Unusable) else features_of(of) for of in checked_]


def value_of(example: Features | Unusable, feature: str, number: int = -1) -> bytes | Unusable:
    """Return a value of a feature by its number, or b"" if there is no such feature.

    With the number -1, the feature must have one value, as a picture has.
    """
    if isinstance(example, Unusable):
        return example
    if not example:
        return Unusable("broken_record", "not a tf.train.Example")
    values = example.get(feature, [b""])
    if number < 0 and len(values) > 1:
        return Unusable("broken_record", f"it holds {len(values)} images instead of one")
    return values[max(number, 0)]


def open_file(path: str) -> array_record_module.ArrayRecordReader:
    """Open an ArrayRecord file. Raises ValueError if it is incomplete, or a pointer of Git LFS."""
    storage.refuse_pointer(path)
    reader = array_record_module.ArrayRecordReader(path)
    if not reader.ok():
        raise ValueError(f"{path} is not a complete ArrayRecord file: write it again")
    return reader


def messages(reader: array_record_module.ArrayRecordReader, indices: list[int]) -> Sequence[bytes | None]:
    """Return the serialized Examples at these indices of a file; None for a damaged Example."""
    try:
        return reader.read(indices)
    except (RuntimeError, ValueError):  # At least one is damaged.
        if len(indices) == 1:
            return [None]
        return [message for index in indices for message in messages(reader, [index])]


def encode(features: Mapping[str, bytes]) -> bytes:
    """Serialize features as a tf.train.Example with one byte string per feature."""
    message = Example()
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
        features = Example.FromString(message).features.feature
    except DecodeError as error:
        raise ValueError(f"not a tf.train.Example: {error}") from error
    lists = {name: list(getattr(features[name], kind).value) for name in sorted(features)}
    return {name: values for name, values in lists.items() if values}


def features_of(message: bytes | None) -> Features:
    """Return the features that hold bytes in a serialized Example; {} if it is damaged."""
    try:
        return decode(message or b"")
    except ValueError:
        return {}


def checked(frame: bytes) -> bytes | Unusable:
    """Return the contents in front of their checksum, or Unusable if they differ from it."""
    contents, written = frame[: -CHECKSUM.size], frame[-CHECKSUM.size :]
    if written != CHECKSUM.pack(checksum(contents)):
        return Unusable("wrong_checksum", "the TFRecord file has changed since it was written")
    return contents


def checksum(contents: bytes) -> int:
    """Return the checksum of `contents` in a TFRecord file: CRC-32C, rotated, plus a constant."""
    crc = google_crc32c.value(contents)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _reader(path: str, _: tuple[int, int]) -> array_record_module.ArrayRecordReader:
    """Open a file for reading at random. It is opened again if its stamp changes."""
    return open_file(path)
