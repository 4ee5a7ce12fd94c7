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
import pathlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

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
    texts, image, source, decoders = captions.alternatives(text), "", None, {}
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
            with contextlib.suppress(NotImplementedError):  # There is none for TFRecord files.
                source = builder.as_data_source(split, decoders=decoders)
    if not images:
        raise ValueError(f"{name} has no image feature: choose a data set of images")

    def rows(inventory: LeftOut) -> Iterator[Row]:
        number, checked = 0, False
        for place, example in _examples(path, builder.info, parts, image, source, decoders):
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
    rule = {
        "source": "tfds",
        "split": split,
        "text": text,
        "ranges": list(map(str, fields)),
        "fields": [field.name for field in fields],
    }
    files = [*(os.path.join(root, name) for name in _ABOUT), *(os.fspath(part.filename) for part in parts)]
    table = home.open_table(home.Source(root, files, rule, rows, LeftOut(), {}))
    table.prefix = f"{path}, "
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


def _examples(
    path: str, info: Any, parts: Sequence[Any], image: str, source: Any, decoders: Any
) -> Iterator[tuple[Place | bytes, Any]]:
    """Yield the place of the image of each example in `parts`, and the example or Unusable.

    `source` holds the examples, unless they are in TFRecord files.
    """
    with _explained(path):
        if source is None:
            yield from _in_tf_records(info, parts, image, decoders)
        elif info.file_format.name == "ARRAY_RECORD":
            every = ((part, n) for part in parts for n in range(part.skip, part.skip + part.take))
            for (part, number), example in zip(every, _in_order(source), strict=True):
                place = Place(os.fspath(part.filename), number, -1, f"{reading.RECORD}{image}")
                yield place, example
        else:
            yield from ((b"" if isinstance(e, Unusable) else e[image], e) for e in _in_order(source))


def _in_order(source: Any) -> Iterator[Any]:
    for first in range(0, len(source), _CHUNK):
        indices = list(range(first, min(first + _CHUNK, len(source))))
        try:
            found = source.__getitems__(indices)
        except (RuntimeError, ValueError):  # At least one is damaged.
            found = [_one(source, index) for index in indices]
        yield from found


def _one(source: Any, index: int) -> Any:
    try:
        return source[index]
    except (RuntimeError, ValueError) as error:
        return Unusable("broken_record", " ".join(str(error).split()))


def _in_tf_records(info: Any, parts: Sequence[Any], image: str, decoders: Any) -> Iterator[tuple[Place, Any]]:
    if info.file_format.name != "TFRECORD":
        raise ValueError(f"the file format {info.file_format.name} has no random access")
    for part in parts:
        with (
            pathlib.Path(part.filename).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            frames = _frames(mapped, part.filename)[part.skip :][: part.take]
            for first, last in frames.tolist():
                place = Place(os.fspath(part.filename), first, last - first, reading.FRAME + image)
                example = tf_examples.checked(mapped[first : last + tf_examples.CHECKSUM.size])
                if not isinstance(example, Unusable):
                    example = info.features.deserialize_example_np(example, decoders=decoders)
                yield place, example


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
