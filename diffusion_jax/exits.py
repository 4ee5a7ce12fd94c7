"""Define exit codes, which tell a launcher whether to start a run again."""

REFUSED = 2
"""Invalid input: the same command would fail again."""
BUSY = 75
"""Another process holds the workdir or the port; a later attempt may succeed.

The value is EX_TEMPFAIL of sysexits.h. Launchers count an exit with this code as a crash, and
restart the run at most job.restarts times.
"""
PREEMPTED = 143
"""SIGTERM ended the run after it saved a checkpoint. A launcher should start the run again."""


class Busy(ValueError):
    """Error raised if another process holds a workdir or port that this process needs."""
