"""Disturb a process without signals: no memory, another clock or folder, other processes."""

import contextlib
import functools
import importlib
import os
import pathlib
import random
import resource
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

OOM, NO_MEMORY = "OOM kill", "no more address space"
TWINS, TAKEOVER = "two starts", "takeover of a frozen run"
PROGRAMS, ERRORS = "two runs fill a cache of programs", "a tenth of requests fail"
CLOCKS = {"clock set back": -1, "clock set forward": 1}
PLACES = ("SIGKILL in a folder with spaces and emoji", "SIGKILL in a folder of 200 letters", "SIGKILL in a link")
PHASES = {
    f"SIGKILL in a {what}": names
    for what, names in {
        "compilation": ("diffusion_jax.train.loop", "make_step"),
        "save": ("diffusion_jax.train.checkpoint", "Checkpointer", "save"),
        "drawing": ("diffusion_jax.train.measuring", "Measurements", "_draw_examples"),
    }.items()
}
"""Functions (module, ..., name) at whose end a process is killed. A save goes on in a thread."""
_CGROUPS = pathlib.Path("/sys/fs/cgroup/memory")
_ROOM = 2**20  # Bytes that a process may still allocate.
_DAY = 86_400.0


def can_limit() -> bool:
    """Return whether a memory cgroup can be created, which needs root."""
    try:
        with _cgroup():
            return True
    except OSError:
        return False


def kill_for_memory(job: Any) -> bool:
    """Let the kernel kill a job's process that runs out of memory. Return whether it did."""
    pid = job.processes[-1].pid
    with contextlib.suppress(OSError), _cgroup() as group:
        (group / "cgroup.procs").write_text(str(pid))
        # Earlier pages of the process do not count. It is killed when it allocates more than this.
        (group / "memory.limit_in_bytes").write_text(str(_ROOM))
        job.end(60)
        events = (group / "memory.oom_control").read_text()
        return "oom_kill 0" not in events and job.codes()[-1] == -signal.SIGKILL
    return False


def take_address_space(job: Any) -> None:
    """Limit a job's address space to slightly more than it uses, like `ulimit -v`."""
    pid = job.processes[-1].pid
    with contextlib.suppress(OSError):  # It has ended.
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        used = 1024 * int(status.partition("VmSize:")[2].split()[0])
        resource.prlimit(pid, resource.RLIMIT_AS, (used + _ROOM, used + _ROOM))


def set_clock(seconds: float, days: float) -> None:
    """Set this process's clock forward by some days (back if negative), after some seconds."""
    real, since = time.time, time.monotonic()
    time.time = lambda: real() + days * _DAY * (time.monotonic() - since > seconds)


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process."""
    os.environ.update(variables)


def die_after(module: str, *names: str) -> None:
    """Let this process kill itself when it has called a function, which has these names."""
    owner: Any = functools.reduce(getattr, names[:-1], importlib.import_module(module))
    function = getattr(owner, names[-1])

    def dying(*arguments, **options):
        function(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, names[-1], dying)


def place(out: pathlib.Path, fault: str) -> pathlib.Path:
    """Return the folder in which a command writes under one of PLACES; otherwise `out`."""
    if fault not in PLACES:
        return out
    long = f"{out.name} ".ljust(200, "x")
    name = (f"{out.name} a  fox \N{FOX FACE} \u00fc", long, f"{out.name} link")[PLACES.index(fault)]
    if fault == PLACES[2]:
        out.mkdir(parents=True)
        out.with_name(name).symlink_to(out)
    return out.with_name(name)


def another_host() -> None:
    """Make this process look like one on another machine, with a short timeout for locks."""
    from diffusion_jax.files import folder_lock

    folder_lock._machine = lambda: "another machine"
    folder_lock.FolderLock.__init__ = functools.partialmethod(folder_lock.FolderLock.__init__, stale=3.0)  # pyright: ignore[reportAttributeAccessIssue]


def chained(*calls: Any) -> Any:
    """Return a function that makes all calls that are not None."""
    return functools.partial(_call, [call for call in calls if call])


def freeze(job: Any) -> None:
    """Stop a job's process, like on a suspended machine."""
    job.send(signal.SIGSTOP)


def thaw(job: Any) -> None:
    """Continue a job's process. It ends when it notices that another process took over."""
    job.send(signal.SIGCONT)
    job.end(120)


def moment(rng: random.Random, seconds: float) -> float:
    """Return a random moment of a run that takes `seconds`."""
    return rng.uniform(0.1, 1.0) * seconds


def _call(calls: list[Any]) -> None:
    for call in calls:
        call()


@contextlib.contextmanager
def _cgroup() -> Iterator[pathlib.Path]:
    """Create a memory cgroup, which is removed at the end of the context."""
    group = _CGROUPS / f"campaign-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(2**40))
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (_CGROUPS / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            os.rmdir(group)
