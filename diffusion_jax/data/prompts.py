"""Read prompts from text files, tables, COCO's annotation files, or data sources."""

import hashlib
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Float

from diffusion_jax import files
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.data import captions, records, rows, sources, storage
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.records import Records
from diffusion_jax.files import untrusted

_CHUNK = 256  # Number of records whose texts are read together.


def read(
    path: str | os.PathLike[str],
    number: int | None = None,
    seed: int = 2023,
    *,
    every: bool = False,
    flag: str = "--prompts",
) -> list[str]:
    """Return the prompts of a file or data source, or a random sample of the prompts.

    The prompts keep their order. White space at their ends is removed. Blank prompts are left out,
    and their number is logged.

    Args:
        path: a .txt with one prompt per line, or a folder of .txt files with one prompt each; a
            .csv, .tsv, .jsonl, .json or .parquet table with a column of captions, or "FILE::COLUMN"
            to choose the column; one of COCO's caption files (.json); or "SOURCE:PATH::TEXT" for
            the first caption of each record of a data source, such as
            tfds:coco_captions@val::captions/text.
        number: size of the sample, drawn without replacement; None returns all prompts.
        seed: seed of the sample.
        every: whether to return all captions of each record of a data source.
        flag: the flag or config field that names `path`, for the message about a missing file.

    Raises:
        ValueError: the file has no prompts or fewer than `number`, a row is malformed, or the
            format is not supported.
        OSError: the file cannot be read.
    """
    texts, blank = [], []
    try:
        for place, text in _read(os.fspath(path), every):
            (texts if text else blank).append(text or place)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{flag}={path} cannot be read: {error}") from error
    if not texts:
        raise ValueError(f"{path} holds no prompts: add some, or choose another file")
    if blank:
        logging.warning("%s: left out %d blank prompts; the first: %s", path, len(blank), blank[0])
    if number is None:
        return texts
    if number > len(texts):
        raise ValueError(
            f"{path} holds {len(texts)} prompts, fewer than the requested {number}: request fewer, or add prompts"
        )
    chosen = np.random.RandomState(seed).permutation(len(texts))[:number]
    return [texts[i] for i in sorted(chosen)]


def numbers(path: str | os.PathLike[str], fields: Sequence[Field]) -> dict[str, Float[np.ndarray, "N"]]:
    """Return the columns of fields in a table of N prompts, keyed by Field.key.

    An empty cell is NaN. Columns that the table lacks are left out; so the result is {} for a file
    that is not a table. Raises ValueError if a cell holds no number in its range.
    """
    kept = table(path) if fields else []
    return {
        field.key: np.array([_number(place, row.get(field.name), field) for place, row in kept])
        for field in fields
        if any(field.name in row for _, row in kept)
    }


def refuse_numbers(path: str | os.PathLike[str], fields: Sequence[Field]) -> None:
    """Raise ValueError if a table of prompts has columns of fields, which only `sample` reads."""
    if columns := numbers(path, fields):
        names = ", ".join(field.name for field in fields if field.key in columns)
        raise ValueError(
            f"the prompts {path} have numbers of data.fields ({names}), which only sample reads: "
            "remove these columns, and give all prompts the same numbers with sampler.fields"
        )


def table(path: str | os.PathLike[str]) -> list[rows.Row]:
    """Return the rows of a table that hold the prompts; [] for a file that is not a table."""
    name, column = _located(os.fspath(path))
    if os.path.splitext(name)[1].lower() not in rows.READERS:
        return []
    found = list(rows.read(files.local(name)))
    texts = [text for _, text in _column(name, found, column)]
    return [row for row, text in zip(found, texts, strict=True) if text]


def names(path: str | os.PathLike[str]) -> list[str]:
    """Return the names, without .txt, of the prompt files in a folder; [] for any other path."""
    folder = files.local(path)
    return [pathlib.Path(place).stem for place, _ in _folder(folder)] if folder.is_dir() else []


def _number(place: str, cell: Any, field: Field) -> float:
    try:
        return math.nan if cell in (None, "") else field.number(cell)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def fingerprint(prompts: Sequence[str]) -> str:
    """Return 16 hex digits that identify a list of prompts: the start of its SHA-256."""
    return hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:16]


def _read(name: str, every: bool) -> Iterator[tuple[str, str]]:
    """Yield (place, prompt) of each row. The prompt is "" if it is blank."""
    if (named := sources.open_named(name)) is not None:
        if left_out := named.left_out():
            logging.warning("%s: left out: %s", name, left_out)
        return _captions(named, every)
    name, column = _located(name)
    path = files.local(name)
    suffix = path.suffix.lower()
    if path.is_dir():
        return _folder(path)
    if suffix in rows.READERS:
        return _column(name, rows.read(path), column)
    if suffix not in ("", ".txt") or column:
        raise ValueError(
            f"{name} is not a table of prompts: use .txt (one prompt per line), "
            f"{', '.join(rows.READERS)}, or a data source such as "
            "tfds:coco_captions@val::captions/text"
        )
    lines = untrusted.split_lines(untrusted.read_text(path).rstrip())
    return ((f"line {number}", line.strip()) for number, line in enumerate(lines, 1))


def _folder(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    is_text = lambda file: file.suffix.lower() == ".txt" and not storage.is_hidden(file.name)
    paths = sorted(filter(is_text, path.iterdir()))
    return ((str(file), untrusted.read_text(file).strip()) for file in paths)


def _located(name: str) -> tuple[str, str]:
    """Split FILE::COLUMN into the path and the name of the column, which is "" without "::"."""
    if "::" not in name.rpartition("/")[2] or os.path.exists(name):
        return name, ""
    path, _, column = name.rpartition("::")
    return path, column


def _captions(named: Records, every: bool) -> Iterator[tuple[str, str]]:
    texts_of = captions.every if every else lambda text: [captions.first(text)]
    for first in range(0, len(named), _CHUNK):
        chunk = range(first, min(first + _CHUNK, len(named)))
        for index, text in zip(chunk, named.texts(chunk), strict=True):
            place = f"record {index} ({text})" if isinstance(text, Unusable) else f"record {index}"
            for each in texts_of(text):
                yield place, each if isinstance(each, str) else ""


def _column(name: str, table: Iterable[tuple[str, Mapping[str, Any]]], column: str) -> Iterator[tuple[str, str]]:
    """Yield the prompts in a column of a table.

    If `column` is "", this is the column "caption" or, without it, the only other one with a common
    name for captions. Raises ValueError if the column cannot be found, or a cell holds no text.
    """
    for place, row in table:
        if not column:
            likely = [rows.CAPTION] if rows.CAPTION in row else rows.likely(row)
            if len(likely) != 1:
                raise ValueError(
                    f"{place} has no column 'caption', but {', '.join(row)}: name the column with "
                    f"the prompts, as in {name}::COLUMN"
                )
            (column,) = likely
        cell = row.get(column)
        if column not in row:
            raise ValueError(f"{place} has no column {column!r}, but {', '.join(row)}")
        if not isinstance(cell, str):
            raise ValueError(f"{place}: {column} is {rows.shown(cell)}, not a text: correct it")
        if isinstance(text := records.cell_text(cell), str):
            yield place, text
        else:
            raise ValueError(f"{place}: {column} cannot be read: {text}")
