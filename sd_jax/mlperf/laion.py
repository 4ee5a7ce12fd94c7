"""LAION-400M's tables of URLs: the rows with a licence, which are the ones MLPerf trains on."""

import pathlib
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from diffusion_jax.machine import files

COLUMNS = ("SAMPLE_ID", "URL", "TEXT", "HEIGHT", "WIDTH", "LICENSE", "NSFW", "similarity")
"""The columns kept: URL and TEXT for img2dataset, the others for the .json beside each image."""
NONE = "?"
"""The licence of the rows that are left out."""
_BATCH = 65_536  # Rows in memory at once, and of a group in the file that is written.


def filter_licensed(source: pathlib.Path, target: pathlib.Path) -> tuple[int, int]:
    """Writes the rows of a parquet file whose LICENSE is not "?"; (rows kept, rows read).

    The file is read page by page and written as it comes, whole or not at all. ValueError if a
    column is missing, or it is no parquet file.
    """
    with files.whole(target) as temporary, _open(source) as file:
        _check_columns(source, file.schema_arrow.names)
        return _write(file, temporary), file.metadata.num_rows


def filter_table(
    source: pathlib.Path, out: pathlib.Path, names: Sequence[str], number: int
) -> dict[str, int]:
    """`filter_licensed` of one of the tables of a folder, into another; the rows it counted."""
    kept, total = filter_licensed(source / names[number], out / names[number])
    return {"kept": kept, "read": total}


def _open(path: pathlib.Path) -> pyarrow.parquet.ParquetFile:
    try:
        # A stream of pages: by default a whole group of rows, often a gigabyte, would be read.
        opened = path.open("rb") if files.remote(path) else path
        return pyarrow.parquet.ParquetFile(opened, pre_buffer=False, buffer_size=2**20)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no parquet file: {error}") from error


def _check_columns(path: pathlib.Path, names: list[str]) -> None:
    if missing := [name for name in COLUMNS if name not in names]:
        raise ValueError(f"{path} has no column {missing[0]}: it has {', '.join(names)}")


def _write(file: pyarrow.parquet.ParquetFile, path: pathlib.Path) -> int:
    fields = [file.schema_arrow.field(name) for name in COLUMNS]
    kept = 0
    with pyarrow.parquet.ParquetWriter(path, pa.schema(fields)) as writer:
        for table in _groups(file, pa.schema(fields)):
            writer.write_table(table)
            kept += table.num_rows
    return kept


def _groups(file: pyarrow.parquet.ParquetFile, schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows that stay, some ten thousand at a time: few of a batch do."""
    waiting: list[pa.RecordBatch] = []
    for batch in file.iter_batches(_BATCH, columns=list(COLUMNS)):
        licence = batch.column(batch.schema.get_field_index("LICENSE"))
        keep = pyarrow.compute.call_function("not_equal", [licence, pa.scalar(NONE)])
        # No entry is not "?": the reference, which is pandas', keeps such rows.
        keep = pyarrow.compute.fill_null(keep, True)
        waiting.append(batch.filter(keep).select(list(COLUMNS)))
        if sum(part.num_rows for part in waiting) >= _BATCH:
            yield pa.Table.from_batches(waiting, schema)
            waiting = []
    yield pa.Table.from_batches(waiting, schema)
