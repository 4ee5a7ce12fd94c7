"""Prompts from files: one a line, tables of captions, COCO's annotations."""

import csv
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from diffusion_jax.data import sources
from diffusion_jax.data.records import Records
from diffusion_jax.machine import files

_CHUNK = 256  # Records whose texts are read together.


def read(path: str | os.PathLike[str], number: int | None = None, seed: int = 2023) -> list[str]:
    """The prompts of a file; `number` of them, drawn with `seed` without putting back.

    .txt: one a line. .tsv with a header that names `caption`, such as `image_id id caption`. .json:
    COCO's captions. Or the captions of a data source, "SOURCE:PATH::TEXT" (sources.open_named).
    ValueError if there is no prompt, or are fewer than `number`.
    """
    try:
        prompts = [text for text in _read(path) if text.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8, as files of prompts are") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    if number is None:
        return prompts
    if number > len(prompts):
        raise ValueError(f"{path} holds {len(prompts)} prompts and {number} are asked for")
    chosen = np.random.RandomState(seed).permutation(len(prompts))[:number]
    return [prompts[i] for i in sorted(chosen)]


def fingerprint(prompts: Sequence[str]) -> str:
    """Names a list of prompts: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:16]


def _read(path: str | os.PathLike[str]) -> Sequence[str]:
    if (named := sources.open_named(os.fspath(path))) is not None:
        return _captions(named)
    path = files.local(path)
    readers = {".txt": _lines, ".tsv": _table, ".json": _coco}
    if path.suffix not in readers:
        raise ValueError(
            f"{path} is no file of prompts: write .txt (one a line), .tsv or .json, or name a data "
            "source, such as tfds:coco_captions@val::captions/text"
        )
    return readers[path.suffix](path)


def _captions(named: Records) -> list[str]:
    """One of each record, without those that are damaged or no text."""
    chunks = (range(i, min(i + _CHUNK, len(named))) for i in range(0, len(named), _CHUNK))
    return [text for chunk in chunks for text in named.texts(chunk) if isinstance(text, str)]


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _table(path: pathlib.Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    if rows and "caption" not in rows[0]:
        raise ValueError(f"{path} has the columns {', '.join(rows[0])}: one must be caption")
    return [row["caption"] for row in rows]


def _coco(path: pathlib.Path) -> list[str]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or "annotations" not in content:
        raise ValueError(f"{path} has no annotations: it is none of COCO's caption files")
    return [a["caption"].strip() for a in sorted(content["annotations"], key=lambda a: a["id"])]
