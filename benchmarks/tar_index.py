"""Times the listing of many tars, and weighs it in memory: what a start of training costs.

    python -m benchmarks.tar_index --records=20_000_000

Writes one tar, gives it as many names as it takes, and the index that `prepare index` would have
made beside each. Then one process makes the listing of all records, and after it `processes` open
it at the same time, touch every record of it, and draw samples in the order of an epoch. Prints one
line of JSON: seconds, and bytes a record. `memory` counts all that a process holds, `own` what no
other shares with it; both are what opening and reading added. `scan` is the time in which the
headers of tars are read, once, where no index is beside them. `published` extrapolates all of it
to the 676 million records that Imagen's authors at NVIDIA trained on.
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
_TAR = flags.DEFINE_integer("tar", 10_000, "Records a tar.", lower_bound=1)
_PROCESSES = flags.DEFINE_integer("processes", 4, "That open it together.", lower_bound=1)
_PUBLISHED = 676_000_000
_SAMPLES = 20_000
_FIRST = "1.tar"
_wait: Callable[[], Any] = lambda: None


def main(argv: list[str]) -> None:
    """Writes the tars, measures, prints."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    sizes = _RECORDS.value, _TAR.value, _PROCESSES.value
    with tempfile.TemporaryDirectory() as folder:
        measure.say(weigh(pathlib.Path(folder), *sizes))


def weigh(folder: pathlib.Path, records: int, size: int, processes: int) -> dict[str, object]:
    """The line of JSON for `records` in tars of `size` under `folder`."""
    num_tars = -(-records // size)
    records = num_tars * size
    scan = _write(folder, num_tars, size)
    context = multiprocessing.get_context("spawn")  # A process of its own, with nothing in memory.
    together = lambda n: context.Pool(n, _meet_at, (context.Barrier(n),))
    with together(1) as pool:
        made = pool.apply(_open, (folder,))
    with together(processes) as pool:
        opened = pool.map(_open, [folder] * processes, chunksize=1)
    (file,) = folder.glob("records-*.index")
    worst = {name: max(one[name] for one in opened) for name in opened[0]}
    line = {
        "records": records,
        "tars": num_tars,
        "processes": processes,
        "file_bytes": round(file.stat().st_size / records, 2),
        "scan_seconds": round(scan * num_tars, 1),
        "make_seconds": round(made["seconds"], 2),
        "open_seconds": round(worst["seconds"], 2),
        "samples_per_second": round(_SAMPLES / worst["draw"]),
        "memory_bytes": round(worst["memory"] / records, 2),
        "own_bytes": round(worst["own"] / records, 2),
        "make_peak_bytes": round(made["peak"] / records, 2),
    }
    scale = _PUBLISHED / records
    line["published"] = {
        "make_seconds": round(made["seconds"] * scale),
        "open_seconds": round(worst["seconds"] * scale, 1),
        "memory_gb": round(worst["memory"] * scale / 1e9, 1),
        "own_gb": round(worst["own"] * scale / 1e9, 2),
    }
    return line


def _write(folder: pathlib.Path, num_tars: int, size: int) -> float:
    """One tar under many names, and as many of its index; the seconds that its scan took."""
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
    """As many pictures as there are records, none of which is ever made."""

    def __init__(self, number: int):
        self._number = number

    def __len__(self) -> int:
        return self._number

    def read(self, indices, places=None):
        raise NotImplementedError


def _meet_at(barrier: Any) -> None:
    """Keeps the barrier of the processes that hold the listing at the same time."""
    global _wait
    _wait = barrier.wait


def _open(folder: pathlib.Path) -> dict[str, float]:
    """Opens the tars in this process, touches every record and draws samples of an epoch."""
    _wait()
    before, start = _weight(), time.perf_counter()
    opened = WebDataset(folder)
    seconds = time.perf_counter() - start
    peak = _weight()["peak"] - before["memory"]
    opened._listing.spans.max()
    _wait()
    order, start = pipeline._order(_Numbers(len(opened)), 0), time.perf_counter()
    for i in range(_SAMPLES):
        opened._place(int(order[i] or 0))
    drawn = time.perf_counter() - start
    _wait()
    after = _weight()
    _wait()
    added = {name: after[name] - before[name] for name in ("memory", "own")}
    return {"seconds": seconds, "draw": drawn, "peak": peak, **added}


def _weight() -> dict[str, int]:
    """Bytes of this process: all its pages, those that no other shares, and the most there were."""
    rows = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    held = {row.split()[0]: int(row.split()[1]) * 1024 for row in rows}
    status = pathlib.Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    own = held["Private_Dirty:"] + held["Private_Clean:"]
    return {"memory": held["Rss:"], "own": own, "peak": peak}


if __name__ == "__main__":
    cli.run(main)
