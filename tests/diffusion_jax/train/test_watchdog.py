"""A process that hangs ends by itself and says where; one that does not is left alone."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

START = "import time\nfrom diffusion_jax.train.watchdog import Watchdog\nwatchdog = Watchdog({})\n"


def run(code, seconds=0.5):
    command = [sys.executable, "-c", START.format(seconds) + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_hang_ends_the_process_with_the_stacks_of_all_threads():
    code = """
import threading

def where_it_hangs(): time.sleep(1000)
def another(): time.sleep(1000)

threading.Thread(target=another, daemon=True).start()
watchdog.beat()
where_it_hangs()
"""
    ended = run(code)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Timeout (0:00:00.500000)!" in ended.stderr
    assert "in where_it_hangs" in ended.stderr and "in another" in ended.stderr


def test_a_call_that_lets_no_other_thread_run_ends_too():
    ended = run("watchdog.beat()\nimport re\nre.match('(a*)*b', 40 * 'a')")
    assert ended.returncode == 1 and "in match" in ended.stderr


def test_a_process_that_beats_or_pauses_goes_on():
    """One may be held up for two seconds of its three at any moment."""
    rests = ("time.sleep(1); watchdog.beat()\n" * 4, "watchdog.close(); time.sleep(4)",
             "\nwith watchdog.paused(): time.sleep(4)\n")  # fmt: skip
    with ThreadPoolExecutor() as pool:
        codes = (f"watchdog.beat(); {rest}\nprint('done', end='')" for rest in rests)
        for ended in pool.map(lambda code: run(code, seconds=3), codes):
            assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done", "")


def test_the_clock_starts_again_after_a_pause():
    ended = run("watchdog.beat()\nwith watchdog.paused(): pass\ntime.sleep(1000)")
    assert ended.returncode == 1
