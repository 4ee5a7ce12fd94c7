"""SIGTERM before the first step ends the process immediately, because nothing must be saved."""

import json
import os
import signal
import time

import jax
import pytest

from diffusion_jax import exits, runs
from diffusion_jax.devices import distributed
from tests.imagen_jax import commands


def hold(folder, work):
    """Hold a run's lock, and do `work` before the first step."""
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    with runs.writing(folder / "run"), distributed.sigterm(lambda: runs.release(folder / "run")):
        (folder / "begun").touch()
        work()


def compile_long():
    """Compile a program for minutes, without running Python."""

    def long(x):
        for i in range(1500):
            x = jax.numpy.sort(jax.numpy.sin(x * i))
        return x

    lowered = jax.jit(long).lower(jax.numpy.ones(16))
    os.write(2, b"compiling\n")
    lowered.compile()


def build_batch():
    """Build a batch in Python for minutes."""
    os.write(2, b"compiling\n")
    return [i for i in range(10**12) if i < 0]


@pytest.mark.parametrize("work", [compile_long, build_batch])
def test_sigterm_before_the_first_step_ends_the_run_immediately(tmp_path, work):
    process = commands.fork(hold, tmp_path, work)
    deadline = time.monotonic() + 120
    errors = lambda: (tmp_path / "stderr").read_text() if (tmp_path / "stderr").exists() else ""
    while "compiling" not in errors():
        assert time.monotonic() < deadline and process.is_alive(), errors()
        time.sleep(0.01)
    assert list((tmp_path / "run").glob("writer-*.json"))
    process.terminate()
    process.join(30)
    assert process.exitcode == exits.PREEMPTED, errors()
    assert "before the first step; the same command starts the run again" in errors()
    assert not list((tmp_path / "run").glob("writer-*.json"))


def test_sigterm_after_the_first_step_requests_a_stop():
    with distributed.sigterm() as stopping:
        assert not stopping(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping(2)


def test_only_the_process_that_holds_a_workdir_releases_its_lock(tmp_path):
    lock = tmp_path / "writer-1.json"
    for holder in ({"pid": os.getpid(), "machine": "another"}, {"pid": 1}):
        lock.write_text(json.dumps(holder))
        runs.release(tmp_path)
        assert lock.exists()
    with runs.writing(tmp_path / "run"):
        runs.release(tmp_path / "run")
        assert not list((tmp_path / "run").glob("writer-*.json"))
