"""Define exit codes, which tell a launcher whether to start a run again."""

import contextlib
import os
import select
import sys
from collections.abc import Iterator

REFUSED = 2
"""Invalid input: the same command would fail again."""
BUSY = 75
"""Another process holds the workdir or the port; a later attempt may succeed.

The value is EX_TEMPFAIL of sysexits.h. Launchers count an exit with this code as a crash, and
restart the run at most job.restarts times.
"""
PREEMPTED = 143
"""SIGTERM ended the run after it saved a checkpoint. A launcher should start the run again."""
INTERRUPTED = 130
"""Ctrl-C (SIGINT) ended the command. A training run has saved a checkpoint."""
UNREAD = 141
"""The reader of the output, such as `head`, ended first: 128 plus the number of SIGPIPE."""
STOPPED = (129, INTERRUPTED, PREEMPTED)
"""The codes after SIGHUP (a lost connection), Ctrl-C and SIGTERM: 128 plus the signal's number."""


class Busy(ValueError):
    """Error raised if another process holds a workdir or port that this process needs."""


@contextlib.contextmanager
def unless_unread() -> Iterator[None]:
    """End this process without a message when nobody reads its output any more, as after `| head`.

    If this is noticed in the middle of the output, the exit code is UNREAD.
    """
    try:
        yield
    except BrokenPipeError:
        if not is_unread():
            raise
        sys.exit(UNREAD)
    finally:
        with contextlib.suppress(BrokenPipeError):
            print(end="", flush=True)
        if is_unread():  # Python writes what is left once more at exit, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def is_unread() -> bool:
    """Return whether stdout is a pipe whose reader has ended."""
    poll = select.poll()
    poll.register(1, 0)  # Errors are always reported.
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
