"""Captions in tables beside the images, as Hugging Face's folders and img2dataset have them."""

import json
import pathlib
import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

FORMATS = ("jsonl", "parquet")


def captions(root: pathlib.Path, names: Sequence[str], format: str, field: str) -> dict[str, str]:
    """The captions of images by their names under `root`, from every table in `names`.

    A row names its image in "file_name" (beside the table, as in Hugging Face's metadata.jsonl), or
    in "key" (in the folder that is called like the table: img2dataset's 00000.parquet and 00000/),
    without its suffix. `field` holds the caption; rows without one are left out. ValueError if
    there is no table, or none with such columns.
    """
    found = [name for name in names if name.endswith(f".{format}")]
    if not found:
        raise ValueError(f"no .{format} in {root}: data.text says that it holds the captions")
    stems = {posixpath.splitext(name)[0]: name for name in names if not name.endswith(FORMATS)}
    images = set(names)
    captions, columns = {}, set()
    for table in found:
        folder, stem = posixpath.dirname(table), posixpath.splitext(table)[0]
        for row in _READERS[format](root / table, field):
            columns |= row.keys()
            if "file_name" in row:
                image = posixpath.normpath(posixpath.join(folder, row["file_name"]))
            else:
                image = stems.get(posixpath.join(stem, str(row.get("key"))), "")
            if image in images and isinstance(row.get(field), str):
                captions[image] = row[field].strip()
    if not captions:
        raise ValueError(
            f"no row of {', '.join(found[:3])} in {root} has both an image that is there and a "
            f"{field!r}: the columns are {', '.join(sorted(columns)) or 'none'}"
        )
    return captions


def _read_jsonl(path: pathlib.Path, field: str) -> Iterator[dict[str, Any]]:
    del field
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield row if isinstance(row, dict) else {}


def _read_parquet(path: pathlib.Path, field: str) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet  # Slow to import, and few data sets need it.

    with pyarrow.parquet.ParquetFile(path) as file:
        known = file.schema_arrow.names
        name = "file_name" if "file_name" in known else "key"
        if missing := [column for column in (name, field) if column not in known]:
            raise ValueError(f"{path} has no column {missing[0]!r}: it has {', '.join(known)}")
        for batch in file.iter_batches(columns=[name, field]):
            yield from batch.to_pylist()


_READERS = {"jsonl": _read_jsonl, "parquet": _read_parquet}
