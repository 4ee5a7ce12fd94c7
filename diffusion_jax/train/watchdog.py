"""Watchdog: ends a process whose step hangs, with the stacks of all threads, to see where."""

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator

_STDERR = 2


class Watchdog:
    """Ends this process with code 1 once `seconds` pass without a `beat`; close it when done.

    The clock is not Python's, so that it also runs while a call into a library holds everything.
    Shortly before, where Python still runs, it prints a line. A process has one watchdog.
    """

    def __init__(
        self, seconds: float | int, advice: Callable[[], str] = lambda: "Start it again."
    ) -> None:
        """The clock starts with the first beat. `advice` is what the line says to do."""
        self._seconds, self._advice = seconds, advice
        self._before = min(2, 0.1 * seconds)  # Seconds for the line, which no longer helps after.
        self._due: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._speak, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Restarts the clock: the training is alive."""
        # The descriptor, since notebooks and tests replace sys.stderr by what is no file.
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=_STDERR)
        self._due = time.monotonic() + self._seconds - self._before

    def close(self) -> None:
        """Stops the clock, for good."""
        self._closed.set()
        self._stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside does not count; the clock starts again after it."""
        self._stop()
        yield
        self.beat()

    def _stop(self) -> None:
        self._due = None
        faulthandler.cancel_dump_traceback_later()

    def _speak(self) -> None:
        while not self._closed.wait(min(0.5, self._seconds / 20)):
            if self._due is not None and time.monotonic() > self._due:
                line = (
                    f"error: no step has ended for {self._seconds - self._before:g} s; if none "
                    f"does within {self._seconds:g} s (step_timeout), this process ends, with the "
                    f"stacks of its threads. {self._advice()}"
                )
                print(line, file=sys.stderr, flush=True)
                return
