"""Signals that stop training: they save, or end the process if there is nothing to save."""

import json
import os
import signal
import time

import jax
import pytest

from diffusion_jax import cli, runs
from diffusion_jax.devices import stop_signals
from tests.imagen_jax import commands
from tests.processes import PATIENCE

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}
_processes = []


@pytest.fixture(autouse=True)
def no_process_stays(signals):
    """End the processes that a test started: if it failed, they would go on for good."""
    yield
    while _processes:
        _processes.pop().kill()


def hold(folder, work):
    """Hold a run's lock, and do `work`, to which the function should_stop is given."""
    for number, own in commands.HANDLERS.items():
        signal.signal(number, own)
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    release = lambda: runs.release(folder / "run")
    with runs.writing(folder / "run"), stop_signals.stopping(release) as should_stop:
        work(should_stop)


def compile_long(should_stop):
    """Compile a program for minutes, without running Python."""

    def long(x):
        for i in range(1500):
            x = jax.numpy.sort(jax.numpy.sin(x * i))
        return x

    lowered = jax.jit(long).lower(jax.numpy.ones(16))
    os.write(2, b"compiling\n")
    lowered.compile()


def build_batch(should_stop):
    """Build a batch in Python for minutes."""
    os.write(2, b"compiling\n")
    return [i for i in range(10**12) if i < 0]


def save_long(should_stop):
    """Take a step, and then compile for minutes, in place of a save."""
    should_stop(1)
    compile_long(should_stop)


def started(folder, work):
    """Return the process of `hold` once it compiles, and a function that returns its stderr."""
    process = commands.fork(hold, folder, work)
    _processes.append(process)
    path = folder / "stderr"
    text = lambda: path.read_text() if path.exists() else ""
    wait_for(lambda: "compiling" in text(), process, text)
    return process, text


def wait_for(condition, process, text):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline and process.is_alive(), text()
        time.sleep(0.01)


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("work", [compile_long, build_batch])
def test_a_signal_ends_a_run_that_has_nothing_to_save(tmp_path, work, number):
    process, text = started(tmp_path, work)
    assert list((tmp_path / "run").glob("writer-*.json"))
    os.kill(process.pid, number)
    process.join(PATIENCE)
    assert process.exitcode == CODES[number], text()
    assert "before the first step; the same command starts the run again" in text()
    assert not list((tmp_path / "run").glob("writer-*.json"))


def test_a_second_ctrl_c_ends_training_at_once(tmp_path):
    process, text = started(tmp_path, save_long)
    os.kill(process.pid, signal.SIGINT)
    wait_for(lambda: "a second Ctrl-C ends at once" in text(), process, text)
    os.kill(process.pid, signal.SIGINT)
    process.join(PATIENCE)
    assert process.exitcode == 130, text()
    assert text().endswith("the same command continues from the last checkpoint\n")
    assert not list((tmp_path / "run").glob("writer-*.json"))


@pytest.mark.parametrize("number", CODES)
def test_after_the_first_step_a_signal_only_requests_a_stop(number):
    before = [signal.getsignal(number) for number in CODES]
    with stop_signals.stopping() as should_stop:
        assert not should_stop(1)
        os.kill(os.getpid(), number)
        assert should_stop(2)
    assert stop_signals.exit_code() == CODES[number]
    assert [signal.getsignal(number) for number in CODES] == before


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals.stopping() as should_stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not should_stop(1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_in_a_command_prints_one_line_and_exits_with_code_130(capfd, monkeypatch):
    monkeypatch.setattr("sys.argv", ["command"])
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: signal.raise_signal(signal.SIGINT))
    assert ended.value.code == 130
    assert capfd.readouterr().err == "stopped by Ctrl-C\n"


def test_only_the_holder_releases_a_workdir(tmp_path):
    lock = tmp_path / "writer-1.json"
    for holder in ({"pid": os.getpid(), "machine": "another"}, {"pid": 1}):
        lock.write_text(json.dumps(holder))
        runs.release(tmp_path)
        assert lock.exists()
    with runs.writing(tmp_path / "run"):
        runs.release(tmp_path / "run")
        assert not list((tmp_path / "run").glob("writer-*.json"))
