"""Filter LAION-400M's tables of image URLs: keep the rows with a licence, as MLPerf does."""

import pathlib
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from diffusion_jax import files

COLUMNS = ("SAMPLE_ID", "URL", "TEXT", "HEIGHT", "WIDTH", "LICENSE", "NSFW", "similarity")
"""The columns to keep. The download tool img2dataset reads URL and TEXT, and writes the other
columns to each image's .json file."""
NONE = "?"
"""The value of LICENSE in rows without a licence. These rows are dropped."""
_BATCH = 65_536  # Rows to read at once, and the minimum number of rows to write as a row group.


def filter_licensed(source: pathlib.Path, target: pathlib.Path) -> tuple[int, int]:
    """Copy the rows of a parquet file whose LICENSE is not "?"; return (rows kept, rows read).

    As in MLPerf's script, an empty LICENSE counts as a licence. To save memory, the file is read
    page by page. `target` appears only when it is complete.

    Raises:
        ValueError: If `source` is not a parquet file or lacks a column of COLUMNS.
    """
    with files.whole(target) as temporary, _open(source) as file:
        names = file.schema_arrow.names
        if missing := [name for name in COLUMNS if name not in names]:
            raise ValueError(
                f"{source} has no column {missing[0]}, so it is not a table of LAION-400M: it has "
                f"the columns {', '.join(names)}"
            )
        return _write(file, temporary), file.metadata.num_rows


def filter_table(source: pathlib.Path, out: pathlib.Path, names: Sequence[str], number: int) -> dict[str, int]:
    """Filter one table of a folder with `filter_licensed`, and write the result to another folder.

    Args:
        source: The folder with the tables.
        out: The folder for the filtered table, which keeps its file name.
        names: The file names of all tables.
        number: The index of the table in `names`.

    Returns:
        The numbers of rows, {"kept": ..., "read": ...}.
    """
    rows_kept, rows_read = filter_licensed(source / names[number], out / names[number])
    return {"kept": rows_kept, "read": rows_read}


def _open(path: pathlib.Path) -> pyarrow.parquet.ParquetFile:
    try:
        # Read page by page: by default pyarrow reads a whole row group, often a gigabyte.
        opened = path.open("rb") if files.store_path(path) else path
        return pyarrow.parquet.ParquetFile(opened, pre_buffer=False, buffer_size=2**20)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file, or is damaged: download it again ({error})") from error


def _write(file: pyarrow.parquet.ParquetFile, path: pathlib.Path) -> int:
    fields = [file.schema_arrow.field(name) for name in COLUMNS]
    rows_kept = 0
    with pyarrow.parquet.ParquetWriter(path, pa.schema(fields)) as writer:
        for table in _groups(file, pa.schema(fields)):
            writer.write_table(table)
            rows_kept += table.num_rows
    return rows_kept


def _groups(file: pyarrow.parquet.ParquetFile, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows with a licence, in tables of at least _BATCH rows (the last may be smaller).

    Each table becomes a row group of the new file. The rows of several batches are joined, because
    few rows of a batch have a licence.
    """
    waiting: list[pa.RecordBatch] = []
    for batch in file.iter_batches(_BATCH, columns=list(COLUMNS)):
        licence = batch.column(batch.schema.get_field_index("LICENSE"))
        keep = pyarrow.compute.call_function("not_equal", [licence, pa.scalar(NONE)])
        # Keep rows with an empty LICENSE, as MLPerf's script does: in pandas, NaN != "?" is true.
        keep = pyarrow.compute.fill_null(keep, True)
        waiting.append(batch.filter(keep).select(list(COLUMNS)))
        if sum(part.num_rows for part in waiting) >= _BATCH:
            yield pa.Table.from_batches(waiting, schema)
            waiting = []
    yield pa.Table.from_batches(waiting, schema)
