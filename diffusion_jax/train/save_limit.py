"""Limit the time that saving a checkpoint takes, and explain failed saves.

Without a limit, a save would wait forever if memory runs out.
"""

import os
import re
import resource
import threading
import time

_STDERR = 2
FLOOR = 120.0
"""The shortest time limit of a save, in seconds. A network file system may stall for a while."""
_RATE = 10e6  # The first save must write at least this many bytes per second.
_REFUSED = "access key|credentials|denied|expired|forbidden|signature|token|unauthorized"
"""A pattern of what stores say if they refuse access."""
_TIMES = 10  # A later save may take this many times as long as the longest one before it.


class SaveLimit:
    """A timer that ends this process with code 1 if a save takes too long. Call `close` when done.

    The limit of the first save depends on its size. The limit of a later save depends on the
    longest save so far. The thread that watches the time starts with the timer, because a process
    that has run out of memory cannot start threads.
    """

    def __init__(self) -> None:
        self._longest = 0.0
        self.seconds = FLOOR
        """The time limit of the current save."""
        self._started, self._due, self._message = 0.0, float("inf"), b""
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="save limit", daemon=True).start()

    def start(self, size: int, name: str, last: str) -> None:
        """Start the clock of a save.

        If the save takes longer than its limit, the process prints an error and ends.

        Args:
            size: The number of bytes to write, which sets the limit of the first save.
            name: What is saved, for the error, such as "the checkpoint of step 1000".
            last: A sentence about the newest complete checkpoint, for the error.
        """
        self.seconds = FLOOR + (_TIMES * self._longest or size / _RATE)
        self._message = (
            f"error: {name} was not written within {self.seconds:.0f} s (is there enough memory, "
            f"and does the disk answer?), so this process ends. {last}\n"
        ).encode()
        self._started = time.monotonic()
        self._due = self._started + self.seconds

    def stop(self) -> None:
        """Stop the clock at the end of a save."""
        if self._due < float("inf"):
            self._longest = max(self._longest, time.monotonic() - self._started)
        self._due = float("inf")

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(0.5):
            if time.monotonic() > self._due:
                os.write(_STDERR, self._message)  # print() may need memory.
                os._exit(1)


def advice(reason: str) -> str:
    """Return a question that names the likely cause of a failed save, such as "is the disk full?".

    `reason` is the error message of the save.
    """
    if "Too many open files" in reason:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"is the limit of {allowed} open files too low? raise it with ulimit -n"
    if re.search("memory|new thread", reason, re.IGNORECASE):
        return "is there enough memory?"
    if re.search(_REFUSED, reason, re.IGNORECASE):
        return "have the credentials expired?"
    return "is the disk full?"
