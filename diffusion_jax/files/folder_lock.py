"""Lock a folder on any shared file system for one writer, with a heartbeat.

The lock is a file writer-N.json. If there are several, the one with the highest N is valid. The
file is created atomically and names the process that wrote it. The writer rewrites the file every
few seconds (the heartbeat). A process that replaces a dead writer creates the file number N + 1,
which only one process can do. A writer on this machine is dead if its process has ended. A writer
on another machine counts as dead if a process watches the lock file for a minute and sees no
heartbeat. So the clocks of different machines are never compared. If a writer was suspended and
replaced, it notices this at its next heartbeat and ends its process, even if its successor has
already ended and removed all locks.
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

from diffusion_jax import files
from diffusion_jax.exits import Busy

BEAT = 10.0
"""Seconds between heartbeats."""
STALE = 60.0
"""Seconds without a heartbeat after which a writer on another machine counts as dead."""
_held: dict[pathlib.Path, "FolderLock"] = {}


class FolderLock:
    """A context manager that lets only this process write into a folder."""

    def __init__(self, folder: files.Path, beat: float = BEAT, stale: float = STALE) -> None:
        """Prepare to lock `folder`. The lock is renewed every `beat` seconds.

        Other processes take over a lock that was not renewed for `stale` seconds.
        """
        self._folder, self._beat, self._stale = files.path(folder), beat, stale
        self._identity = {
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

    def __enter__(self) -> "FolderLock":
        """Create the folder if missing, and lock it. Raises Busy if another process holds it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while (lock := _highest(self._folder))[1].get("nonce") != self._identity["nonce"]:
            number, holder = lock
            if number and not self._is_gone(number, holder):
                raise Busy(_refusal(self._folder, holder))
            self._number = number + 1
            files.write_new(_path(self._folder, number + 1), json.dumps(self._identity, indent=1))
        for number in _numbers(self._folder):
            if number < self._number:
                _path(self._folder, number).unlink(missing_ok=True)
        self._thread.start()
        _held[self._folder] = self
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the heartbeat and remove the lock."""
        _held.pop(self._folder, None)
        self._ended.set()
        self._thread.join()  # A heartbeat under way would bring the file back.
        with contextlib.suppress(OSError):  # A lock left behind is stale once this process ends.
            if _read(_path(self._folder, self._number)).get("nonce") == self._identity["nonce"]:
                _path(self._folder, self._number).unlink()

    def _is_gone(self, number: int, holder: dict[str, Any]) -> bool:
        """Return whether the writer `holder`, which created lock file `number`, is dead.

        For a writer on another machine, this waits up to `stale` seconds for a heartbeat.
        """
        if holder.get("machine") == self._identity["machine"]:
            return _has_ended(holder)
        path, deadline = _path(self._folder, number), time.monotonic() + self._stale
        if not path.exists():
            return True
        logging.info(
            "%s is locked by a process on %s: waiting up to %g s for its heartbeat",
            self._folder,
            holder.get("host"),
            self._stale,
        )
        while time.monotonic() < deadline:
            if not path.exists():
                return True
            if _read(path) != holder:
                return False
            time.sleep(min(1, self._stale / 20))
        logging.warning("taking over %s: the process that locked it has no heartbeat", self._folder)
        return True

    def _keep(self) -> None:
        """Write heartbeats until the lock is released. End this process if the lock is lost.

        The first heartbeat comes early, in case two processes started at the same time.
        """
        beats, missing, soon = 0, 0, min(1, self._beat)
        pause = soon
        while not self._ended.wait(pause):
            beats, pause = beats + 1, self._beat
            try:
                number, holder = _highest(self._folder)
                nonce = holder.get("nonce", self._identity["nonce"])
                if number > self._number or nonce != self._identity["nonce"]:
                    self._end(
                        f"{_refusal(self._folder, holder)}; that process took over because this "
                        "process had no heartbeat"
                    )
                missing = 0 if number else missing + 1
                if missing == 2:  # Not at once: this process may be releasing the folder.
                    self._end(
                        f"{_path(self._folder, self._number)} is gone: another process took over "
                        "while this process had no heartbeat, and then released the lock"
                    )
                if missing:
                    pause = soon
                    continue
                beat = json.dumps(self._identity | {"beats": beats}, indent=1)
                files.write_whole(_path(self._folder, self._number), beat)
            except OSError as error:  # A full disk or a lost network may be temporary.
                logging.warning("cannot write the heartbeat in %s: %s", self._folder, error)

    def _end(self, reason: str) -> None:
        print(f"error: {reason}, so this process ends", file=sys.stderr, flush=True)
        os._exit(1)


def release(folder: files.Path) -> None:
    """Remove the lock of a folder if this process holds it.

    Call this before os._exit, which ends the process without leaving the FolderLock's context.
    """
    if lock := _held.get(files.path(folder)):
        lock.__exit__()


def refusal(folder: files.Path) -> str | None:
    """Return the error message that a second writer would get, or None if the folder is unlocked.

    A writer on another machine counts as alive, because this function does not wait for heartbeats.
    """
    folder = files.path(folder)
    number, holder = _highest(folder) if folder.is_dir() else (0, {})
    gone = holder.get("machine") == _machine() and _has_ended(holder)
    return _refusal(folder, holder) if number and not gone else None


def _has_ended(holder: dict[str, Any]) -> bool:
    """Return whether a writer on this machine has ended.

    A lock of this process itself counts as ended, because it is from an earlier FolderLock.
    """
    started = _started(holder.get("pid"))
    return holder.get("pid") == os.getpid() or started is None or started != holder.get("started")


def _refusal(folder: pathlib.Path, holder: dict[str, Any]) -> str:
    return (
        f"{folder} is being written by process {holder.get('pid')} on {holder.get('host')} since "
        f"{holder.get('since')} ({holder.get('command')}): wait until it ends, stop it, or choose "
        "another folder"
    )


def _highest(folder: pathlib.Path) -> tuple[int, dict[str, Any]]:
    """Return the number and the content of the current lock, or (0, {}) if there is none."""
    number = max(_numbers(folder), default=0)
    return number, _read(_path(folder, number)) if number else {}


def _numbers(folder: pathlib.Path) -> list[int]:
    names = [re.fullmatch(r"writer-(\d+)\.json", path.name) for path in folder.iterdir()]
    return [int(name[1]) for name in names if name]


def _path(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"writer-{number}.json"


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _machine() -> str:
    """Return a string that identifies this machine's boot and the PID namespace of this process.

    Process ids are unique within a PID namespace. Outside Linux, the string is the host name.
    """
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # Not Linux.
        return socket.gethostname()


def _started(pid: Any) -> str | None:
    """Return a string that identifies a process's start on this machine, or None if it has ended.

    Outside Linux, the string is "" for every running process.
    """
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
