"""The watchdog ends a hanging process and prints its stacks."""

import faulthandler
import subprocess
import sys

from diffusion_jax.train import watchdog

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


def test_a_hang_that_blocks_all_threads_also_ends_the_process():
    ended = run("watchdog.beat()\nimport re\nre.match('(a*)*b', 40 * 'a')")
    assert ended.returncode == 1 and "in match" in ended.stderr


def test_a_beat_restarts_the_watchdog_and_pausing_or_closing_stops_it(monkeypatch):
    calls = []
    start = lambda seconds, exit, file: calls.append(("start", seconds, exit))
    monkeypatch.setattr(faulthandler, "dump_traceback_later", start)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("stop"))
    dog = watchdog.Watchdog(600)
    assert calls == []
    dog.beat()
    dog.beat()
    with dog.paused():
        assert calls == [("start", 600, True)] * 2 + ["stop"]
    assert calls[3:] == [("start", 600, True)]
    dog.close()
    assert calls[4:] == ["stop"]


def test_the_watchdog_restarts_after_a_pause():
    ended = run("watchdog.beat()\nwith watchdog.paused(): pass\ntime.sleep(1000)")
    assert ended.returncode == 1
