"""Fixtures: tiny runs, trained with and without interruptions."""

import functools
import json
import pathlib
import shutil
import signal
import time
from typing import NamedTuple

import pytest

from diffusion_jax import runs
from diffusion_jax.logs import run_log
from diffusion_jax.weights import restore
from imagen_jax.weights import nemo
from tests import shared
from tests.imagen_jax import commands

# The schedule is constant, so that a step does not depend on the total number of steps.
TINY = (
    "--config=configs/quickstart.py",
    *commands.config_flags(
        "unet.embed_dim=32 unet.head_dim=32 unet.cond_dim=32 text.width=32 batch_size=8 optimizer.schedule=constant "
        "optimizer.warmup=3 sampler.steps=2 sample_every=0 log_every=1"
    ),
)
STDERR = "stderr.txt"
SAMPLES = "taken"


class Interrupted(NamedTuple):
    """A run in four processes: up to step 4, until SIGTERM, until SIGKILL, up to `steps`."""

    workdir: pathlib.Path
    steps: int
    exit_codes: list[int | None]
    last_whole: list[int]
    """The last whole checkpoint after each process."""
    last_line: list[int]
    """The step of the last line in the metrics after each process."""


@pytest.fixture(scope="session", autouse=True)
def _shapes_traced_once():
    """Trace the shapes of each network once, which takes most of the time to read tiny weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nemo, "abstract_params", functools.cache(nemo.abstract_params))
        yield


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory):
    """An interrupted run that all workers share. Tests may read or copy it."""
    folder = shared.folder(tmp_path_factory, "interrupted", _interrupt)
    ended = json.loads((folder / "ended.json").read_text())
    return Interrupted(folder / "run", *ended)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory, interrupted):
    """The workdir of the same run without interruption. Tests may only read it."""
    fill = functools.partial(_train_at_once, steps=interrupted.steps)
    return shared.folder(tmp_path_factory, "uninterrupted", fill)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The workdir of a run of twelve steps, copied for this worker."""
    fill = functools.partial(_train_at_once, steps=12)
    folder = shared.folder(tmp_path_factory, "trained", fill)
    return shutil.copytree(folder, tmp_path_factory.mktemp("trained") / "run")


def _interrupt(folder):
    workdir = folder / "run"
    workdir.mkdir()
    codes, whole, lines = [], [], []

    def record(process):
        process.join()
        codes.append(process.exitcode)
        whole.append(restore.steps(workdir / runs.CHECKPOINTS)[-1])
        lines.append(run_log.read_metrics(workdir / run_log.METRICS)[-1]["step"])

    record(_train(workdir, 4))
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = _train(workdir, 10**6)
        _wait_for_step(workdir, lines[-1] + 5, process)
        process.terminate() if number == signal.SIGTERM else process.kill()
        record(process)
    steps = lines[-1] + 3
    record(_train(workdir, steps))
    (folder / "ended.json").write_text(json.dumps([steps, codes, whole, lines]))


def _train_at_once(workdir, steps):
    process = _train(workdir, steps, save_every=1000)
    process.join()
    assert process.exitcode == 0, (workdir / STDERR).read_text()


def _train(workdir, steps, save_every=2):
    arguments = [*TINY, f"--workdir={workdir}"]
    arguments += [f"--config.steps={steps}", f"--config.save_every={save_every}"]
    outputs = (workdir / "stdout.txt", workdir / STDERR)
    samples = workdir / SAMPLES
    samples.mkdir(exist_ok=True)
    before = functools.partial(_prepare, samples, rehearse=steps == 4)
    return commands.start("train", *arguments, devices=1, outputs=outputs, before=before)


def _prepare(samples, rehearse):
    """Record the samples that this process trains on, and skip its rehearsal unless `rehearse`."""
    if not rehearse:
        commands.skip_rehearsal()
    commands.record_samples(samples)


def _wait_for_step(workdir, step, process):
    """Wait until the metrics contain this step. Fails if the process ends before."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        path = workdir / run_log.METRICS
        lines = run_log.read_metrics(path) if path.exists() else []
        if lines and lines[-1]["step"] >= step:
            return
        assert process.is_alive(), (workdir / STDERR).read_text()
        time.sleep(0.01)
    raise AssertionError(f"no step {step}: {json.dumps(lines[-1:])}")
