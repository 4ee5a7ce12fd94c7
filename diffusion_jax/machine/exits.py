"""The exit codes by which a launcher knows whether to start a run again."""

REFUSED = 2
"""Input that cannot be: the same command would be refused again."""
BUSY = 75
"""Another process has what this one needs, maybe one that is about to end: it may be tried again.

EX_TEMPFAIL of sysexits.h; launchers count it as a crash, of which job.restarts are free."""
PREEMPTED = 143
"""SIGTERM ended the run: saved, and to be started again."""


class Busy(ValueError):
    """A folder or a port that this process needs alone is another's now."""
