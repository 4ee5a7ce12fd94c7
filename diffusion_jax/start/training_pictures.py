"""Read the pictures that the start command trains on, report on them, and shrink them."""

import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from diffusion_jax.config.settings import Data
from diffusion_jax.data import guess, sources
from diffusion_jax.data.prepare import reshard, validate
from diffusion_jax.data.records import Records
from diffusion_jax.files import untrusted
from diffusion_jax.logs.progress import counted

_FIRST, _LOOKED = 32, 2_000  # The smallest and largest numbers of records to read.
_SECONDS = 60  # About how long reading may take.
_PER_TAR = 1_000


class PictureSet(NamedTuple):
    """A data set: its settings, its records, and a report on a sample of the records."""

    data: Data
    records: Records
    report: Mapping[str, Any]
    """The result of validate.validate."""
    speed: float
    """Pictures that this machine reads per second."""

    @property
    def side(self) -> float:
        """The median of the shorter sides, in pixels."""
        return self.report["smaller_side"]["median"]


def read(data: Data) -> PictureSet:
    """Open a data set, read random pictures for about a minute, and return a PictureSet.

    At least 32 and at most 2,000 pictures are read, or all of a smaller set. Raises ValueError if
    the texts are embeddings, or if no picture can be used.
    """
    if data.embedded:
        raise ValueError(
            f"--text={data.text} names embeddings, but this command needs captions: give the "
            "captions' suffix or field, such as --text=txt or --text=json:caption"
        )
    records, start = sources.open_records(data), time.monotonic()
    report = validate.validate(records, _FIRST)
    speed = report["read"] / (time.monotonic() - start)
    if (num := min(_LOOKED, len(records), round(speed * _SECONDS))) > _FIRST:
        report = validate.validate(records, num)
    if not report["usable"]:
        raise ValueError(
            f"none of {report['read']:,} pictures of {data.path} can be used: "
            f"{_counts(report['unusable'])} ({report['unusable_first'][0]})"
        )
    return PictureSet(data, records, report, speed)


def described(photos: PictureSet) -> list[tuple[str, str]]:
    """Return (label, text) pairs that describe the data set, for printing."""
    data, report = photos.data, photos.report
    side, aspect, words = (report[name] for name in ("smaller_side", "aspect", "text_words"))
    read = "" if report["read"] == report["records"] else f", {report['read']:,} of them read"
    frequent = ", ".join(f"{word} {n:,}" for word, n in list(report["words"].items())[:12])
    unusable, captions = "none", "none: the model learns to draw such pictures without a prompt"
    if report["unusable"]:
        unusable = f"{_counts(report['unusable'])} ({report['unusable_first'][0]})"
    if frequent:
        captions = (
            f"{counted(report['different_texts'], 'different caption')} of {words['min']:.0f} to "
            f"{counted(round(words['max']), 'word')}; most frequent words: {frequent}"
        )
    rows = [
        ("data", f"{data.source}:{data.path}::{data.text}: {counted(report['records'], 'picture')}{read}"),
        (
            "shorter side",
            f"{side['min']:,.0f} to {side['max']:,.0f} pixels, median "
            f"{side['median']:,.0f}; {_counts(report['formats'])}",
        ),
        ("aspect ratio", f"median {aspect['median']:.2g}, largest {aspect['max']:.2g}"),
        ("reading", f"{photos.speed:.2g} pictures per second"),
        ("unusable", unusable),
        *photos.records.inventory().rows(),
        ("duplicates", f"{counted(report['duplicates'], 'file')} equal to an earlier file"),
        ("captions", captions),
    ]
    return [(name, untrusted.printable(line)) for name, line in rows]


def shrink(photos: PictureSet, size: int, folder: pathlib.Path, *, pad: bool) -> PictureSet:
    """Write small copies of the pictures as PNGs in tars, and return the new data set.

    Tars that exist already are not written again.

    Args:
        photos: the data set.
        size: largest length in pixels of the shorter side or, with `pad`, of the longer side.
        folder: the folder of the tars.
        pad: whether to pad the pictures to squares.
    """
    data = photos.data
    identity = {"source": data.source, "path": data.path, "text": data.text}
    reshard.reshard(photos.records, folder, num=_PER_TAR, format="webdataset", identity=identity, size=size, pad=pad)
    return read(guess.guess(f"webdataset:{folder}"))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
