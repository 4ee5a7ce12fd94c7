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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from diffusion_jax import files
from diffusion_jax.config import picture_fields
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.config.settings import EMBEDDINGS, Data
from diffusion_jax.data import captions, home, reading, records, storage, tars, tf_examples
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import PICTURES, LeftOut
from diffusion_jax.data.pictures import TaskShapes
from diffusion_jax.data.reading import Place
from diffusion_jax.data.table import InPlace, Row, Table
from diffusion_jax.files import untrusted

SUFFIX = ".array_record"
_CHUNK = 64  # Number of records that an import reads at a time.


def open_source(data: Data, _: TaskShapes) -> Table:
    """Open the ArrayRecord files at a config's data.path as a table."""
    return open_files(records.path_of(data), data.text, picture_fields.read(data.fields))


def open_files(path: str | os.PathLike[str], text: str = "txt", fields: Sequence[Field] = ()) -> Table:
    """Open the records of one or more ArrayRecord files, in the order of the files.

    An Example without the text feature is counted as unusable when it is read.

    Args:
        path: a local file, a folder, or a pattern such as "train-{00000..00099}.array_record".
        text: name of the feature with the text. If the name ends in npy, npz or safetensors, the
            feature holds embeddings, otherwise captions. "json:FIELD" names a field in a feature
            that holds JSON, and "txt,json:long*0.5" names several places.
        fields: the numbers of each record.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or the first record lacks an image or the text.
    """
    records.check_places(fields, ("json",))
    beside = LeftOut()
    texts, paths, images = captions.alternatives(text), _find(os.fspath(path), beside), _images()
    rule = home.rule("arrayrecord", text, fields, images=images)

    def rows(inventory: LeftOut) -> Iterator[Row]:
        number = 0
        for name in paths:
            for index, message in enumerate(_every(tf_examples.open_file(name))):
                if not number:
                    _check_first(message, name, texts, images)
                yield _row(Place(name, index), number, message, texts, images, fields)
                number += 1
        if not number:
            raise ValueError(f"no records in {path}: all {len(paths)} files are empty")
        inventory.add(PICTURES, (), number)

    root = os.path.commonpath([os.path.dirname(name) for name in paths])
    table = home.open_table(home.Source(root, paths, rule, rows, LeftOut(), {}))
    table.add_beside(beside)
    return table


def _check_first(message: bytes | None, name: str, texts: Sequence[tuple[str, float]], images: Sequence[str]) -> None:
    """Check the features of the first record. One that cannot be read is reported later."""
    kinds = [text.partition(":")[0] for text, _ in texts]
    features = tf_examples.decode(message or b"")
    for expected, of, advice in (
        (images, "image or a suffix such as jpg", ". Rename the image feature accordingly"),
        (kinds, " or ".join(kinds), ". Set data.text to the caption feature"),
    ):
        if features and not any(kind in features for kind in expected):
            raise ValueError(f"the first record of {name} has no feature {of}: it has {', '.join(features)}{advice}")


def _row(
    place: Place,
    number: int,
    message: bytes | None,
    texts: Sequence[tuple[str, float]],
    images: Sequence[str],
    fields: Sequence[Field],
) -> Row:
    """Return the row of the Example `message`, a record at `place`."""
    features = tf_examples.features_of(message)
    key = features.get(tars.KEY, [b""])[0].decode(errors="replace")
    name = f"{place.at} ({key})" if key else str(place.at)
    kind = next((kind for kind in images if kind in features), images[0])
    image = place._replace(kind=f"{reading.RECORD}{kind}")
    if isinstance(value := tf_examples.value_of(features, kind), Unusable):
        return Row(name, number, image, value)
    if any(text.partition(":")[0].rsplit(".")[-1] in EMBEDDINGS for text, _ in texts):
        text, origins = _in_place(features, place, texts)
    else:
        parts = ((read_feature(features, of), weight, f"feature {of}") for of, weight in texts)
        text, origins = captions.with_origins(parts)
    return Row(name, number, image, text, origins, _numbers(message, features, fields))


def _in_place(
    features: Mapping[str, Sequence[bytes]], place: Place, texts: Sequence[tuple[str, float]]
) -> tuple[Any, list[str]]:
    """Return the places of texts of which some are embeddings, and their origins."""
    found, origins = [], []
    for text, weight in texts:
        name = text.partition(":")[0]
        values = features.get(name, ())
        for value in range(len(values)):
            inside = place._replace(size=value, kind=f"{reading.RECORD}{name}")
            found.append(InPlace(inside, _kind(text), weight * (1.0 / len(values))))
            origins.append(f"feature {text}")
    return found or read_feature(features, texts[-1][0]), origins


def _numbers(
    message: bytes | None, features: Mapping[str, Sequence[bytes]], fields: Sequence[Field]
) -> dict[str, float | Unusable]:
    if not fields or message is None:
        return {}
    numbers = records.read_numbers(features.get("json", [b"{}"])[0], fields)
    for kind in ("float_list", "int64_list"):
        alone = tf_examples.decode(message, kind)
        values = {f.name: alone[f.name] for f in fields if f.name in alone}
        numbers |= {n: value[0] if len(value) == 1 else value for n, value in values.items()}
    return {field.name: records.number_of(field, numbers.get(field.name)) for field in fields}


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
    name = text.partition(":")[0]
    if name not in features:
        return Unusable("no_caption", f"no feature {name!r} among {', '.join(features)}")
    return captions.join((records.read_text(v, _kind(text)), 1.0) for v in features[name])


def _kind(text: str) -> str:
    """Return the kind of a feature's values, as records.read_text names it."""
    name, _, field = text.partition(":")
    return text if field or name.rsplit(".")[-1] in EMBEDDINGS else "txt"


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
                writer.write(tf_examples.encode(features))


def _find(path: str, inventory: LeftOut) -> list[str]:
    paths = tars.expand(path)
    if storage.is_url(paths[0]):
        raise ValueError(
            f"{path} is a URL, but ArrayRecord files must be local: mount the bucket, "
            "or use tars, which are read by URL"
        )
    records.check_exists(paths, "arrayrecord")
    if len(paths) == 1 and storage.is_folder(paths[0]):
        folder = str(pathlib.Path(paths[0]))
        # TFDS's names are like train.array_record-00000-of-00010; hidden files are incomplete.
        paths = records.count_beside(folder, [SUFFIX], inventory)
        if not paths:
            raise ValueError(f"no {SUFFIX} files in {folder}: check the path")
        storage.warn_of_missing_shards(paths)
    return paths


def _every(reader: array_record_module.ArrayRecordReader) -> Iterator[bytes | None]:
    total = reader.num_records()
    for first in range(0, total, _CHUNK):
        yield from tf_examples.messages(reader, list(range(first, min(first + _CHUNK, total))))
