"""Run the MLPerf benchmark: alternate between training and evaluation, and log both.

A killed run continues where it stopped, because the log and the checkpoints record its progress.
"""

import contextlib
import itertools
import pathlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from ml_collections import ConfigDict

from diffusion_jax import cli, runs
from diffusion_jax.data import pipeline
from diffusion_jax.data.pipeline import Batches
from diffusion_jax.devices import sharding
from diffusion_jax.precache import lookup
from diffusion_jax.task import Task
from diffusion_jax.text import TextEncoder
from diffusion_jax.train import loop, optimizer
from diffusion_jax.train.train_command import check_configs, check_data, exit_if_stopped
from diffusion_jax.weights import restore
from sd_jax import train
from sd_jax.mlperf import benchmark, mllog, rules
from sd_jax.mlperf.benchmark import Evaluate
from sd_jax.mlperf.mllog import Event
from sd_jax.settings import Settings, read_settings
from sd_jax.task import example, make_task
from sd_jax.weights.opened import read_vae

MODES = INLINE, TRAIN, EVALUATE = "inline", "train", "evaluate"


class Submission(NamedTuple):
    """Facts about a submission, which the header of each log states."""

    division: str
    """The division of MLPerf, "closed" or "open"."""
    org: str
    """The name of the submitter."""
    platform: str
    """The name of the computer system."""
    status: str
    """The availability of the system: "onprem", "cloud" or "research"."""
    cache_cleared: bool
    """Whether the system's caches were cleared before the run."""


class OpenRun(NamedTuple):
    """A benchmark run with checked settings, networks and an open log, but without its data."""

    s: Settings
    config: Mapping[str, Any]
    workdir: pathlib.Path
    mode: str
    """What to do: "inline" (train and evaluate in turn), "train" or "evaluate"."""
    mesh: Mesh
    encoder: TextEncoder
    vae_params: Any
    task: Task
    log: Any
    """MLCommons' MLLogger, which appends to the log of the run."""
    events: list[Event]
    """The events that the log held when it was opened; empty for a new run."""

    @property
    def interval(self) -> int:
        """The number of training steps between evaluations."""
        return rules.steps_between(self.s)

    @property
    def last(self) -> int:
        """The training step of the last planned evaluation."""
        return self.s.run.steps // self.interval * self.interval

    def samples(self, step: int) -> int:
        """Return the number of training images up to a step."""
        return step * self.s.run.batch_size

    def at(self, step: int) -> dict[str, Any]:
        """Return the metadata of log events at a step, {"samples_count": training images}."""
        return {"samples_count": self.samples(step)}


def go(
    config: ConfigDict,
    workdir: pathlib.Path,
    mode: str,
    seed: int | None,
    eval_batch: int,
    submission: Submission,
    init_start: int,
) -> str:
    """Start or continue a benchmark run; return the status "running", "success" or "aborted".

    Invalid input ends the process with a one-line message and exit code 2.

    Args:
        config: The whole config.
        workdir: The workdir, shared by all processes.
        mode: "inline" to train and evaluate in turn, "train" only to train, or "evaluate" to
            evaluate the checkpoints.
        seed: The seed. If it is None, a new run draws a random seed, and a continued run keeps its
            seed.
        eval_batch: The number of images that each device draws at once in an evaluation.
        submission: Facts about the submission, for the header of the log.
        init_start: The start time of the command, in milliseconds since the Unix epoch.
    """
    with contextlib.ExitStack() as stack:
        with cli.bad_input(ModuleNotFoundError):
            run = _open(_seeded(config, workdir, seed), workdir, mode, stack)
            evaluate = None if mode == TRAIN else _open_evaluate(run, eval_batch)
        status = mllog.status(run.events)
        return status if status != mllog.RUNNING else _go_on(run, evaluate, submission, init_start)


def _seeded(config: ConfigDict, workdir: pathlib.Path, seed: int | None) -> ConfigDict:
    if seed is not None:
        config.seed = seed
    elif (workdir / runs.CONFIG).exists():
        config.seed = runs.load(workdir)["seed"]
    else:
        drawn = np.uint32(secrets.randbelow(2**31))
        config.seed = int(multihost_utils.broadcast_one_to_all(drawn))
    return config


def _open(config: ConfigDict, workdir: pathlib.Path, mode: str, stack: contextlib.ExitStack) -> OpenRun:
    """Open a benchmark run, and lock its workdir until `stack` closes.

    Raises ValueError or OSError if the config, a file or the workdir is invalid.
    """
    s = read_settings(config.to_dict())
    check_configs(config.to_dict())
    rules.check(s)
    optimizer.check_dtype("unet", s.unet)
    for departure in rules.departures(s):
        logging.warning("not allowed in the closed division: %s", departure)
    mesh = sharding.make_mesh(*s.mesh)
    sharding.check_batch(s.run.batch_size, s.optimizer.micro_batch, mesh)
    encoder, vae_params = lookup.open_encoder(s.text), read_vae(s.vae_weights, s.vae)
    task = make_task(s, encoder, vae_params)
    stack.enter_context(runs.writing(workdir))
    runs.claim(workdir, config.to_dict())
    events = mllog.recover(workdir, _trained(workdir) * s.run.batch_size)
    if jax.process_count() > 1:  # All processes must read the log before process 0 appends to it.
        multihost_utils.sync_global_devices("log")
    log = mllog.open_log(workdir)
    return OpenRun(s, config.to_dict(), workdir, mode, mesh, encoder, vae_params, task, log, events)


def _open_evaluate(run: OpenRun, images_per_device: int) -> Evaluate:
    if run.mode == EVALUATE and not run.events:
        raise ValueError(f"{run.workdir} holds no log of a training run: run sd_jax.mlperf with --mode=train first")
    inputs = benchmark.open_inputs(run.s.evaluation)
    if not inputs.inception.official:
        logging.warning(
            "not allowed in the closed division: evaluation.inception is not the file "
            "pt_inception-2015-12-05-6726825d.pth"
        )
    size = images_per_device * run.mesh.size
    return benchmark.make_evaluate(run.s, run.task, run.encoder, inputs, run.mesh, run.workdir, size)


def _go_on(run: OpenRun, evaluate: Evaluate | None, submission: Submission, init_start: int) -> str:
    if evaluate and run.mode == EVALUATE:
        return _rounds(run, evaluate, lambda step: None)
    program = _warm_up(run, evaluate)
    if not run.events:
        _log_header(run, submission, init_start)
    with cli.bad_input():
        batches = train.open_batches(run.s, run.encoder, run.vae_params, run.mesh)
        check_data(batches.digests)
    with batches:
        if not run.events:
            run.log.event("train_samples", len(batches.pictures))
        if evaluate:
            return _rounds(run, evaluate, lambda step: _train(run, batches, program, step))
        _train(run, batches, program, run.last)
    logging.info("training has ended: score the checkpoints with --mode=evaluate")
    return mllog.RUNNING


def _warm_up(run: OpenRun, evaluate: Evaluate | None) -> loop.CompiledStep:
    """Run a training step and an evaluation of one batch, to compile them before the clock starts.

    Returns the compiled training step. If `evaluate` is None, no evaluation is run.
    """
    s, (_, row) = run.s, example(run.s, run.encoder)
    rows = s.run.batch_size // pipeline.local_rows(sharding.batch_sharding(run.mesh), s.run.batch_size)[1]
    batch = {name: np.repeat(array, rows, axis=0) for name, array in row.items()}
    batch |= run.encoder.tokenize([""] * rows)
    program = loop.warm_up(run.task, s.run, s.optimizer, run.mesh, batch, run.workdir)
    if evaluate:
        zeros = lambda x: np.zeros(x.shape, x.dtype)
        params = jax.tree.map(zeros, jax.eval_shape(run.task.init, jax.random.key(0)))
        evaluate.warm_up(sharding.place_all(params, run.mesh, run.task.rules))
    return program


def _log_header(run: OpenRun, submission: Submission, init_start: int) -> None:
    log, header = run.log, submission._asdict()
    log.event("cache_clear", header.pop("cache_cleared"))
    log.event("submission_benchmark", rules.NAME)
    for key, value in header.items():
        log.event(f"submission_{key}", value)
    log.start("init_start", time_ms=init_start)
    log.event("seed", run.s.run.seed)
    passes = optimizer.num_passes(run.s.optimizer, run.s.run.batch_size, run.mesh)
    for key, value in rules.hyperparameters(run.s, passes).items():
        log.event(key, value)
    log.end("init_stop")
    log.start("run_start")


def _rounds(run: OpenRun, evaluate: Evaluate, reach: Callable[[int], None]) -> str:
    """Evaluate checkpoints in order until one meets the targets; return the status of the run.

    Before each evaluation, reach(step) is called to train to the step. The status is "success",
    "aborted" if no evaluation meets the targets, or "running" if a checkpoint is still missing.
    """
    done = mllog.evaluations(run.events)
    for step in range(run.interval, run.last + 1, run.interval):
        if run.samples(step) not in done:
            reach(step)
            if step > _trained(run.workdir):
                logging.warning("there is no checkpoint of step %d yet: continue with --mode=train", step)
                return mllog.RUNNING
            done[run.samples(step)] = _scores(run, evaluate, step)
        if rules.meets_targets(done[run.samples(step)]):
            return _stop(run, mllog.SUCCESS, step)
    return _stop(run, mllog.ABORTED, run.last)


def _train(run: OpenRun, batches: Batches, program: loop.CompiledStep, step: int) -> None:
    """Train to a step. For each interval between evaluations, log a block and save a checkpoint.

    On SIGTERM, SIGHUP or Ctrl-C, save a checkpoint and exit.
    """
    first = _trained(run.workdir)
    if first >= step:
        return
    passed = first // run.interval
    run.log.start("block_start", metadata=run.at(passed * run.interval))
    run_settings = run.s.run._replace(steps=step, save_every=run.interval, keep_every=run.interval, sample_every=0)
    inputs = loop.RunInputs(run.task, batches, evaluation=_blocks(run, passed, step))
    state = loop.train(inputs, run_settings, run.s.optimizer, run.mesh, run.workdir, run.config, program=program)
    exit_if_stopped(state, step)


def _blocks(run: OpenRun, passed: int, last: int) -> loop.Scoring:
    """Return a Scoring that makes the training loop log when a block ends and the next one starts.

    A block is the training between two evaluations.

    Args:
        run: The benchmark run.
        passed: The number of blocks that were already completed.
        last: The step at which training ends.
    """
    steps = itertools.count((passed + 1) * run.interval, run.interval)

    def log_block(draw, params):
        del draw, params
        step = next(steps)
        run.log.end("block_stop", metadata=run.at(step))
        if step < last:
            run.log.start("block_start", metadata=run.at(step))
        return {}

    return loop.Scoring(run.samples(run.interval), log_block, before_save=True)


def _scores(run: OpenRun, evaluate: Evaluate, step: int) -> dict[str, float]:
    run.log.start("eval_start", metadata=run.at(step))
    shapes = jax.eval_shape(run.task.init, jax.random.key(0))
    placed = sharding.placed(shapes, sharding.shardings(shapes, run.mesh, run.task.rules))
    params = restore.load_params(run.workdir / runs.CHECKPOINTS, placed, "raw", step)
    scores = evaluate.score(params, step)
    for metric, score in scores.items():
        run.log.event("eval_accuracy", score, metadata={**run.at(step), "metric": metric})
        logging.info("%d images: %s %.4f", run.samples(step), metric, score)
    run.log.end("eval_stop", metadata=run.at(step))
    return scores


def _stop(run: OpenRun, status: str, step: int) -> str:
    """Log run_stop and return the status.

    In mode "evaluate", the time of run_stop is the time at which training reached the step.
    """
    reached = mllog.block_ends(run.events) if run.mode == EVALUATE else {}
    time_ms = reached.get(run.samples(step))
    run.log.end("run_stop", time_ms=time_ms, metadata={"status": status, **run.at(step)})
    return status


def _trained(workdir: pathlib.Path) -> int:
    folder = workdir / runs.CHECKPOINTS
    return restore.newest_sound(folder) if restore.steps(folder) else 0
