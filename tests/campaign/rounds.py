"""One round of the campaign: a command, a fault, the same command again, and a comparison."""

import contextlib
import functools
import glob
import itertools
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from tests import emulators
from tests.campaign import disturbances
from tests.campaign.damages import FINISHED
from tests.campaign.subjects import Result, Subject
from tests.imagen_jax import commands
from tests.processes import free_port

SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")
FULL = "full disk"
PATIENCE = 600
_ATTEMPTS = 6
_PAGE = 4096
_SHARE = 0.1  # The share of a bucket's requests that fail under disturbances.ERRORS.
# Messages of commands that notice a fault, and the words for them in the table.
_WORDS = {
    "skipping the damaged checkpoint": "checksum, passed over",
    "all checkpoints in": "checksum, no sound checkpoint",
    "differs from what was written": "read back",
    "No space left": "no space left",
    "is the disk full": "no space left",
    "damaged": "named as damaged",
    "should have": "hash",
    "Timeout (": "watchdog",
    "is being written by": "lock",
    "it lost another process": "lost process",
    "usually because another process died": "lost process",
    "records were saved": "number of records",
}


class Outcome(NamedTuple):
    """The outcome of a round."""

    name: str
    fault: str
    hit: bool
    """Whether the fault happened while the command ran, or damaged a file."""
    codes: tuple[int | None, ...]
    noticed: tuple[str, ...]
    different: tuple[str, ...]
    """Names of results that differ from an undisturbed run."""
    seconds: float

    def __str__(self) -> str:
        """Return one line."""
        result = f"DIFFERENT: {', '.join(self.different)}" if self.different else "the same"
        noticed = f" [{'; '.join(self.noticed)}]" if self.noticed else ""
        hit = "" if self.hit else " (came to nothing)"
        codes = " ".join(map(str, self.codes))
        return f"{self.name}, {self.fault}{hit}: exit codes {codes}{noticed}: {result} ({self.seconds:.0f} s)"


class Job:
    """All processes of a subject."""

    def __init__(
        self, subject: Subject, out: pathlib.Path, more: tuple[str, ...] = (), before: Callable[[], None] | None = None
    ) -> None:
        output = out.with_name(f"{out.name} output")
        output.mkdir(exist_ok=True)
        self.number = len(list(output.iterdir()))
        name, *arguments = (*subject.arguments(out), *more)
        if subject.processes > 1:
            arguments += [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={subject.processes}"]
        self.outputs = [
            (output / f"{self.number:03}.{i}.out", output / f"{self.number:03}.{i}.err")
            for i in range(subject.processes)
        ]
        for path in itertools.chain(*self.outputs):
            path.touch()
        taken = out.with_name(f"{out.name} taken")
        taken.mkdir(exist_ok=True)
        noting = functools.partial(commands.record_samples, taken)
        self.processes: list[BaseProcess] = []
        for i, outputs in enumerate(self.outputs):
            joined = [f"--process_id={i}"] if subject.processes > 1 else []
            self.processes.append(
                commands.start(
                    name,
                    *arguments,
                    *joined,
                    devices=1,
                    outputs=outputs,
                    before=disturbances.chained(
                        functools.partial(disturbances.set_variables, subject.environment),
                        noting if subject.notes else None,
                        before if i == subject.processes - 1 else None,
                        # A third of the time; other subjects rehearse.
                        commands.skip_rehearsal if subject.processes > 1 else None,
                    ),
                )
            )

    def end(self, seconds: float = PATIENCE) -> bool:
        """Return whether all processes ended within some time."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return not any(process.is_alive() for process in self.processes)

    def send(self, number: int) -> None:
        """Send a signal to the last process."""
        process = self.processes[-1]
        if process.is_alive():
            os.kill(process.pid or 0, number)

    def kill(self) -> None:
        """Kill all processes and wait for them."""
        for process in self.processes:
            process.kill()
            process.join()

    def codes(self) -> list[int | None]:
        """Return the exit codes."""
        return [process.exitcode for process in self.processes]

    def printed(self) -> str:
        """Return all output of the processes."""
        return "".join(path.read_text(errors="replace") for pair in self.outputs for path in pair)


def plan(every: Mapping[str, Subject], seed: int, only: str = "") -> Iterator[tuple[str, str]]:
    """Yield (subject, fault) of each round: subjects in turn, each with its faults in turn.

    With `only`, yield only rounds whose "subject, fault" contains it.
    """
    rng = random.Random(seed)
    faults, disks = {}, [FULL] if can_mount() else []
    if not disks:
        print("no full disks: a small one cannot be mounted here (it takes root)", flush=True)
    for name, subject in every.items():
        mine = [*SIGNALS, *([] if subject.bucket else disks), *subject.harms]
        if subject.processes == 1:
            mine += [disturbances.NO_MEMORY, *disturbances.CLOCKS]
            mine += [] if subject.bucket else disturbances.PLACES
            mine += [disturbances.OOM] if disturbances.can_limit() else []
        mine += subject.phases
        mine += [disturbances.ERRORS] if subject.bucket else []
        mine += [disturbances.TWINS, disturbances.TAKEOVER] if subject.locks else []
        mine += [disturbances.PROGRAMS] if subject.locks else []
        rng.shuffle(mine)
        mine = [fault for fault in mine if only in f"{name}, {fault}"]
        faults |= {name: itertools.cycle(mine)} if mine else {}
    for turn in itertools.count() if faults else ():
        for name, subject in every.items():
            if name in faults and turn % subject.every == 0:
                yield name, next(faults[name])


def undisturbed(subject: Subject, out: pathlib.Path) -> tuple[Result, float, int]:
    """Run a subject without faults. Return its results, its seconds, and its size in bytes."""
    _begin(subject, out)
    started = time.monotonic()
    job = Job(subject, out)
    assert job.end() and not any(job.codes()), (job.codes(), job.printed()[-3000:])
    seconds = time.monotonic() - started
    return _result(subject, out), seconds, _size(out)


def train_once(subject: Subject, out: pathlib.Path, target: pathlib.Path) -> None:
    """Train a run and move it to `target`, for subjects that read one."""
    _begin(subject, out)
    job = Job(subject, out)
    assert job.end() and not any(job.codes()), (job.codes(), job.printed()[-3000:])
    (out / "run").rename(target)


def run(
    name: str,
    subject: Subject,
    fault: str,
    expected: Result,
    seconds: float,
    size: int,
    out: pathlib.Path,
    rng: random.Random,
) -> Outcome:
    """Run one round. Its files are deleted if all results are the same."""
    started = time.monotonic()
    out = disturbances.place(out, fault)
    _begin(subject, out)
    room = rng.uniform(0.05, 0.9) * (size - _size(out))  # For the files of the command.
    with disk(out, int(_size(out) + room) if fault == FULL else 0) as grow:
        if fault == FULL:
            _begin(subject, out)
        hit, codes, printed, mend = _disturb(subject, fault, seconds, out, rng, grow)
        done = not any(codes) and fault not in subject.harms  # It continued after a stop.
        for attempt in range(0 if done else _ATTEMPTS):
            job = Job(subject, out, subject.verify if fault in subject.harms else ())
            ended = job.end()
            job.kill()
            codes, printed = [*codes, *job.codes()], printed + job.printed()
            if ended and not any(job.codes()):
                break
            if attempt == 0:
                mend()  # Like a user who read the message.
        unfinished = any(codes[-subject.processes :])
        different = ["unfinished"] if unfinished else _compare(subject, out, expected)
    noticed = list(dict.fromkeys(word for text, word in _WORDS.items() if text in printed))
    noticed += ["TRACEBACK"] if re.search(r"^Traceback", printed, re.MULTILINE) else []
    if different:
        pathlib.Path(f"{out} output", "all").write_text(printed)
    else:
        for path in (out, *out.parent.glob(f"{glob.escape(out.name)} *")):
            shutil.rmtree(path, ignore_errors=True)
    took = time.monotonic() - started
    return Outcome(name, fault, hit, tuple(codes), tuple(noticed), tuple(different), took)


def _disturb(subject, fault, seconds, out, rng, grow):
    """Run with a fault. Return (whether it hit, exit codes, output, a function that repairs it)."""
    nothing = lambda: None
    if fault in (disturbances.TWINS, disturbances.TAKEOVER, disturbances.PROGRAMS):
        return *_accompany(subject, fault, seconds, out, rng), nothing
    before = None
    if days := disturbances.CLOCKS.get(fault):
        before = functools.partial(disturbances.set_clock, rng.uniform(0, 1) * seconds, days)
    elif names := disturbances.PHASES.get(fault):
        before = functools.partial(disturbances.die_after, *names)
    errors = emulators.failing(subject.bucket, _SHARE * (fault == disturbances.ERRORS))
    with errors if subject.bucket else contextlib.nullcontext(lambda: 0) as num_errors:
        job = Job(subject, out, before=before)
        if before or fault == disturbances.ERRORS:
            job.end()
            job.kill()
            failed = num_errors() > 0 if fault == disturbances.ERRORS else any(job.codes())
            hit = failed or fault in disturbances.CLOCKS
            return hit, job.codes(), job.printed(), nothing
    if fault == FULL:
        ended = job.end()
        job.kill()
        grow()
        return ended and any(job.codes()), job.codes(), job.printed(), nothing
    # Damages need existing files, so they happen later.
    moment = rng.uniform(0.5 if fault in subject.harms else 0.1, 1.0) * seconds
    hit = not job.end(PATIENCE if fault.endswith(FINISHED) else moment)
    if fault == disturbances.OOM:
        hit = disturbances.kill_for_memory(job)
    elif fault == disturbances.NO_MEMORY:
        disturbances.take_address_space(job)
        job.end(150)  # A hanging save ends after two minutes.
    elif fault == "SIGSTOP":
        job.send(signal.SIGSTOP)
        time.sleep(rng.uniform(0.5, 3))
        if subject.processes == 1:
            job.send(signal.SIGCONT)
        job.processes[0].join(PATIENCE)  # Of two processes, the other one ends.
    else:
        job.send(signal.SIGTERM if fault == "SIGTERM" else signal.SIGKILL)
        job.end(60)
    job.kill()
    if fault not in subject.harms:
        return hit, job.codes(), job.printed(), nothing
    harmed = subject.harms[fault](out, rng)
    return harmed is not None, job.codes(), job.printed(), harmed[1] if harmed else nothing


def _accompany(subject, fault, seconds, out, rng):
    """Run with a second process. Return (whether it hit, exit codes, output)."""
    if fault == disturbances.PROGRAMS:
        other = out.with_name(f"{out.name} other")
        cache = {"JAX_COMPILATION_CACHE_DIR": str(out.with_name(f"{out.name} programs"))}
        use = functools.partial(disturbances.set_variables, cache)
        jobs = [Job(subject, folder, before=use) for folder in (out, other)]
    elif fault == disturbances.TWINS:
        jobs = [Job(subject, out)]
        time.sleep(1)
        jobs.append(Job(subject, out))
    else:
        jobs = [Job(subject, out)]
        jobs[0].end(disturbances.moment(rng, seconds))
        disturbances.freeze(jobs[0])
        jobs.append(Job(subject, out, before=disturbances.another_host))
        jobs[1].end(PATIENCE)
        disturbances.thaw(jobs[0])
    for job in jobs:
        job.end()
        job.kill()
    codes = [code for job in jobs for code in job.codes()]
    return (fault == disturbances.PROGRAMS or any(codes), codes, "".join(job.printed() for job in jobs))


def _size(folder: pathlib.Path) -> int:
    """Return the bytes that a folder takes on a disk, where files take whole pages."""
    pages = [-(-path.stat().st_size // _PAGE) + path.is_dir() for path in folder.rglob("*")]
    return _PAGE * (sum(pages) + 1)


def _begin(subject: Subject, out: pathlib.Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if not any(out.iterdir()):
        subject.begin(out)


def can_mount() -> bool:
    """Return whether `disk` works here, which needs root."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with disk(pathlib.Path(folder, "disk"), 65536):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


@contextlib.contextmanager
def disk(out: pathlib.Path, size: int):
    """Mount a file system at `out` if `size` is not 0. Yield a function that enlarges it."""
    if not size:
        yield lambda: None
        return
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(out)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=1G", str(out)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(out)], check=True)


def _result(subject: Subject, out: pathlib.Path) -> Result:
    taken = out.with_name(f"{out.name} taken")
    if taken.exists():
        shutil.copytree(taken, out / "taken", dirs_exist_ok=True)
    return subject.result(out)


def _compare(subject: Subject, out: pathlib.Path, expected: Result) -> list[str]:
    try:
        actual = _result(subject, out)
    except Exception as error:  # Reading damaged files can raise any error.
        return [f"unreadable ({type(error).__name__}: {error})"[:300]]
    names = expected.keys() | actual.keys()
    return sorted(name for name in names if expected.get(name) != actual.get(name))
