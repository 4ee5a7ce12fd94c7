"""Real processes share the training of a toy: what ends one ends all, and what is saved is one.

A run goes in two processes until one is killed, until one hangs, until one is told to stop, and in
four to the end; then all over again in one.
"""

import json
import os
import re
import signal
import socket

import jax
import numpy as np
import pytest

from diffusion_jax import exits, runs
from diffusion_jax.logs import run_log
from diffusion_jax.weights import restore
from tests.diffusion_jax import toy
from tests.imagen_jax import commands
from tests.processes import PATIENCE, Group, free_port, last_step


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


def stop_one(workdir, number, which=1):
    """Send a signal to one process; return the other's exit code and the group."""
    group = train(workdir, 2, "--step_timeout=20")
    group.wait_for_step(workdir, 3 + last_step(workdir))
    os.kill(group.processes[which].pid, number)
    survivor = group.processes[1 - which]
    survivor.join(PATIENCE)
    group.processes[which].kill()
    return survivor.exitcode, group


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


def check_farewell(group, process, how):
    """Wait for the one line with which a process ends, and check it."""
    expected = (
        rf"error: process {process} on {socket.gethostname()} has ended {how}. The same command, "
        r"in each process, continues from the last checkpoint in .+/checkpoints: .+"
    )
    start = f"error: process {process} on"
    group.wait_for(lambda said: start in said)
    lines = [line for line in group.said().splitlines() if line.startswith(start)]
    assert len(lines) == 1 and re.fullmatch(expected, lines[0]), group.said()


ABRUPTLY = "abruptly, usually because another process died"


@pytest.mark.slow
def test_one_that_is_killed_ends_the_other_which_says_so(killed):
    code, group = killed
    assert code == 1, group.said()
    assert "Traceback" not in group.said()
    check_farewell(group, 0, r"because it lost another process \(.*[Gg]loo.*\)")
    check_farewell(group, 1, ABRUPTLY)


@pytest.mark.slow
def test_the_first_that_is_killed_ends_the_other_which_says_so(tmp_path):
    code, group = stop_one(tmp_path, signal.SIGKILL, which=0)
    assert code == 1, group.said()  # Also if JAX aborts before a collective operation fails.
    reason = rf"(because it lost another process \(.*Gloo.*\)|{ABRUPTLY})"
    check_farewell(group, 1, reason)


@pytest.mark.slow
def test_one_that_hangs_ends_the_other_with_its_stacks(hung):
    code, group = hung
    said = group.said()
    assert code == 1, said
    assert "Timeout (0:00:20)!" in said and "diffusion_jax/train/loop.py" in said
    expected = (
        r"^error: no step has ended for 18 s. After 20 s \(step_timeout\), this process prints the "
        r"stacks of its threads and exits. The same command, in each process, "
    )
    assert re.search(expected, said, re.MULTILINE), said
    check_farewell(group, 0, ABRUPTLY)


@pytest.mark.slow
def test_one_that_is_told_to_stop_stops_all_at_the_same_saved_step(told):
    codes, saved, last = told
    assert codes == [143, 143]
    assert saved == last


@pytest.mark.slow
def test_four_go_on_from_there_and_the_first_says_who_they_are(told, four, workdir):
    codes, said = four
    assert codes == [0] * 4, said
    assert "has ended" not in said
    runs = json.loads((workdir / run_log.MANIFEST).read_text())["runs"]
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
    expected, actual = (
        run_log.read_metrics(path / run_log.METRICS) for path in (tmp_path, workdir)
    )
    for name in ("step", "loss", "grad_norm"):
        columns = [[line[name] for line in lines] for lines in (actual, expected)]
        # Sums over the batch in another order; Adam divides by the gradient's size.
        np.testing.assert_allclose(*columns, rtol=1e-4)
    snapshots = [path / restore.SNAPSHOTS for path in (workdir, tmp_path)]
    steps = [restore.steps(folder) for folder in snapshots]
    assert steps[0] == steps[1] == sorted({*range(2, steps[0][-1] + 1, 2), last_step(workdir)})
    shapes = jax.eval_shape(toy.init, jax.random.key(0))
    averages = [restore.load_params(folder, shapes, "0.1") for folder in snapshots]
    close = lambda *leaves: np.testing.assert_allclose(*leaves, rtol=0, atol=2e-3)  # float16.
    jax.tree.map(close, *averages)


def refused(tmp_path, *told, code=exits.REFUSED):
    """What processes say that are told (number, count, address) each; all must end with `code`."""
    processes, outputs = [], []
    for i, (number, count, address) in enumerate(told):
        outputs.append((tmp_path / f"{i}.out", tmp_path / f"{i}.err"))
        run = (f"--workdir={tmp_path}", "--steps=1", "--join_timeout=200")
        who = (f"--process_id={number}", f"--num_processes={count}", f"--coordinator={address}")
        name = "tests.diffusion_jax.toy_train"
        processes.append(commands.start(name, *run, *who, devices=1, outputs=outputs[-1]))
    for process in processes:
        process.join(PATIENCE)
        process.kill()
    said = [err.read_text() for _, err in outputs]
    assert [process.exitcode for process in processes] == [code] * len(told), said
    return said


@pytest.mark.slow
def test_other_numbers_of_processes_are_refused_in_both(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    for said in refused(tmp_path, (0, 2, address), (1, 3, address)):
        assert "error: num_processes is 2 in process 0, 3 in process 1: start all processes" in said


@pytest.mark.slow
def test_a_port_of_another_program_may_be_free_later(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        (said,) = refused(tmp_path, (0, 2, address), code=exits.BUSY)
    assert f"error: process 0 cannot listen at {address} on {socket.gethostname()} (" in said
    assert "another program or an earlier run holds the port; wait until it ends, or choose" in said


@pytest.mark.slow
def test_a_process_that_waits_in_vain_says_for_whom_and_ends(tmp_path):
    run = (f"--workdir={tmp_path}", "--steps=1", "--join_timeout=3")
    group = Group(tmp_path, 2, "tests.diffusion_jax.toy_train", *run, only=1)
    assert group.end() == [1]
    said = group.said()
    assert "error: process 1 waited 3 s for all 2 processes to join at 127.0.0.1:" in said
    assert "or wait longer with --join_timeout" in said
