"""A process that hangs ends by itself and says where; one that does not is left alone."""

import subprocess
import sys
import time

import pytest

START = "import time\nfrom diffusion_jax.train.watchdog import Watchdog\nwatchdog = Watchdog(0.5)\n"


def run(code):
    started = time.monotonic()
    command = [sys.executable, "-c", START + code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended, time.monotonic() - started


def test_a_hang_ends_the_process_with_the_stacks_of_all_threads():
    code = """
import threading

def where_it_hangs(): time.sleep(50)
def another(): time.sleep(50)

threading.Thread(target=another, daemon=True).start()
watchdog.beat()
where_it_hangs()
"""
    ended, seconds = run(code)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Timeout (0:00:00.500000)!" in ended.stderr
    assert "in where_it_hangs" in ended.stderr and "in another" in ended.stderr
    assert seconds < 30


def test_a_call_that_lets_no_other_thread_run_ends_too():
    ended, _ = run("watchdog.beat()\nimport re\nre.match('(a*)*b', 40 * 'a')")
    assert ended.returncode == 1 and "in match" in ended.stderr


@pytest.mark.parametrize(
    "rest", ["time.sleep(0.3); watchdog.beat()\n" * 4, "watchdog.close(); time.sleep(1)",
             "\nwith watchdog.paused(): time.sleep(1)\n"],
)  # fmt: skip
def test_a_process_that_beats_or_pauses_goes_on(rest):
    ended, _ = run(f"watchdog.beat(); {rest}\nprint('done', end='')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done", "")


def test_the_clock_starts_again_after_a_pause():
    ended, _ = run("watchdog.beat()\nwith watchdog.paused(): pass\ntime.sleep(50)")
    assert ended.returncode == 1
