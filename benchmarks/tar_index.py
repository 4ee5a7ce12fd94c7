"""Measure the time and memory that a training process needs to list the records of many tars.

    python -m benchmarks.tar_index --records=20_000_000

The command writes one tar, and then makes links to it and copies of its index until there are
enough records. One process writes the list of all records ("make"). Then --processes processes open
the list at the same time ("open"), read all of it, and look up samples in the order of an epoch.

The command prints one line of JSON with times in seconds and memory in bytes per record. "memory"
is the resident memory that opening and reading the list adds, and "own" is the part of this memory
that is not shared with other processes. "scan" is the time to read the headers of all tars if they
have no index, extrapolated from one tar. "published" scales the numbers to the 676 million records
on which NVIDIA trained Imagen.
"""

import multiprocessing
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

from benchmarks import measure
from diffusion_jax import cli
from diffusion_jax.data import pipeline, tars
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.data.sources.webdataset import WebDataset

_RECORDS = flags.DEFINE_integer("records", 20_000_000, "Records in all tars.", lower_bound=1)
_TAR = flags.DEFINE_integer("tar", 10_000, "Records per tar.", lower_bound=1)
_PROCESSES = flags.DEFINE_integer(
    "processes", 4, "Processes that open the list at the same time.", lower_bound=1
)
_PUBLISHED = 676_000_000
_SAMPLES = 20_000
_FIRST = "1.tar"
_wait: Callable[[], Any] = lambda: None


def main(argv: list[str]) -> None:
    """Write the tars, measure, and print the result."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: write flags as --NAME=VALUE")
    sizes = _RECORDS.value, _TAR.value, _PROCESSES.value
    with tempfile.TemporaryDirectory() as folder:
        measure.say(weigh(pathlib.Path(folder), *sizes))


def weigh(folder: pathlib.Path, records: int, size: int, processes: int) -> dict[str, object]:
    """Write tars to a folder, open them in several processes, and return the line to print.

    The tars have `size` records each and `records` in total, rounded up to whole tars.
    """
    num_tars = -(-records // size)
    records = num_tars * size
    scan = _write(folder, num_tars, size)
    context = multiprocessing.get_context("spawn")  # New processes share no memory with this one.
    pool_of = lambda n: context.Pool(n, _meet_at, (context.Barrier(n),))
    with pool_of(1) as pool:
        first = pool.apply(_open, (folder,))  # Writes the list.
    with pool_of(processes) as pool:
        others = pool.map(_open, [folder] * processes, chunksize=1)
    (file,) = folder.glob("records-*.index")
    worst = {name: max(figures[name] for figures in others) for name in others[0]}
    line = {
        "records": records,
        "tars": num_tars,
        "processes": processes,
        "file_bytes": round(file.stat().st_size / records, 2),
        "scan_seconds": round(scan * num_tars, 1),
        "make_seconds": round(first["seconds"], 2),
        "open_seconds": round(worst["seconds"], 2),
        "samples_per_second": round(_SAMPLES / worst["draw"]),
        "memory_bytes": round(worst["memory"] / records, 2),
        "own_bytes": round(worst["own"] / records, 2),
        "make_peak_bytes": round(first["peak"] / records, 2),
    }
    scale = _PUBLISHED / records
    line["published"] = {
        "make_seconds": round(first["seconds"] * scale),
        "open_seconds": round(worst["seconds"] * scale, 1),
        "memory_gb": round(worst["memory"] * scale / 1e9, 1),
        "own_gb": round(worst["own"] * scale / 1e9, 2),
    }
    return line


def _write(folder: pathlib.Path, num_tars: int, size: int) -> float:
    """Write one tar and its index, then link and copy them until there are `num_tars` tars.

    Returns the seconds to scan one tar.
    """
    first = folder / _FIRST
    tars.write(first, ({tars.KEY: b"%09d" % i, "jpg": b"image", "txt": b"t"} for i in range(size)))
    start = time.perf_counter()
    tars.load_index(str(first))
    seconds = time.perf_counter() - start
    for i in range(2, num_tars + 1):
        (folder / f"{i}.tar").hardlink_to(first)
        shutil.copy(f"{first}.index.npz", folder / f"{i}.tar.index.npz")
    return seconds


class _Numbers(Pictures):
    """Data set without pictures. Its length is enough to draw the order of an epoch."""

    def __init__(self, number: int):
        self._number = number

    def __len__(self) -> int:
        return self._number

    def read(self, indices, places=None):
        raise NotImplementedError


def _meet_at(barrier: Any) -> None:
    """Initialize a process: store the barrier at which all processes wait for each other."""
    global _wait
    _wait = barrier.wait


def _open(folder: pathlib.Path) -> dict[str, float]:
    """Open the list of records in this process, read all of it and look up samples of an epoch.

    Returns the seconds to open the list ("seconds") and to look up the samples ("draw"), and the
    added memory in bytes: in total ("memory"), unshared ("own") and at most while opening ("peak").
    """
    _wait()
    before, start = _memory(), time.perf_counter()
    data = WebDataset(folder)
    seconds = time.perf_counter() - start
    peak = _memory()["peak"] - before["memory"]
    data._listing.spans.max()  # Reads all records.
    _wait()
    order, start = pipeline._order(_Numbers(len(data)), 0), time.perf_counter()
    for i in range(_SAMPLES):
        data._place(int(order[i] or 0))
    draw_seconds = time.perf_counter() - start
    _wait()
    after = _memory()
    _wait()
    added = {name: after[name] - before[name] for name in ("memory", "own")}
    return {"seconds": seconds, "draw": draw_seconds, "peak": peak, **added}


def _memory() -> dict[str, int]:
    """Return this process's resident bytes: "memory" in total, "own" (unshared) and "peak"."""
    rows = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {row.split()[0]: int(row.split()[1]) * 1024 for row in rows}
    status = pathlib.Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    private = sizes["Private_Dirty:"] + sizes["Private_Clean:"]
    return {"memory": sizes["Rss:"], "own": private, "peak": peak}


if __name__ == "__main__":
    cli.run(main)
