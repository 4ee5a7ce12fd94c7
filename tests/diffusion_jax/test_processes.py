"""Real processes train a toy together: if one ends, all end, with a common checkpoint.

A run uses two processes until one is killed, then until one hangs, then until one gets SIGTERM,
then four processes to the end. A single process repeats all of it.
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
    return Group(workdir / "output", count, "tests.diffusion_jax.toy_train", *run, *more)


@pytest.fixture(scope="module")
def killed(workdir):
    return stop_one(workdir, signal.SIGKILL)


@pytest.fixture(scope="module")
def hung(workdir, killed):
    return stop_one(workdir, signal.SIGSTOP)


def stop_one(workdir, number, which=1):
    """Send a signal to one process. Return the other's exit code and the group."""
    group = train(workdir, 2, "--step_timeout=20")
    group.wait_for_step(workdir, 3 + last_step(workdir))
    os.kill(group.processes[which].pid, number)
    survivor = group.processes[1 - which]
    survivor.join(PATIENCE)
    group.processes[which].kill()
    return survivor.exitcode, group


@pytest.fixture(scope="module")
def stopped(workdir, hung):
    """Return the exit codes, the last checkpoint and the last step in the metrics after SIGTERM."""
    group = train(workdir, 2)
    group.wait_for_step(workdir, 3 + last_step(workdir))
    group.processes[1].terminate()
    codes = group.end()
    return codes, restore.steps(workdir / runs.CHECKPOINTS)[-1], last_step(workdir)


@pytest.fixture(scope="module")
def four(workdir, stopped):
    group = train(workdir, 4, steps=last_step(workdir) + 3)
    return group.end(), group.printed()


def check_farewell(group, process, how):
    """Wait for the last line of a process, and check it."""
    start = f"error: process {process} on"
    end = r"The same command, in each process, continues from the last checkpoint in .+/checkpoints: .+"
    expected = rf"{start} {socket.gethostname()} has ended {how}. {end}"
    group.wait_for(lambda output: start in output)
    lines = [line for line in group.printed().splitlines() if line.startswith(start)]
    assert len(lines) == 1 and re.fullmatch(expected, lines[0]), group.printed()


ABRUPTLY = "abruptly, usually because another process died"


@pytest.mark.slow
def test_if_process_1_is_killed_process_0_ends_with_a_message(killed):
    code, group = killed
    assert code == 1, group.printed()
    assert "Traceback" not in group.printed()
    check_farewell(group, 0, r"because it lost another process \(.*[Gg]loo.*\)")
    check_farewell(group, 1, ABRUPTLY)


@pytest.mark.slow
def test_if_process_0_is_killed_process_1_ends_with_a_message(tmp_path):
    code, group = stop_one(tmp_path, signal.SIGKILL, which=0)
    assert code == 1, group.printed()  # Even if JAX aborts before a collective operation fails.
    reason = rf"(because it lost another process \(.*Gloo.*\)|{ABRUPTLY})"
    check_farewell(group, 1, reason)


@pytest.mark.slow
def test_if_a_process_hangs_the_other_prints_its_stacks_and_ends(hung):
    code, group = hung
    output = group.printed()
    assert code == 1, output
    assert "Timeout (0:00:20)!" in output and "diffusion_jax/train/loop.py" in output
    expected = r"^error: no step has ended for 18 s. After 20 s \(step_timeout\), this process prints .*The same comm"
    assert re.search(expected, output, re.MULTILINE), output
    check_farewell(group, 0, ABRUPTLY)


@pytest.mark.slow
def test_sigterm_to_one_process_stops_all_at_the_same_saved_step(stopped):
    codes, saved, last = stopped
    assert codes == [143, 143]
    assert saved == last


@pytest.mark.slow
def test_four_processes_continue_the_run_and_the_first_lists_them(stopped, four, workdir):
    codes, output = four
    assert codes == [0] * 4, output
    assert "has ended" not in output
    runs = json.loads((workdir / run_log.MANIFEST).read_text())["runs"]
    firsts = [run["first_step"] for run in runs]
    assert len(firsts) == 4 and firsts[0] == 0 and firsts == sorted(firsts)
    assert firsts[3] == stopped[1] and last_step(workdir) == stopped[1] + 3
    assert [run["devices"]["processes"] for run in runs] == [2, 2, 2, 4]
    assert output.count("processes and devices") == 1
    for process in range(4):
        line = rf"^ +{process}  {socket.gethostname()} +1 x cpu \(ids \d+\)$"
        assert re.search(line, output, re.MULTILINE)


@pytest.mark.slow
def test_every_step_of_several_processes_matches_one_process(four, workdir, tmp_path):
    alone = train(tmp_path, 1, steps=last_step(workdir))
    assert alone.end() == [0], alone.printed()
    expected, actual = (run_log.read_metrics(path / run_log.METRICS) for path in (tmp_path, workdir))
    for name in ("step", "loss", "grad_norm"):
        columns = [[line[name] for line in lines] for lines in (actual, expected)]
        # Batch sums are in another order, and Adam divides by the gradient's size.
        np.testing.assert_allclose(*columns, rtol=1e-4)
    snapshots = [path / restore.SNAPSHOTS for path in (workdir, tmp_path)]
    steps = [restore.steps(folder) for folder in snapshots]
    assert steps[0] == steps[1] == sorted({*range(2, steps[0][-1] + 1, 2), last_step(workdir)})
    shapes = jax.eval_shape(toy.init, jax.random.key(0))
    averages = [restore.load_params(folder, shapes, "0.1") for folder in snapshots]
    close = lambda *leaves: np.testing.assert_allclose(*leaves, rtol=0, atol=2e-3)  # float16.
    jax.tree.map(close, *averages)


def refused(tmp_path, *members, code=exits.REFUSED):
    """Start processes with (number, count, address) each, and return their errors."""
    processes, outputs = [], []
    for i, (number, count, address) in enumerate(members):
        outputs.append((tmp_path / f"{i}.out", tmp_path / f"{i}.err"))
        run = (f"--workdir={tmp_path}", "--steps=1", "--join_timeout=200")
        who = (f"--process_id={number}", f"--num_processes={count}", f"--coordinator={address}")
        name = "tests.diffusion_jax.toy_train"
        processes.append(commands.start(name, *run, *who, devices=1, outputs=outputs[-1]))
    for process in processes:
        process.join(PATIENCE)
        process.kill()
    errors = [err.read_text() for _, err in outputs]
    assert [process.exitcode for process in processes] == [code] * len(members), errors
    return errors


@pytest.mark.slow
def test_different_num_processes_are_an_error_in_both_processes(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    for error in refused(tmp_path, (0, 2, address), (1, 3, address)):
        assert "error: num_processes is 2 in process 0, 3 in process 1: start all processes" in error


@pytest.mark.slow
def test_a_port_used_by_another_program_is_an_error_with_exit_code_busy(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        (error,) = refused(tmp_path, (0, 2, address), code=exits.BUSY)
    assert f"error: process 0 cannot listen at {address} on {socket.gethostname()} (" in error
    assert "another program or an earlier run holds the port; wait until it ends, or choose" in error


@pytest.mark.slow
def test_a_process_ends_if_the_others_do_not_join_in_time(tmp_path):
    run = (f"--workdir={tmp_path}", "--steps=1", "--join_timeout=3")
    group = Group(tmp_path, 2, "tests.diffusion_jax.toy_train", *run, only=1)
    assert group.end() == [1]
    output = group.printed()
    assert "error: process 1 waited 3 s for all 2 processes to join at 127.0.0.1:" in output
    assert "or wait longer with --join_timeout" in output
