"""Report on a data set: counts, image sizes, text lengths, broken records, and samples."""

import collections
import contextlib
import functools
import hashlib
import json
import pathlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from diffusion_jax import files
from diffusion_jax.config.picture_fields import Field
from diffusion_jax.data import captions, decoding, show
from diffusion_jax.data.engines import ALONE, Engine
from diffusion_jax.data.records import Record, Records, checked_numbers
from diffusion_jax.files import sorted_tables, untrusted

_CHUNK = 64
_PART = 4096  # Records per file of intermediate counts.
_HASHED = ("images", "texts")
_ROW = np.dtype([("key", sorted_tables.KEY)])
_NAMED = 20
_WORD = re.compile(r"[^\W_]+")
_QUANTILES = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}


class _Facts(NamedTuple):
    """Facts about one record. `reason` says why it is unusable; "" means that it is usable."""

    reason: str
    name: str
    detail: str = ""
    """The message of the error that makes the record unusable. It begins with the reason."""
    width: int = 0
    height: int = 0
    lengths: tuple[int, ...] = ()
    """Characters of each caption, or tokens of embeddings."""
    num_bytes: int = 0
    format: str = ""
    words: tuple[tuple[str, ...], ...] = ()
    """The words of each caption in lower case."""
    hashes: tuple[tuple[bytes, ...], ...] = ()
    """The hash of the image file, and those of the texts (the captions' words, or embeddings)."""


def validate(
    records: Records,
    num: int = 0,
    threads: int = 4,
    seed: int = 0,
    folder: pathlib.Path | None = None,
    engine: Engine = ALONE,
    fields: Sequence[Field] = (),
) -> dict[str, Any]:
    """Decode the records of a data set, and return a report as a dictionary of JSON values.

    In the report, "usable" and the counts in "unusable", keyed by reason, add up to "read".
    "unusable_first" names the first unusable records, and "left_out_first" the first files that
    were left out when the data set was opened. These entries hold quantiles of the usable records:
    "smaller_side" in pixels, "aspect" (longer side / shorter side), "bytes" of image
    files, "text_length" in characters of captions or tokens of embeddings, and "text_words".
    "duplicates" counts image files that repeat those of earlier records. "words" maps the most
    frequent words to their counts. "different_texts" counts distinct captions, ignoring capitals
    and punctuation, or distinct embeddings.

    Args:
        records: The data set.
        num: The number of records to draw at random and decode; 0 for all.
        threads: The number of threads that decode records.
        seed: Seed of the random choice.
        folder: An empty folder for intermediate files, which save memory. All Beam workers must be
            able to reach it. None uses a temporary folder.
        engine: Distributes the work.
        fields: The numbers to check.
    """
    with contextlib.ExitStack() as stack:
        folder = folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        total = min(num or len(records), len(records))
        parts = _Parts(folder, total, len(records), seed, threads)
        size = lambda part: min(_PART, total - part * _PART)
        look = functools.partial(_write_part, records, parts, fields)
        engine.fill(parts.numbers, parts.counts, look, noun="records", size=size)
        ranges = range(len(_HASHED) * sorted_tables.num_ranges(total))
        distinct = functools.partial(_write_distinct, parts)
        different = engine.fill(ranges, parts.distinct, distinct, noun="ranges")
        sums: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        first: list[str] = []
        for number in parts.numbers:
            part = json.loads(parts.counts(number).read_text())
            first += part.pop("first")
            for name, counts in part.items():
                sums[name].update(counts)
    inventory = records.inventory()
    left_out = inventory.left_out()
    return {
        "records": len(records),
        "left_out": left_out,
        "left_out_first": {reason: inventory.first[reason] for reason in left_out},
        **_report(sums, first[:_NAMED], different),
    }


class _Parts(NamedTuple):
    """The records to validate, split into parts, and the intermediate files of each part.

    From a data set of `records` records, `total` are drawn with the seed `seed`.
    """

    folder: pathlib.Path
    total: int
    records: int
    seed: int
    threads: int

    @property
    def numbers(self) -> range:
        return range(-(-self.total // _PART))

    def rows(self, part: int) -> Sequence[int]:
        rows = range(part * _PART, min((part + 1) * _PART, self.total))
        if self.total == self.records:
            return rows
        return show.draw(self.records, self.total, self.seed)[rows.start : rows.stop]

    def counts(self, part: int) -> pathlib.Path:
        return self.folder / f"counts-{part:08}.json"

    def hashes(self, kind: str, part: int) -> pathlib.Path:
        return self.folder / f"{kind}-{part:08}"

    def distinct(self, part: int) -> pathlib.Path:
        return self.folder / f"distinct-{part:08}"


def _write_part(records: Records, parts: _Parts, fields: Sequence[Field], number: int) -> None:
    """Read the records of part `number`, and write the files of this part.

    One file holds counts. Two files hold the hashes of usable images and of their texts.
    """
    rows = parts.rows(number)
    chunks = [rows[i : i + _CHUNK] for i in range(0, len(rows), _CHUNK)]
    look = lambda chunk: [_look(record, fields) for record in records.read(chunk)]
    with ThreadPoolExecutor(parts.threads) as pool:
        facts = [one for part in pool.map(look, chunks) for one in part]
    good = [f for f in facts if not f.reason]
    bad = [f for f in facts if f.reason]
    for which, kind in enumerate(_HASHED):
        hashes = [(key,) for f in good for key in f.hashes[which]]
        sorted_tables.write(parts.hashes(kind, number), np.array(hashes, _ROW))
    count = collections.Counter
    counts = {
        "records": {"read": len(facts), "usable": len(good)},
        "unusable": count(f.reason for f in bad),
        "formats": count(f.format for f in good),
        "sizes": count(f"{f.width}x{f.height}" for f in good),
        "bytes": count(f.num_bytes for f in good),
        "lengths": count(length for f in good for length in f.lengths),
        "num_words": count(len(words) for f in good for words in f.words),
        "words": count(word for f in good for words in f.words for word in words),
        "first": [f"{f.name}: {f.detail}" for f in bad[:_NAMED]],
    }
    files.write_whole(parts.counts(number), json.dumps(counts))


def _write_distinct(parts: _Parts, number: int) -> dict[str, int]:
    """Count the distinct images or texts in one range of hashes; write and return the count.

    In the first half of all numbers, `number` selects a range of hashes of images; in the second
    half, it selects a range of hashes of texts.
    """
    which, part = divmod(number, ranges := sorted_tables.num_ranges(parts.total))
    paths = (parts.hashes(_HASHED[which], i) for i in parts.numbers)
    rows = sorted_tables.read_range(sorted(files.present(paths)), _ROW, part, ranges)
    files.write_whole(parts.distinct(number), str(count := len(sorted_tables.first_of_each(rows))))
    return {_HASHED[which]: count}


def _report(sums: Mapping[str, collections.Counter], first: list[str], different: Mapping[str, int]) -> dict[str, Any]:
    """Return the report.

    Args:
        sums: The counts of all parts, summed.
        first: Names of the first unusable records, with the reasons.
        different: The numbers of distinct "images" and "texts".
    """
    smaller, aspect = collections.Counter(), collections.Counter()
    for size, count in sums["sizes"].items():
        low, high = sorted(map(int, size.split("x")))
        smaller[low] += count
        aspect[high / low] += count
    numbers = lambda name: {int(value): count for value, count in sums[name].items()}
    return {
        "read": sums["records"]["read"],
        "usable": sums["records"]["usable"],
        "unusable": dict(sums["unusable"]),
        "unusable_first": first,
        "formats": dict(sums["formats"]),
        "smaller_side": _quantiles(smaller),
        "aspect": _quantiles(aspect),
        "bytes": _quantiles(numbers("bytes")),
        "text_length": _quantiles(numbers("lengths")),
        "empty_texts": sums["lengths"]["0"],
        "text_words": _quantiles(numbers("num_words")),
        "different_texts": different["texts"],
        "words": dict(sums["words"].most_common(_NAMED)),
        "duplicates": sums["records"]["usable"] - different["images"],
    }


def _look(record: Record, fields: Sequence[Field]) -> _Facts:
    text = record.text
    if isinstance(text, decoding.Unusable):
        return _Facts(text.reason, record.name, str(text))
    try:
        decoding.crop(record.image, (64, 64))
        checked_numbers(record.numbers, fields)
    except decoding.Unusable as error:
        return _Facts(error.reason, record.name, str(error))
    with untrusted.open_image(record.image) as image:
        (width, height), format = image.size, image.format or ""
    texts = captions.every(text)
    words = [_WORD.findall(text.lower()) if isinstance(text, str) else [] for text in texts]
    same = [  # Texts with the same words count as equal.
        " ".join(found).encode() if isinstance(text, str) else np.asarray(text).tobytes()
        for text, found in zip(texts, words, strict=True)
    ]
    return _Facts(
        "",
        record.name,
        "",
        width,
        height,
        tuple(map(len, texts)),
        len(record.image),
        format,
        tuple(map(tuple, words)),
        ((_hash(record.image),), tuple(map(_hash, same))),
    )


def _hash(contents: bytes) -> bytes:
    return hashlib.blake2b(contents, digest_size=sorted_tables.KEY_SIZE).digest()


def _quantiles(counts: Mapping[Any, int]) -> dict[str, float]:
    """Return the quantiles of a sample, interpolated as by np.quantile.

    `counts` maps each value to the number of its occurrences in the sample. The result is keyed by
    the names in _QUANTILES, such as "median". It is {} for an empty sample.
    """
    if not counts:
        return {}
    values = np.array(sorted(counts), float)
    ends = np.cumsum([counts[value] for value in values.tolist()])
    at = lambda rank: values[np.searchsorted(ends, rank, side="right")]

    def quantile(q: float) -> float:
        rank = q * (ends[-1] - 1)
        return float(np.interp(rank % 1, [0, 1], [at(np.floor(rank)), at(np.ceil(rank))]))

    return {name: round(quantile(q), 2) for name, q in _QUANTILES.items()}
