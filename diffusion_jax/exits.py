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
INTERRUPTED = 130
"""Ctrl-C (SIGINT) ended the command. A training run has saved a checkpoint."""
STOPPED = (129, INTERRUPTED, PREEMPTED)
"""The codes after SIGHUP (a lost connection), Ctrl-C and SIGTERM: 128 plus the signal's number."""


class Busy(ValueError):
    """Error raised if another process holds a workdir or port that this process needs."""
