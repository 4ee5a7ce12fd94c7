"""A run of the benchmark: blocks of training and evaluations in turn, each said in its log.

What is done is read from the log and the checkpoints alone, so that a run goes on wherever it was
killed.
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
from diffusion_jax.machine import sharding
from diffusion_jax.precache import lookup
from diffusion_jax.task import Task
from diffusion_jax.text import TextEncoder
from diffusion_jax.train import loop, optimizer
from diffusion_jax.train.command import exit_if_stopped
from diffusion_jax.weights import restore
from sd_jax import train
from sd_jax.mlperf import benchmark, mllog, rules
from sd_jax.mlperf.benchmark import Evaluate
from sd_jax.mlperf.mllog import Event
from sd_jax.settings import Settings, read_settings
from sd_jax.task import example, make_task
from sd_jax.weights.initial import read_vae

MODES = INLINE, TRAIN, EVALUATE = "inline", "train", "evaluate"


class Submission(NamedTuple):
    """The log's header, as far as no config holds it: whose run it is, and of which division."""

    division: str
    org: str
    platform: str
    status: str
    cache_cleared: bool


class OpenRun(NamedTuple):
    """A run whose config, networks and log are open and checked, but not its data."""

    s: Settings
    config: Mapping[str, Any]
    workdir: pathlib.Path
    mode: str
    mesh: Mesh
    encoder: TextEncoder
    vae_params: Any
    task: Task
    log: Any
    """MLCommons' MLLogger."""
    events: list[Event]
    """The lines that its log held when it was opened."""

    @property
    def interval(self) -> int:
        """Steps from one evaluation to the next."""
        return rules.steps_between(self.s)

    @property
    def last(self) -> int:
        """The step of the last evaluation."""
        return self.s.run.steps // self.interval * self.interval

    def samples(self, step: int) -> int:
        """Images seen at a step."""
        return step * self.s.run.batch_size

    def at(self, step: int) -> dict[str, Any]:
        """The metadata of what the log says of a step."""
        return {"samples_count": self.samples(step)}


def go(
    config: ConfigDict, workdir: pathlib.Path, mode: str, seed: int | None, eval_batch: int,
    submission: Submission, init_start: int,
) -> str:  # fmt: skip
    """Begins a run or goes on with it; its status then. Bad input ends the command.

    Without `seed` it is that of the workdir's run, or a new one of the system's. A device draws
    `eval_batch` images at once. `init_start` is when the command began, in milliseconds.
    """
    with contextlib.ExitStack() as held:
        with cli.bad_input(ModuleNotFoundError):
            run = _open(_seeded(config, workdir, seed), workdir, mode, held)
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


def _open(
    config: ConfigDict, workdir: pathlib.Path, mode: str, held: contextlib.ExitStack
) -> OpenRun:
    """The run, whose workdir is `held`; ValueError or OSError if something cannot be."""
    s = read_settings(config.to_dict())
    rules.check(s)
    for departure in rules.departures(s):
        logging.warning("no closed run: %s", departure)
    mesh = sharding.make_mesh(*s.mesh)
    s = s._replace(optimizer=optimizer.for_mesh(s.optimizer, s.run.batch_size, mesh))
    encoder, vae_params = lookup.open_encoder(s.text), read_vae(s.vae_weights, s.vae)
    task = make_task(s, encoder, vae_params)
    held.enter_context(runs.writing(workdir))
    runs.claim(workdir, config.to_dict())
    events = mllog.recover(workdir, _trained(workdir) * s.run.batch_size)
    if jax.process_count() > 1:  # All have read the log before the first goes on with it.
        multihost_utils.sync_global_devices("log")
    log = mllog.open_log(workdir)
    return OpenRun(s, config.to_dict(), workdir, mode, mesh, encoder, vae_params, task, log, events)


def _open_evaluate(run: OpenRun, images_per_device: int) -> Evaluate:
    if run.mode == EVALUATE and not run.events:
        raise ValueError(f"{run.workdir} holds no checkpoint yet: first --mode=train")
    judge = benchmark.open_judge(run.s.evaluation)
    if not judge.inception.official:
        logging.warning("no closed run: evaluation.inception is not the public file")
    size = images_per_device * run.mesh.size
    return benchmark.make_evaluate(run.s, run.task, run.encoder, judge, run.mesh, run.workdir, size)


def _go_on(run: OpenRun, evaluate: Evaluate | None, submission: Submission, init_start: int) -> str:
    """The whole of the run, or what is left of it; its status then."""
    if evaluate and run.mode == EVALUATE:
        return _rounds(run, evaluate, lambda step: None)
    program = _warm_up(run, evaluate)
    if not run.events:
        _say_header(run, submission, init_start)
    with cli.bad_input():
        batches = train.open_batches(run.s, run.encoder, run.vae_params, run.mesh)
    with batches:
        if not run.events:
            run.log.event("train_samples", len(batches.pictures))
        if evaluate:
            return _rounds(run, evaluate, lambda step: _train(run, batches, program, step))
        _train(run, batches, program, run.last)
    logging.info("trained: --mode=evaluate scores the checkpoints")
    return mllog.RUNNING


def _warm_up(run: OpenRun, evaluate: Evaluate | None) -> loop.Program:
    """The compiled step; it and evaluation run once, on made-up data, before the clock starts."""
    s, (_, row) = run.s, example(run.s, run.encoder)
    rows = (
        s.run.batch_size
        // pipeline.local_rows(sharding.batch_sharding(run.mesh), s.run.batch_size)[1]
    )
    batch = {name: np.repeat(array, rows, axis=0) for name, array in row.items()}
    batch |= run.encoder.tokenize([""] * rows)
    program = loop.warm_up(run.task, s.run, s.optimizer, run.mesh, batch)
    if evaluate:
        zeros = lambda x: np.zeros(x.shape, x.dtype)
        params = jax.tree.map(zeros, jax.eval_shape(run.task.init, jax.random.key(0)))
        evaluate.warm_up(sharding.place_all(params, run.mesh, run.task.rules))
    return program


def _say_header(run: OpenRun, submission: Submission, init_start: int) -> None:
    """All that does not depend on the data, up to the start of the clock."""
    log, header = run.log, submission._asdict()
    log.event("cache_clear", header.pop("cache_cleared"))
    log.event("submission_benchmark", rules.NAME)
    for key, value in header.items():
        log.event(f"submission_{key}", value)
    log.start("init_start", time_ms=init_start)
    log.event("seed", run.s.run.seed)
    for key, value in rules.hyperparameters(run.s).items():
        log.event(key, value)
    log.end("init_stop")
    log.start("run_start")


def _rounds(run: OpenRun, evaluate: Evaluate, reach: Callable[[int], None]) -> str:
    """Evaluation after evaluation, until one meets the targets or the steps are over.

    `reach` trains to a step. "running" if a checkpoint is not there then.
    """
    done = mllog.evaluations(run.events)
    for step in range(run.interval, run.last + 1, run.interval):
        if run.samples(step) not in done:
            reach(step)
            if step > _trained(run.workdir):
                logging.warning("no checkpoint of step %d yet: go on with --mode=train", step)
                return mllog.RUNNING
            done[run.samples(step)] = _scores(run, evaluate, step)
        if rules.meets_targets(done[run.samples(step)]):
            return _stop(run, mllog.SUCCESS, step)
    return _stop(run, mllog.ABORTED, run.last)


def _train(run: OpenRun, batches: Batches, program: loop.Program, step: int) -> None:
    """Trains to a step, with a block in the log and a checkpoint for each interval.

    SIGTERM saves and exits with 143.
    """
    first = _trained(run.workdir)
    if first >= step:
        return
    passed = first // run.interval
    run.log.start("block_start", metadata=run.at(passed * run.interval))
    goal = run.s.run._replace(
        steps=step, save_every=run.interval, keep_every=run.interval, sample_every=0
    )
    inputs = loop.Inputs(run.task, batches, evaluation=_blocks(run, passed, step))
    state = loop.train(
        inputs, goal, run.s.optimizer, run.mesh, run.workdir, run.config, program=program
    )
    exit_if_stopped(state, step)


def _blocks(run: OpenRun, passed: int, last: int) -> loop.Scoring:
    """Lets the loop say in the log where blocks end, of which `passed` are over."""
    steps = itertools.count((passed + 1) * run.interval, run.interval)

    def say(draw, params):
        del draw, params
        step = next(steps)
        run.log.end("block_stop", metadata=run.at(step))
        if step < last:
            run.log.start("block_start", metadata=run.at(step))
        return {}

    return loop.Scoring(run.samples(run.interval), say)


def _scores(run: OpenRun, evaluate: Evaluate, step: int) -> dict[str, float]:
    """The scores of a checkpoint, which are in the log then."""
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
    """Ends the clock: now, or where evaluation came later, at the time the step was reached."""
    reached = mllog.block_ends(run.events) if run.mode == EVALUATE else {}
    time_ms = reached.get(run.samples(step))
    run.log.end("run_stop", time_ms=time_ms, metadata={"status": status, **run.at(step)})
    return status


def _trained(workdir: pathlib.Path) -> int:
    """The step of the newest sound checkpoint; 0 without one."""
    folder = workdir / runs.CHECKPOINTS
    return restore.newest_sound(folder) if restore.steps(folder) else 0
