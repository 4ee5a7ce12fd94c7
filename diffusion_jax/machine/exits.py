"""Exit codes, by which a launcher decides whether to start a run again."""

REFUSED = 2
"""Invalid input: the same command would fail again."""
BUSY = 75
"""Another process holds the workdir or the port; a later attempt may succeed.

EX_TEMPFAIL of sysexits.h. Launchers count it as a crash and restart up to job.restarts times."""
PREEMPTED = 143
"""SIGTERM ended the run after saving; it should be started again."""


class Busy(ValueError):
    """Another process holds a workdir or port that this one needs for itself."""
