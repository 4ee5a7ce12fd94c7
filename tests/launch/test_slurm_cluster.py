"""The restart policy on a real Slurm: which runs are requeued, and how often."""

import functools
import json
import pathlib
import sys
import time

import jax
import numpy as np
import pytest

from diffusion_jax import exits, runs
from diffusion_jax.files import checksums
from diffusion_jax.logs import run_log
from diffusion_jax.precache import lookup
from diffusion_jax.weights import restore
from imagen_jax import task
from imagen_jax.settings import read_settings
from tests.diffusion_jax.files import test_folder_lock
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import TINY
from tests.launch import slurm_cluster, train_slowly
from tests.launch.launching import BASE, flags, printed

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]
URGENT = "#!/bin/bash\n#SBATCH --partition=urgent --nodes=2 --gpus-per-node=8\nsleep 5\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster.started(folder) as cluster:
        yield cluster


@pytest.fixture
def submit(cluster, tmp_path):
    """Submit a run rendered by launch.slurm with this Python. Returns its number and folder."""

    def run(*arguments, command="tests.launch.slurm_worker", config="", name="run"):
        folder = tmp_path / name
        setup = f"--job.slurm.setup=export PATH={pathlib.Path(sys.executable).parent}:$PATH; cd {ROOT}"
        fields = flags(f"command={command} config={config} workdir={folder} slurm.time=")
        text, _ = printed("slurm", BASE, *fields, setup, *arguments)
        submitted.append(cluster.submit(text))
        return submitted[-1], folder

    submitted = []
    yield run
    for number in submitted:  # Jobs left by a failed test would block the nodes.
        cluster.ask("scancel", "--quiet", number)


def wait_for(path, lines=1, seconds=300):
    """Wait until a file has this number of lines."""
    deadline = time.monotonic() + seconds
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline, f"{path} has not {lines} lines"
        time.sleep(0.2)


@pytest.mark.parametrize("partition", ["graceful", "abrupt"])
def test_a_preempted_run_is_requeued_and_continues(cluster, submit, partition):
    job = flags(f"accelerator=h100:16 slurm.partition={partition} restarts=0")
    number, folder = submit(*job, "--job.env=('TOLD=a \"word\" $HOME',)")
    wait_for(folder / "starts", 2)
    cluster.submit(URGENT)
    cluster.wait(number, "RUNNING", restarts=1)
    wait_for(folder / "starts", 4)
    (folder / "done").touch()
    ended = cluster.wait(number, "COMPLETED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "1")
    starts = (folder / "starts").read_text().splitlines()
    assert sorted(starts) == ['0 a "word" $HOME'] * 2 + ['1 a "word" $HOME'] * 2
    assert not list(folder.glob("crashes-*"))


@pytest.fixture
def train(submit):
    """Submit a tiny training run with extra flags of the job and config fields."""

    def run(*more, name="run", **changes):
        changes = (f"{field}={value}" for field, value in changes.items())
        overrides = (*(o.removeprefix("--config.") for o in TINY[1:]), *changes)
        env = ("JAX_PLATFORMS=cpu", f"XLA_FLAGS={commands.XLA_FLAGS}", f"JAX_COMPILATION_CACHE_DIR={ROOT}/.jax_cache")
        job = ("--job.accelerator=h100:8", f"--job.overrides={overrides}", f"--job.env={env}", *more)
        return submit(*job, command="tests.launch.train_slowly", config="configs/quickstart.py", name=name)

    return run


def test_a_run_is_requeued_until_its_workdir_is_unlocked(cluster, train, tmp_path):
    holder = test_folder_lock.hold(tmp_path / "run")
    number, folder = train("--job.restarts=1000", steps=2)
    cluster.wait(number, "PENDING", "RUNNING", restarts=1)
    test_folder_lock.end(holder)
    ended = cluster.wait(number, "COMPLETED", restarts=1)
    crashes = (folder / f"crashes-{number}").read_text().split()
    assert set(crashes) == {str(exits.BUSY)} and len(crashes) == int(ended["Restarts"])
    assert run_log.read_metrics(folder / run_log.METRICS)[-1]["step"] == 2


def test_preemption_and_a_lost_node_do_not_change_the_trained_weights(cluster, train, tmp_path):
    """One run is preempted before its first save. Another run loses a node between two saves."""
    more = ("--job.restarts=0", "--job.slurm.options=('--exclude=n1',)")
    run = functools.partial(train, *more, steps=400)
    (tmp_path / f"undisturbed{train_slowly.GO}").touch()
    number, undisturbed = run(name="undisturbed", save_every=50)
    cluster.wait(number, "COMPLETED")
    saved = f"{runs.CHECKPOINTS}/50/{checksums.FOLDER}/0-of-1.json"
    for name, save_every, sign, lines, disturb in (
        ("preempted", 1000, run_log.METRICS, 50, lambda: cluster.submit(URGENT)),
        ("lost", 50, saved, 1, lambda: cluster.lose("n2")),
    ):
        number, folder = run(name=name, save_every=save_every)
        wait_for(folder / sign, lines)
        disturb()
        cluster.wait(number, "PENDING", "RUNNING", restarts=1)
        (tmp_path / f"{name}{train_slowly.GO}").touch()
        if name == "lost":
            cluster.start("n2", "slurmd", "-D", "-N", "n2")
        assert int(cluster.wait(number, "COMPLETED", restarts=1)["Restarts"]) == 1
        assert not list(folder.glob("crashes-*"))
        runs_of = json.loads((folder / run_log.MANIFEST).read_text())["runs"]
        assert name == "preempted" or runs_of[1]["first_step"] % 50 == 0
        assert 50 <= runs_of[1]["first_step"] < 400
        last, expected = (run_log.read_metrics(f / run_log.METRICS)[-1] for f in (folder, undisturbed))
        for metric in ("step", "loss", "grad_norm", "param_norm"):
            assert last[metric] == expected[metric]
        jax.tree.map(np.testing.assert_array_equal, parameters(folder), parameters(undisturbed))


def parameters(workdir):
    """Return the parameters and the average of a run's last checkpoint."""
    s = read_settings(runs.load(workdir))
    init = task.make_task(s, lookup.open_encoder(s.text)).init
    shapes = jax.eval_shape(init, jax.random.key(0))
    read = functools.partial(restore.load_params, workdir / runs.CHECKPOINTS, shapes)
    return read("raw", 400), read(str(s.optimizer.ema_decays[0]), 400)


def test_a_run_at_its_time_limit_is_requeued(cluster, submit):
    number, folder = submit(*flags("accelerator=h100:1 slurm.time=1 slurm.grace=30 restarts=0"))
    wait_for(folder / "starts", 2)
    (folder / "done").touch()
    # Slurm's signal can be a minute early, so with a limit of one minute it may come immediately.
    assert int(cluster.wait(number, "COMPLETED")["Restarts"]) >= 1
    assert not list(folder.glob("crashes-*"))


def test_a_crashed_run_is_requeued_up_to_job_restarts_times(cluster, submit):
    number, folder = submit("--job.accelerator=h100:1", "--job.restarts=2", "--job.flags=('--ends=1',)")
    ended = cluster.wait(number, "FAILED", restarts=2)
    assert ended["ExitCode"] == "1:0"
    assert (folder / f"crashes-{number}").read_text() == "1\n1\n1\n"
    assert len((folder / "starts").read_text().splitlines()) == 3


def test_a_run_with_bad_input_is_not_requeued(cluster, submit):
    number, folder = submit("--job.accelerator=h100:16", "--job.flags=('--ends=2',)")
    ended = cluster.wait(number, "FAILED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("2:0", "0")
    assert not list(folder.glob("crashes-*"))


def test_a_cancelled_run_is_not_requeued(cluster, submit):
    number, folder = submit("--job.accelerator=h100:1")
    wait_for(folder / "starts")
    cluster.run("scancel", number)
    assert cluster.wait(number, "CANCELLED", "PENDING")["JobState"] == "CANCELLED"
    time.sleep(10)  # Longer than a requeued job takes to start.
    assert cluster.job(number)["JobState"] == "CANCELLED"
    assert len((folder / "starts").read_text().splitlines()) == 1


def test_a_run_requeued_by_scontrol_continues(cluster, submit):
    number, folder = submit("--job.accelerator=h100:1")
    wait_for(folder / "starts")
    cluster.run("scontrol", "requeue", number)
    wait_for(folder / "starts", 2)
    (folder / "done").touch()
    assert cluster.wait(number, "COMPLETED")["Restarts"] == "1"


def test_options_of_sbatch_reach_slurm(cluster, submit):
    number, folder = submit("--job.accelerator=h100:1", "--job.slurm.options=('--comment=ours', '--exclude=n1')")
    wait_for(folder / "starts")
    job = cluster.job(number)
    assert (job["Comment"], job["NodeList"]) == ("ours", "n2")
    (folder / "done").touch()
    cluster.wait(number, "COMPLETED")
