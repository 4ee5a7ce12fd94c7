"""A report on a data set: counts, sizes, lengths of texts, broken records, a sheet of samples."""

import collections
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from diffusion_jax.data import transforms
from diffusion_jax.data.records import Record, Records
from diffusion_jax.machine import progress, sheets, untrusted

_CHUNK = 64
_NAMED = 20
_QUANTILES = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}


class _Facts(NamedTuple):
    """Size, text and format of one record; `reason` is empty if it can be used."""

    reason: str
    name: str
    width: int = 0
    height: int = 0
    length: int = 0
    """Characters of a caption, or tokens of embeddings."""
    num_bytes: int = 0
    format: str = ""


def validate(records: Records, num: int = 0, threads: int = 4, seed: int = 0) -> dict[str, Any]:
    """A report for JSON, of all records or of `num` drawn at random; each is decoded whole.

    "usable" and "unusable" (by reason, with the first names) add up to "read". Sizes are pixels.
    """
    chosen = _draw(len(records), num, seed) if 0 < num < len(records) else range(len(records))
    chunks = [chosen[i : i + _CHUNK] for i in range(0, len(chosen), _CHUNK)]
    look = lambda chunk: [_look(record) for record in records.read(chunk)]
    with ThreadPoolExecutor(threads) as pool:
        looked = pool.map(look, chunks)
        parts = progress.reported(looked, len(chosen), "records", size=len)
        facts = [one for part in parts for one in part]
    good = [f for f in facts if not f.reason]
    bad = [f for f in facts if f.reason]
    return {
        "records": len(records),
        "left_out": records.left_out(),
        "read": len(facts),
        "usable": len(good),
        "unusable": dict(collections.Counter(f.reason for f in bad)),
        "unusable_first": [f"{f.name}: {f.reason}" for f in bad[:_NAMED]],
        "formats": dict(collections.Counter(f.format for f in good)),
        "smaller_side": _quantiles([min(f.width, f.height) for f in good]),
        "aspect": _quantiles([max(f.width, f.height) / min(f.width, f.height) for f in good]),
        "bytes": _quantiles([f.num_bytes for f in good]),
        "text_length": _quantiles([f.length for f in good]),
        "empty_texts": sum(f.length == 0 for f in good),
    }


def sample_sheet(records: Records, num: int = 32, seed: int = 0) -> UInt8[np.ndarray, "_ _ 3"]:
    """Usable ones of `num` records drawn at random, cut to 128 x 128, over their captions."""
    images, captions = [], []
    for record in records.read(_draw(len(records), min(num, len(records)), seed)):
        if isinstance(record.text, transforms.Unusable):
            continue
        try:
            images.append(transforms.square(record.image, size=128))
        except transforms.Unusable:
            continue
        text = record.text
        captions.append(text if isinstance(text, str) else f"text {np.shape(text)}")
    if not images:
        raise ValueError(f"none of {num} records drawn at random is an image that can be decoded")
    return sheets.contact_sheet(np.stack(images), captions)


def _draw(length: int, num: int, seed: int) -> Sequence[int]:
    """Different numbers below `length` in their order, at random; no table of all."""
    return np.sort(np.random.default_rng(seed).choice(length, num, replace=False)).tolist()


def _look(record: Record) -> _Facts:
    text = record.text
    if isinstance(text, transforms.Unusable):
        return _Facts(text.reason, record.name)
    try:
        transforms.square(record.image, size=64)
    except transforms.Unusable as error:
        return _Facts(error.reason, record.name)
    with untrusted.open_image(record.image) as image:
        (width, height), format = image.size, image.format or ""
    return _Facts("", record.name, width, height, len(text), len(record.image), format)


def _quantiles(values: Sequence[float | int]) -> dict[str, float]:
    if not values:
        return {}
    return {name: round(float(np.quantile(values, q)), 2) for name, q in _QUANTILES.items()}
