"""Real processes share the training of a toy: what ends one ends all, and what is saved is one.

A run goes in two processes until one is killed, until one hangs, until one is told to stop, and in
four to the end; then all over again in one.
"""

import json
import os
import re
import signal
import socket

import numpy as np
import pytest

from diffusion_jax import runs
from diffusion_jax.machine import log
from diffusion_jax.weights import restore
from tests.processes import Group, last_step


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("several")


def train(workdir, count, *more, steps=10**6):
    run = (f"--workdir={workdir}", f"--steps={steps}")
    return Group(workdir / "said", count, "tests.diffusion_jax.toy_train", *run, *more)


@pytest.fixture(scope="module")
def killed(workdir):
    return stop_one(workdir, signal.SIGKILL)


@pytest.fixture(scope="module")
def hung(workdir, killed):
    return stop_one(workdir, signal.SIGSTOP)


def stop_one(workdir, number):
    """(exit code of the first process, what both said) after a signal to the second."""
    group = train(workdir, 2, "--step_timeout=20")
    group.wait_for_step(workdir, 3 + last_step(workdir))
    os.kill(group.processes[1].pid, number)
    code = group.end(of=1)[0]
    group.processes[1].kill()
    return code, group.said()


@pytest.fixture(scope="module")
def told(workdir, hung):
    """(exit codes, the last checkpoint, the last line of the metrics)"""
    group = train(workdir, 2)
    group.wait_for_step(workdir, 3 + last_step(workdir))
    group.processes[1].terminate()
    codes = group.end()
    return codes, restore.steps(workdir / runs.CHECKPOINTS)[-1], last_step(workdir)


@pytest.fixture(scope="module")
def four(workdir, told):
    group = train(workdir, 4, steps=last_step(workdir) + 3)
    return group.end(), group.said()


@pytest.mark.slow
def test_one_that_is_killed_ends_the_other(killed):
    code, said = killed
    assert code not in (0, 2, 143), said


@pytest.mark.slow
def test_one_that_hangs_ends_the_other_with_its_stacks(hung):
    code, said = hung
    assert code == 1, said
    assert "Timeout (0:00:20)!" in said and "diffusion_jax/train/loop.py" in said


@pytest.mark.slow
def test_one_that_is_told_to_stop_stops_all_at_the_same_saved_step(told):
    codes, saved, last = told
    assert codes == [143, 143]
    assert saved == last


@pytest.mark.slow
def test_four_go_on_from_there_and_the_first_says_who_they_are(told, four, workdir):
    codes, said = four
    assert codes == [0] * 4, said
    runs = json.loads((workdir / log.MANIFEST).read_text())["runs"]
    firsts = [run["first_step"] for run in runs]
    assert len(firsts) == 4 and firsts[0] == 0 and firsts == sorted(firsts)
    assert firsts[3] == told[1] and last_step(workdir) == told[1] + 3
    assert [run["devices"]["processes"] for run in runs] == [2, 2, 2, 4]
    assert said.count("processes and devices") == 1
    for process in range(4):
        line = rf"^ +{process}  {socket.gethostname()} +1 x cpu \(ids \d+\)$"
        assert re.search(line, said, re.MULTILINE)


@pytest.mark.slow
def test_every_step_was_that_of_one_process(four, workdir, tmp_path):
    alone = train(tmp_path, 1, steps=last_step(workdir))
    assert alone.end() == [0], alone.said()
    expected, actual = (log.read_metrics(path / log.METRICS) for path in (tmp_path, workdir))
    for name in ("step", "loss", "grad_norm"):
        columns = [[line[name] for line in lines] for lines in (actual, expected)]
        # Sums over the batch in another order; Adam divides by the gradient's size.
        np.testing.assert_allclose(*columns, rtol=1e-4)


@pytest.mark.slow
def test_a_process_that_waits_in_vain_says_for_whom_and_ends(tmp_path):
    run = (f"--workdir={tmp_path}", "--steps=1", "--join_timeout=3")
    group = Group(tmp_path, 2, "tests.diffusion_jax.toy_train", *run, only=1)
    assert group.end() == [1]
    said = group.said()
    assert "error: process 1 waited 3 s for all 2 to meet at 127.0.0.1:" in said
    assert "--join_timeout waits longer" in said
