"""Watchdog: ends a process whose step hangs, with the stacks of all threads, to see where."""

import contextlib
import faulthandler
from collections.abc import Iterator

_STDERR = 2


class Watchdog:
    """Ends this process with code 1 once `seconds` pass without a `beat`; close it when done.

    The clock is not Python's, so that it also runs while a call into a library holds everything.
    A process has one watchdog.
    """

    def __init__(self, seconds: float | int) -> None:
        """The clock starts with the first beat."""
        self._seconds = seconds

    def beat(self) -> None:
        """Restarts the clock: the training is alive."""
        # The descriptor, since notebooks and tests replace sys.stderr by what is no file.
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=_STDERR)

    def close(self) -> None:
        """Stops the clock."""
        faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside does not count; the clock starts again after it."""
        self.close()
        yield
        self.beat()
