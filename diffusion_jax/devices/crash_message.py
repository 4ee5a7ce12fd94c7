"""Print a message when this process dies, even if no Python code can run any more.

When another process of the job has died, JAX aborts this process from C++, and no more Python code
runs. So this module starts a small child process. The child waits until its standard input closes,
and then prints the latest message.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

_CHILD = """
import sys
line = b""
for line in sys.stdin.buffer:
    pass
sys.stderr.buffer.write(line.lstrip())
"""


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_EXIT = _Handler(lambda number: os._exit(1))


def exit_at_abort() -> None:
    """Make this process exit with code 1 instead of dying by SIGABRT when a library calls abort().

    This needs a handler called from C. Python would run a Python handler only after its own C
    handler has returned, but abort() ends the process as soon as that happens.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, _Handler], ctypes.c_void_p
    libc.signal(signal.SIGABRT, _EXIT)


class CrashMessage:
    """A message that is printed to stderr if this process ends without calling `cancel`."""

    def __init__(self, line: str) -> None:
        # In a new session, the child does not receive Ctrl-C.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.replace(line)

    def replace(self, line: str) -> None:
        """Replace the message."""
        assert self._child.stdin
        with contextlib.suppress(OSError):  # The child was killed, so the message is lost.
            self._child.stdin.write(line.encode() + b"\n")
            self._child.stdin.flush()

    def cancel(self) -> None:
        """Discard the message, and end the child process that would print it."""
        self.replace("")
        with contextlib.suppress(OSError):
            self._child.communicate()
