"""Disturb a process without signals: no memory, a clock set back, other processes."""

import contextlib
import functools
import os
import pathlib
import random
import resource
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

OOM, NO_MEMORY, CLOCK = "OOM kill", "no more address space", "clock set back"
TWINS, TAKEOVER = "two starts", "takeover of a frozen run"
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


def set_clock_back(seconds: float) -> None:
    """Set this process's clock back by a day, after a number of seconds."""
    real, since = time.time, time.monotonic()
    time.time = lambda: real() - _DAY * (time.monotonic() - since > seconds)


def another_host() -> None:
    """Make this process look like one on another machine, with a short timeout for locks."""
    from diffusion_jax.files import folder_lock

    folder_lock._machine = lambda: "another machine"
    folder_lock.FolderLock.__init__ = functools.partialmethod(
        folder_lock.FolderLock.__init__, stale=3.0
    )  # pyright: ignore[reportAttributeAccessIssue]


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
