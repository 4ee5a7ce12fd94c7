"""A watchdog that ends a process whose training step hangs, and prints all threads' stacks."""

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator

_STDERR = 2


class Watchdog:
    """A timer that ends this process with code 1 if `beat` is not called for `seconds` seconds.

    The timer runs outside of Python, so it also fires while a library call holds the interpreter
    lock. It prints the stacks of all threads. If Python can run, it prints an error line up to two
    seconds earlier. Use one watchdog per process, and call `close` when done.
    """

    def __init__(self, seconds: float | int, advice: Callable[[], str] = lambda: "Start it again.") -> None:
        """Create a watchdog. The first `beat` starts it. The error line ends with `advice()`."""
        self._seconds, self._advice = seconds, advice
        self._before = min(2, 0.1 * seconds)  # Seconds from the error line to the end.
        self._due: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._speak, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Restart the clock."""
        # Pass a file descriptor: notebooks and tests replace sys.stderr by an object without one.
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=_STDERR)
        self._due = time.monotonic() + self._seconds - self._before

    def close(self) -> None:
        """Stop the watchdog. It cannot be started again."""
        self._closed.set()
        self._stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside this context. Restart it afterwards."""
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
                    f"error: no step has ended for {self._seconds - self._before:g} s. After "
                    f"{self._seconds:g} s (step_timeout), this process prints the stacks of its "
                    f"threads and exits. {self._advice()}"
                )
                print(line, file=sys.stderr, flush=True)
                return
