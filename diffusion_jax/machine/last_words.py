"""A message that is printed even if a process dies outside Python.

When another process has died, JAX aborts this one from C++, and no more Python code runs. So a
small child process waits for the end of its standard input, and then prints the latest message.
"""

import contextlib
import subprocess
import sys

_CHILD = """
import sys
line = b""
for line in sys.stdin.buffer:
    pass
sys.stderr.buffer.write(line.lstrip())
"""


class LastWords:
    """A line for stderr, printed if this process ends without calling `cancel`."""

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
        """Print this line instead."""
        assert self._child.stdin
        with contextlib.suppress(OSError):  # The child was killed: the message is lost.
            self._child.stdin.write(line.encode() + b"\n")
            self._child.stdin.flush()

    def cancel(self) -> None:
        """Print nothing, and end the child."""
        self.replace("")
        with contextlib.suppress(OSError):
            self._child.communicate()
