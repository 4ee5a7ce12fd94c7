"""One writer for a folder, on any file system that hosts share: a lock with a heartbeat.

The lock is a file writer-N.json, of which the one with the highest N holds. It is created whole or
not at all, says which process wrote it, and is written anew every few seconds. Who wants the folder
of a writer that is gone creates N + 1, which one alone can do. Whether a writer is gone is looked
up where it ran on this machine; of another machine its heartbeats are watched for as long as one
may be late, so that no two clocks are compared. A writer that was taken for dead while it slept
finds that out at its next heartbeat, and ends its process.
"""

import contextlib
import datetime
import json
import os
import pathlib
import re
import shlex
import socket
import sys
import threading
import time
import uuid
from typing import Any

from absl import logging

from diffusion_jax.machine import files
from diffusion_jax.machine.exits import Busy

BEAT = 10.0
"""Seconds from one heartbeat to the next."""
STALE = 60.0
"""Seconds without a heartbeat after which a writer of another machine is gone."""


class Writer:
    """A context in which this process alone writes into a folder, which is made if need be."""

    def __init__(self, folder: files.Path, beat: float = BEAT, stale: float = STALE) -> None:
        """Nothing is taken before the context is entered."""
        self._folder, self._beat, self._stale = files.path(folder), beat, stale
        self._said = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "machine": _machine(),
            "nonce": uuid.uuid4().hex,
            "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(shlex.join(sys.orig_argv).split())[:200],
        }
        self._number = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="writer", daemon=True)

    def __enter__(self) -> "Writer":
        """Takes the folder; Busy if another process has it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while (held := _highest(self._folder))[1].get("nonce") != self._said["nonce"]:
            number, holder = held
            if number and not self._is_gone(number, holder):
                raise Busy(_refusal(self._folder, holder))
            self._number = number + 1
            files.write_new(_path(self._folder, number + 1), json.dumps(self._said, indent=1))
        for number in _numbers(self._folder):
            if number < self._number:
                _path(self._folder, number).unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the folder to others."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # It is stale as soon as this process ends.
            if _read(_path(self._folder, self._number)).get("nonce") == self._said["nonce"]:
                _path(self._folder, self._number).unlink()

    def _is_gone(self, number: int, holder: dict[str, Any]) -> bool:
        """Whether a writer has ended; of another machine, after at most `stale` seconds."""
        if holder.get("machine") == self._said["machine"]:
            return _has_ended(holder)
        path, deadline = _path(self._folder, number), time.monotonic() + self._stale
        if not path.exists():
            return True
        logging.info(
            "%s was last written from %s: waiting up to %g s for a sign of it",
            self._folder, holder.get("host"), self._stale,
        )  # fmt: skip
        while time.monotonic() < deadline:
            if not path.exists():
                return True
            if _read(path) != holder:
                return False
            time.sleep(min(1, self._stale / 20))
        logging.warning("%s: taken over from a writer that gave no sign", self._folder)
        return True

    def _keep(self) -> None:
        """Writes the heartbeats, the first one soon, in case that two came at once."""
        beats, pause = 0, min(1, self._beat)
        while not self._ended.wait(pause):
            beats, pause = beats + 1, self._beat
            try:
                number, holder = _highest(self._folder)
                if number > self._number or holder.get("nonce") not in (None, self._said["nonce"]):
                    print(
                        f"error: {_refusal(self._folder, holder)}; it took over as this process "
                        "had given no sign, so this one ends",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip
                    os._exit(1)
                said = json.dumps(self._said | {"beats": beats}, indent=1)
                files.write_whole(_path(self._folder, self._number), said)
            except OSError as error:  # A full disk, a network that is away: it may come back.
                logging.warning("no heartbeat of the writer in %s: %s", self._folder, error)


def refusal(folder: files.Path) -> str | None:
    """What a second writer would be told now; None if there is no lock, or one of a dead process.

    Whether the writer of another machine is alive is not waited for: it counts as alive.
    """
    folder = files.path(folder)
    number, holder = _highest(folder) if folder.is_dir() else (0, {})
    gone = holder.get("machine") == _machine() and _has_ended(holder)
    return _refusal(folder, holder) if number and not gone else None


def _has_ended(holder: dict[str, Any]) -> bool:
    """Whether a writer of this machine has ended, or is this process's own of before."""
    started = _started(holder.get("pid"))
    return holder.get("pid") == os.getpid() or started is None or started != holder.get("started")


def _refusal(folder: pathlib.Path, holder: dict[str, Any]) -> str:
    return (
        f"{folder} is being written by process {holder.get('pid')} on {holder.get('host')} since "
        f"{holder.get('since')} ({holder.get('command')}): wait for its end, end it, or choose "
        "another folder"
    )


def _highest(folder: pathlib.Path) -> tuple[int, dict[str, Any]]:
    """The number of the lock that holds, and what it says; (0, {}) if there is none."""
    number = max(_numbers(folder), default=0)
    return number, _read(_path(folder, number)) if number else {}


def _numbers(folder: pathlib.Path) -> list[int]:
    names = [re.fullmatch(r"writer-(\d+)\.json", path.name) for path in folder.iterdir()]
    return [int(name[1]) for name in names if name]


def _path(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"writer-{number}.json"


def _read(path: pathlib.Path) -> dict[str, Any]:
    """What a lock says; {} if it is gone or cannot be understood."""
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _machine() -> str:
    """Where process ids mean the same: this boot of this machine, and the container."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # No Linux.
        return socket.gethostname()


def _started(pid: Any) -> str | None:
    """When a process of this machine started, in a form to be compared; None if it has ended."""
    try:
        state, *fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    except OSError:
        if pathlib.Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except (OSError, TypeError):
        return None
    return ""
