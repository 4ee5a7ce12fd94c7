"""Read TFDS data sets from ArrayRecord or TFRecord files, in random order, without TensorFlow.

TFRecord is TFDS's default format, and TensorFlow only reads it sequentially. For random access, the
byte ranges of all records in TFRecord files are found when the data set is imported. A record in
such a file consists of the length of the contents, a checksum of the length, the contents, and a
checksum of the contents. TFDS decodes the contents once; after that, only pictures are read.
"""

import contextlib
import functools
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffusion_jax.config import own_modules, picture_fields
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.settings import Data
from diffusion_jax.data import captions, home, reading, records, storage, tf_examples
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import PICTURES, LeftOut
from diffusion_jax.data.pictures import TaskShapes
from diffusion_jax.data.reading import Place
from diffusion_jax.data.table import Row, Table

_ABOUT = ("dataset_info.json", "features.json")
_LENGTH = struct.Struct("<Q")
_CHUNK = 64  # Number of examples that an import reads at a time.


def open_source(data: Data, _: TaskShapes) -> Table:
    """Open the TFDS split at a config's data.path, such as "NAME@train"."""
    return open_split(records.path_of(data), data.text, picture_fields.read(data.fields))


def open_split(path: str, text: str = "caption", fields: Sequence[Field] = ()) -> Table:
    """Open the examples of one split of a TFDS data set, each with its captions.

    Args:
        path: "NAME@SPLIT" of a data set prepared under TFDS_DATA_DIR, or "FOLDER@SPLIT" with the
            folder of one version of a data set.
        text: name of the caption feature. "/" joins the names of nested features, as in
            "captions/text". Commas join several features, as in "caption,long*0.5".
        fields: the numbers of each example, whose names are those of features, as for `text`.

    Raises:
        ValueError: `path` names no split, the data set is missing or empty, its file format has no
            random access, or it has no image feature, no feature `text` or no feature of a number.
    """
    name, split = records.split_of(path)
    if not split:
        raise ValueError(f"data.path is {path!r}: write NAME@SPLIT, such as {name}@train")
    import tensorflow_datasets as tfds  # Slow to import, and needed by few data sets.

    records.check_places(fields, ())
    texts, image, decoders = captions.alternatives(text), "", {}
    with _explained(path):
        for about in _ABOUT:
            storage.refuse_pointer(os.path.join(name, about))
        builder = _builder(tfds, name)
        parts = builder.info.splits[split].file_instructions
        for part in parts:
            storage.refuse_pointer(part.filename)
        features = builder.info.features.items()
        if images := [name for name, kind in features if isinstance(kind, tfds.features.Image)]:
            image = records.image_column(images, path)
            decoders = {image: tfds.decode.SkipDecoding()}  # decoding.crop is faster.
    if not images:
        raise ValueError(f"{name} has no image feature: choose a data set of images")

    def rows(inventory: LeftOut) -> Iterator[Row]:
        number, checked = 0, False
        for place, example in _examples(path, builder.info, parts, image, decoders):
            if isinstance(example, Unusable):
                row = Row(str(number), number, place, example)
            else:
                if not checked:
                    _check(path, example, texts, fields)
                    checked = True
                row = Row(str(number), number, place, *_about(example, texts, fields))
            yield row
            number += 1
        if not number:
            raise ValueError(f"{path} holds no examples: choose another split")
        inventory.add(PICTURES, (), number)

    root = os.fspath(builder.data_dir)
    rule = home.rule("tfds", text, fields, split=split)
    files = [*(os.path.join(root, name) for name in _ABOUT), *(os.fspath(part.filename) for part in parts)]
    table = home.open_table(home.Source(root, files, rule, rows, LeftOut(), {}))
    table.prefix = f"{path}, "
    records.count_beside(root, [".tfrecord", ".array_record"], beside := LeftOut())
    table.add_beside(beside)
    return table


def _about(
    example: Any, texts: Sequence[tuple[str, float]], fields: Sequence[Field]
) -> tuple[Any, list[str], dict[str, float | Unusable]]:
    """Return the text of an example, the origins of its captions, and its numbers."""
    pairs = ((records.cell_text(_inside(example, n)), w, f"feature {n}") for n, w in texts)
    numbers = {f.name: records.number_of(f, _inside(example, f.name)) for f in fields}
    return *captions.with_origins(pairs), numbers


def _check(path: str, example: Any, texts: Sequence[tuple[str, float]], fields: Sequence[Field]) -> None:
    """Raise ValueError if an example lacks the feature of a text or number."""
    needed = [(name, "text to the caption feature") for name, _ in texts]
    needed += [(field.name, "fields to the features of numbers") for field in fields]
    for name, advice in needed:
        if _inside(example, name) is None:
            raise ValueError(f"{path} has no feature {name!r}: it has {', '.join(example)}. Set data.{advice}")


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # TFDS raises many types.
        raise ValueError(
            f"TFDS cannot read {path}: {' '.join(str(error).split())}. If the data set is not "
            "prepared, run tfds build NAME (for large sets, with --file_format=array_record)"
        ) from error


def _examples(path: str, info: Any, parts: Sequence[Any], image: str, decoders: Any) -> Iterator[tuple[Place, Any]]:
    """Yield the place of the image of each example in `parts`, and the example or Unusable."""
    readers = {"ARRAY_RECORD": _array_records, "TFRECORD": _frames}
    with _explained(path):
        if info.file_format.name not in readers:
            raise ValueError(f"the file format {info.file_format.name} has no random access")
        for part in parts:
            for place, example in readers[info.file_format.name](os.fspath(part.filename), part.skip, part.take):
                if not isinstance(example, Unusable):
                    example = info.features.deserialize_example_np(example, decoders=decoders)
                yield place._replace(kind=place.kind + image), example


def _array_records(path: str, skip: int, take: int) -> Iterator[tuple[Place, bytes | Unusable]]:
    reader, damaged = tf_examples.open_file(path), Unusable("broken_record", "it cannot be read")
    for first in range(skip, skip + take, _CHUNK):
        numbers = list(range(first, min(first + _CHUNK, skip + take)))
        for number, message in zip(numbers, tf_examples.messages(reader, numbers), strict=True):
            yield Place(path, number, -1, reading.RECORD), damaged if message is None else message


def _frames(path: str, skip: int, take: int) -> Iterator[tuple[Place, bytes | Unusable]]:
    """Yield the records of a TFRecord file. Raises ValueError if it is truncated."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        spans, position, end = [], 0, len(mapped)
        while position < end:
            (length,) = _LENGTH.unpack_from(mapped, position) if position + 12 <= end else (end,)
            spans.append((position + 12, position + 12 + length))
            position += 12 + length + 4
        if position != end:
            raise ValueError(f"{path} is not a complete TFRecord file: write it again")
        for first, last in spans[skip:][:take]:
            example = tf_examples.checked(mapped[first : last + tf_examples.CHECKSUM.size])
            yield Place(path, first, last - first, reading.FRAME), example


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
