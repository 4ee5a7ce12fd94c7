"""Runs MLPerf's text-to-image benchmark (Stable Diffusion v2, training 5.0.0), log and all.

    python -m sd_jax.mlperf --config=configs/sd2_mlperf.py:512 --workdir=runs/mlperf/0 \\
        --config.data.path=laion/moments --config.vae.weights=512-base-ema.ckpt \\
        --config.text.weights=clip-vit-h-14 --config.evaluation.prompts=val2014_30k.tsv \\
        --config.evaluation.reference=val2014_30k_stats.npz \\
        --config.evaluation.inception=pt_inception-2015-12-05-6726825d.pth \\
        --config.evaluation.clip=clip-vit-h-14

Trains, evaluates after every 512,000 images (config.evaluation.every, rounded up to whole steps),
and stops when FID and CLIP score meet both targets in one evaluation, or after config.steps. The
number behind the config's name is the global batch size, from which the learning rate follows.

The workdir, which all hosts must see, gets what sd_jax.train writes, and result.txt, which
MLPerf's own checkers read and python -m sd_jax.rcp compares with the reference. The same command
again goes on wherever it was killed. docs/mlperf.md leads from a bare machine to a result.
"""

import contextlib
import itertools
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags, logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from ml_collections import ConfigDict

from diffusion_jax import cli, runs
from diffusion_jax.data.pipeline import Batches
from diffusion_jax.machine import sharding
from diffusion_jax.task import Task
from diffusion_jax.text import TextEncoder, registry
from diffusion_jax.train import checkpoint, loop
from diffusion_jax.train import command as training
from sd_jax import task, train
from sd_jax.mlperf import benchmark, mllog, results, rules
from sd_jax.mlperf.benchmark import Evaluate
from sd_jax.mlperf.mllog import ResultLog
from sd_jax.mlperf.results import Event
from sd_jax.settings import Settings, read_settings
from sd_jax.weights.pretrained import read_vae

_CONFIG = cli.define_config("configs/sd2_mlperf.py:BATCH_SIZE.")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "The folder of this run; made if need be.", required=True
)
_MODE = flags.DEFINE_enum(
    "mode", "inline", ["inline", "train", "evaluate"],
    "inline: train and evaluate in turn. train: train alone, to the end, keeping the checkpoints; "
    "then evaluate: score these, until one meets the targets, in time that does not count.",
)  # fmt: skip
_SEED = flags.DEFINE_integer(
    "seed", None, "Takes the place of the config's. Default: drawn from the system for a new run."
)
_EVAL_BATCH = flags.DEFINE_integer(
    "eval_batch", 8, "Images that a device draws at once.", lower_bound=1
)
_DIVISION = flags.DEFINE_enum("division", "closed", ["closed", "open"], "Of the submission.")
_ORG = flags.DEFINE_string("org", "none", "Who submits.")
_PLATFORM = flags.DEFINE_string("platform", "none", "The system's name.")
_STATUS = flags.DEFINE_enum("status", "onprem", ["onprem", "cloud", "research"], "Of the system.")
_CLEARED = flags.DEFINE_bool(
    "cache_cleared", False, "Say that the systems' caches were cleared: the rules ask for it."
)


class Run(NamedTuple):
    """A run opened and checked, but for its data."""

    s: Settings
    config: Mapping[str, Any]
    workdir: pathlib.Path
    mesh: Mesh
    encoder: TextEncoder
    vae_params: Any
    made: Task
    log: ResultLog
    events: list[Event]
    """What its log said when it was opened."""

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


def main(argv: list[str]) -> None:
    """Checks everything, then trains and evaluates."""
    began = int(time.time() * 1000)
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
    cli.start()
    workdir = pathlib.Path(_WORKDIR.value)
    with cli.bad_input(ModuleNotFoundError):
        run = _open(_seeded(_CONFIG.value, workdir), workdir)
        evaluate = None if _MODE.value == "train" else _open_evaluate(run)
    with contextlib.closing(run.log):
        status = results.status_of(run.events)
        if status == results.RUNNING:
            status = _go_on(run, evaluate, began)
    logging.info("%s: %s", run.log.path, status)


def _seeded(config: ConfigDict, workdir: pathlib.Path) -> ConfigDict:
    """The config with --seed, that of the workdir's run, or a new one of the system's."""
    if _SEED.value is not None:
        config.seed = _SEED.value
    elif (workdir / runs.CONFIG).exists():
        config.seed = runs.load(workdir)["seed"]
    else:
        drawn = np.uint32(secrets.randbelow(2**31))
        config.seed = int(multihost_utils.broadcast_one_to_all(drawn))
    return config


def _open(config: ConfigDict, workdir: pathlib.Path) -> Run:
    """ValueError or OSError if what the config names cannot be."""
    s = read_settings(config.to_dict())
    rules.check(s)
    for departure in rules.departures(s):
        logging.warning("no closed run: %s", departure)
    mesh = sharding.make_mesh(*s.mesh)
    sharding.check_batch(s.run.batch_size, s.optimizer.accumulate, mesh)
    encoder, vae_params = registry.open_encoder(s.text), read_vae(s.vae_weights, s.vae)
    made = task.make_task(s, encoder, vae_params)
    runs.claim(workdir, config.to_dict())
    events = mllog.recover(workdir, _trained(workdir) * s.run.batch_size)
    if jax.process_count() > 1:  # All have read the log before the first goes on with it.
        multihost_utils.sync_global_devices("log")
    log = ResultLog(workdir)
    return Run(s, config.to_dict(), workdir, mesh, encoder, vae_params, made, log, events)


def _open_evaluate(run: Run) -> Evaluate:
    if _MODE.value == "evaluate" and not run.events:
        raise ValueError(f"{run.workdir} holds no checkpoint yet: first --mode=train")
    judge = benchmark.open_judge(run.s.evaluation)
    if not judge.inception.official:
        logging.warning("no closed run: evaluation.inception is not the public file")
    size = _EVAL_BATCH.value * run.mesh.size
    return benchmark.make_evaluate(run.s, run.made, run.encoder, judge, run.mesh, run.workdir, size)


def _go_on(run: Run, evaluate: Evaluate | None, began: int) -> str:
    """The run's status then."""
    if evaluate and _MODE.value == "evaluate":
        return _rounds(run, evaluate, lambda step: None)
    if not run.events:
        _say_header(run, began)
    with cli.bad_input():
        batches = train.open_batches(run.s, run.encoder, run.vae_params, run.mesh)
    with batches:
        if not run.events:
            run.log.event("train_samples", len(batches.pictures))
        if evaluate:
            return _rounds(run, evaluate, lambda step: _train(run, batches, step))
        _train(run, batches, run.last)
    logging.info("trained: --mode=evaluate scores the checkpoints")
    return results.RUNNING


def _rounds(run: Run, evaluate: Evaluate, reach: Callable[[int], None]) -> str:
    """Evaluation after evaluation, until one meets the targets or the steps are over.

    `reach` trains to a step. "running" if a checkpoint is not there then.
    """
    done = results.evaluations_of(run.events)
    for step in range(run.interval, run.last + 1, run.interval):
        if run.samples(step) not in done:
            reach(step)
            if step > _trained(run.workdir):
                logging.warning("no checkpoint of step %d yet: go on with --mode=train", step)
                return results.RUNNING
            done[run.samples(step)] = _evaluated(run, evaluate, step)
        if results.meets_targets(done[run.samples(step)]):
            return _stop(run, results.SUCCESS, step)
    return _stop(run, results.ABORTED, run.last)


def _train(run: Run, batches: Batches, step: int) -> None:
    """Trains to a step, with a block in the log and a checkpoint for each interval.

    SIGTERM saves and exits with 143.
    """
    first = _trained(run.workdir)
    if first >= step:
        return
    passed = first // run.interval
    run.log.start("block_start", samples_count=run.samples(passed * run.interval))
    goal = run.s.run._replace(
        steps=step, save_every=run.interval, keep_every=run.interval, sample_every=0
    )
    state = loop.train(
        run.made, goal, run.s.optimizer, run.mesh, batches, loop.Examples({}, (), 0.0),
        run.workdir, run.config, _blocks(run, passed, step),
    )  # fmt: skip
    training.exit_if_stopped(state, step)


def _blocks(run: Run, passed: int, last: int) -> loop.Evaluation:
    """What the loop calls after each interval, of which `passed` are over."""
    steps = itertools.count((passed + 1) * run.interval, run.interval)

    def say(draw, params):
        del draw, params
        step = next(steps)
        run.log.stop("block_stop", samples_count=run.samples(step))
        if step < last:
            run.log.start("block_start", samples_count=run.samples(step))
        return {}

    return loop.Evaluation(run.samples(run.interval), say)


def _evaluated(run: Run, evaluate: Evaluate, step: int) -> dict[str, float]:
    """The scores of a checkpoint, which are in the log then."""
    samples = run.samples(step)
    run.log.start("eval_start", samples_count=samples)
    shapes = jax.eval_shape(run.made.init, jax.random.key(0))
    placed = sharding.placed(shapes, sharding.shardings(shapes, run.mesh, run.made.rules))
    params = checkpoint.load_params(run.workdir / runs.CHECKPOINTS, placed, "raw", step)
    scores = evaluate(params, step)
    for metric, score in scores.items():
        run.log.event("eval_accuracy", score, samples_count=samples, metric=metric)
        logging.info("%d images: %s %.4f", samples, metric, score)
    run.log.stop("eval_stop", samples_count=samples)
    return scores


def _stop(run: Run, status: str, step: int) -> str:
    """The end of the clock: now, or where evaluation came later, when the step was reached."""
    reached = mllog.block_ends(run.events) if _MODE.value == "evaluate" else {}
    samples = run.samples(step)
    run.log.stop("run_stop", reached.get(samples), status=status, samples_count=samples)
    return status


def _say_header(run: Run, began: int) -> None:
    """All that does not depend on the data, up to the start of the clock."""
    s, log = run.s, run.log
    log.event("cache_clear", _CLEARED.value)
    log.event("submission_benchmark", "stable_diffusion")
    for key, flag in (("division", _DIVISION), ("org", _ORG), ("platform", _PLATFORM),
                      ("status", _STATUS)):  # fmt: skip
        log.event(f"submission_{key}", flag.value)
    log.start("init_start", began)
    log.event("seed", s.run.seed)
    for key, value in rules.hyperparameters(s).items():
        log.event(key, value)
    log.stop("init_stop")
    log.start("run_start")


def _trained(workdir: pathlib.Path) -> int:
    """The step of the last checkpoint; 0 without one."""
    return max(checkpoint.steps(workdir / runs.CHECKPOINTS), default=0)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
