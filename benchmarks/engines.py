"""Measure the speed and memory of data preparation in one process and with Apache Beam.

    python -m benchmarks.engines --records=100_000 --workers=1,2,4

The command writes tars of small pictures with different captions. It then times two kinds of work:
`prepare reshard`, and `precache` of the captions' embeddings. The text encoder is `hashed`, whose
time is negligible, so the benchmark times reading, planning, writing and indexing. Each kind of
work runs once in one process without Beam (reported as 0 workers), and then in Beam's direct runner
with each number of worker processes in --workers.

For each kind of work ("stage") and number of workers, the command prints a line of JSON:
- per_second: records per second.
- largest_process_mb: peak memory of the largest process in MB.
- same: whether the files equal those written without Beam.
- published_hours: hours for 400 million records at this rate.
Times include the start of Beam's workers, which takes some seconds for each step of Beam's plan.
The plan of `precache` has five steps.
"""

import hashlib
import multiprocessing
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable

from absl import app, flags

from benchmarks import measure
from configs import quickstart
from diffusion_jax import cli, engines
from diffusion_jax.config.settings import Data
from diffusion_jax.data import sources, tars
from diffusion_jax.data.prepare import reshard
from diffusion_jax.precache import fill

_RECORDS = flags.DEFINE_integer("records", 100_000, "Number of records.", lower_bound=1)
_WORKERS = flags.DEFINE_list("workers", ["1", "2", "4"], "Numbers of Beam workers to measure.")
_PUBLISHED = 400_000_000  # Records for which the time is extrapolated.
_TAR = 10_000  # Records per input tar.
_SHARD = 2_000  # Records or captions per output shard.


def main(argv: list[str]) -> None:
    """Write the tars, time both kinds of work, and print the results."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: write flags as --NAME=VALUE")
    records = _RECORDS.value
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        _write(root / "data", records)
        for stage, work in {"reshard": _reshard, "precache": _precache}.items():
            expected = None
            for workers in [0, *map(int, _WORKERS.value)]:
                out = root / f"{stage}-{workers}"
                seconds, peak = _measure(work, root / "data", out, workers)
                digest = _digest(out)
                expected = expected or digest
                line = {"stage": stage, "workers": workers, "records": records}
                line |= {"seconds": round(seconds, 1), "per_second": round(records / seconds)}
                line |= {"largest_process_mb": round(peak / 1e6), "same": digest == expected}
                line["published_hours"] = round(_PUBLISHED / records * seconds / 3600, 1)
                measure.say(line)


def _write(folder: pathlib.Path, records: int) -> None:
    folder.mkdir()
    picture = b"\xff\xd8\xff" + bytes(997)  # Starts like a JPEG; nothing decodes it.
    for first in range(0, records, _TAR):
        numbers = range(first, min(first + _TAR, records))
        rows = ({tars.KEY: b"%09d" % i, "jpg": picture, "txt": b"caption %d" % i} for i in numbers)
        tars.write(folder / f"{first:09}.tar", rows)
    sources.open_records(Data("webdataset", path=str(folder)))  # This writes the tars' indices.


def _engine(workers: int) -> engines.Engine:
    options = f"--direct_num_workers={workers} --direct_running_mode=multi_processing"
    return engines.beam(options) if workers else engines.ALONE


def _reshard(data: pathlib.Path, out: pathlib.Path, workers: int) -> None:
    records = sources.open_records(Data("webdataset", path=str(data)))
    reshard.reshard(
        records, out, num=_SHARD, format="webdataset", identity={}, engine=_engine(workers)
    )


def _precache(data: pathlib.Path, out: pathlib.Path, workers: int) -> None:
    config = quickstart.get_config().to_dict() | {"prompts": (), "evaluation": {}}
    config["text"] |= {"store": str(out)}
    config["data"] |= {"source": "webdataset", "path": str(data)}
    job = fill.open_job(config)
    fill.run(job, fill.Work(shard_captions=_SHARD, engine=_engine(workers)))


def _measure(
    work: Callable[..., None], data: pathlib.Path, out: pathlib.Path, workers: int
) -> tuple[float, int]:
    """Run `work` in a new process; return the seconds, and the peak bytes of the largest process.

    The peak covers the new process and its descendants. Raises SystemExit if the new process fails.
    """
    process = multiprocessing.get_context("spawn").Process(target=work, args=(data, out, workers))
    start = time.perf_counter()
    process.start()
    peaks, done = [0], threading.Event()
    watch = threading.Thread(target=_watch, args=(process.pid, peaks, done))
    watch.start()
    process.join()
    seconds = time.perf_counter() - start
    done.set()
    watch.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)
    return seconds, peaks[0]


def _watch(pid: int, peaks: list[int], done: threading.Event) -> None:
    while not done.wait(0.2):
        for process in _family(pid):
            try:
                status = pathlib.Path(f"/proc/{process}/status").read_text()
            except OSError:
                continue  # The process has exited.
            if "VmHWM:" in status:
                peaks[0] = max(peaks[0], int(status.partition("VmHWM:")[2].split()[0]) * 1024)


def _family(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = pathlib.Path(f"/proc/{name}/stat").read_text()
        except OSError:
            continue
        parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(name))
    family = [pid]
    for parent in family:
        family += parents.get(parent, [])
    return family


def _digest(folder: pathlib.Path) -> str:
    """Return a hash of the names and contents of all files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    cli.run(main)
