"""Reads prompts from text files, tables, COCO's annotation files, or data sources."""

import csv
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from diffusion_jax.data import sources
from diffusion_jax.data.records import Records
from diffusion_jax.machine import files, untrusted

_CHUNK = 256  # Number of records whose texts are read together.


def read(path: str | os.PathLike[str], number: int | None = None, seed: int = 2023) -> list[str]:
    """Return the prompts of a file or data source, or a random sample of the prompts.

    The prompts keep their order, and blank ones are left out.

    Args:
        path: a .txt with one prompt per line, a .tsv with a column `caption`, one of COCO's caption
            files (.json), or "SOURCE:PATH::TEXT" for the captions of a data source, such as
            tfds:coco_captions@val::captions/text.
        number: size of the sample, drawn without replacement; None returns all prompts.
        seed: seed of the sample.

    Raises:
        ValueError: the file has no prompts or fewer than `number`, or its format is not supported.
    """
    try:
        prompts = [text for text in _read(path) if text.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: save the prompts in UTF-8") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompts: add some, or choose another file")
    if number is None:
        return prompts
    if number > len(prompts):
        raise ValueError(
            f"{path} holds {len(prompts)} prompts, fewer than the requested {number}: request "
            "fewer, or add prompts"
        )
    chosen = np.random.RandomState(seed).permutation(len(prompts))[:number]
    return [prompts[i] for i in sorted(chosen)]


def fingerprint(prompts: Sequence[str]) -> str:
    """Return 16 hex digits that identify a list of prompts: the start of its SHA-256."""
    return hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:16]


def _read(path: str | os.PathLike[str]) -> Sequence[str]:
    if (named := sources.open_named(os.fspath(path))) is not None:
        return _captions(named)
    path = files.local(path)
    readers = {".txt": _lines, ".tsv": _table, ".json": _coco}
    if path.suffix not in readers:
        raise ValueError(
            f"{path} is not a file of prompts: use .txt (one prompt per line), .tsv or .json, or a "
            "data source such as tfds:coco_captions@val::captions/text"
        )
    untrusted.refuse_pipe(path)
    return readers[path.suffix](path)


def _captions(named: Records) -> list[str]:
    """Return the captions of a data source. Embeddings and damaged captions are left out."""
    chunks = (range(i, min(i + _CHUNK, len(named))) for i in range(0, len(named), _CHUNK))
    return [text for chunk in chunks for text in named.texts(chunk) if isinstance(text, str)]


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _table(path: pathlib.Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    if rows and "caption" not in rows[0]:
        raise ValueError(
            f"{path} has no column 'caption', but {', '.join(rows[0])}: rename the column with the "
            "prompts to 'caption'"
        )
    return [row["caption"] for row in rows]


def _coco(path: pathlib.Path) -> list[str]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or "annotations" not in content:
        raise ValueError(
            f"{path} has no annotations: use one of COCO's caption files, such as "
            "captions_val2014.json"
        )
    return [a["caption"].strip() for a in sorted(content["annotations"], key=lambda a: a["id"])]
