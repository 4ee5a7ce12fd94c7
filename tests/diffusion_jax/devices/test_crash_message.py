"""A crash message is printed after its process ends, however it ends."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from diffusion_jax.devices.crash_message import CrashMessage, exit_at_abort

words = CrashMessage("not this")
words.replace("the same command continues")
{end}
os._exit(3)
"""


@pytest.mark.parametrize(
    ("end", "code", "expected"),
    [
        ("os.abort()", -6, "the same command continues\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "the same command continues\n"),
        ("exit_at_abort(); os.abort()", 1, "the same command continues\n"),
        ("", 3, "the same command continues\n"),
        ("words.cancel()", 3, ""),
    ],
)
def test_the_last_crash_message_is_printed_unless_it_was_cancelled(end, code, expected):
    command = [sys.executable, "-c", SCRIPT.format(end=end)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (code, expected)
