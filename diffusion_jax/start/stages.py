"""Choose the model that the start command suggests, measure its speed, and set its steps.

The number of training steps is chosen to fill the time that the user gives.
"""

import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from diffusion_jax import runs, systems
from diffusion_jax.devices import hardware, sharding
from diffusion_jax.logs import run_log
from diffusion_jax.start import written
from diffusion_jax.start.written import Changes
from diffusion_jax.train import loop, memory, optimizer
from diffusion_jax.train.state import init_state
from diffusion_jax.train.train_command import exit_if_stopped

_TIMES, _PERIOD = 10, 300
"""A run draws and saves at least _TIMES times, and at least about every _PERIOD seconds."""
_STEPS, _LEFT_OUT = 6, 2  # A measurement takes 6 steps, of which the first 2 do not count.
_LEAST = 20  # The smallest number of steps worth training.
_OVERHEAD = 90.0  # About the seconds in which two CPU cores compile a small model's step.
_RATE, _FLOPS = 1e11, 1.7e9  # FLOP/s of about two CPU cores, and FLOP per image of a small model.


class TrainingStage(NamedTuple):
    """One network to train: a config of configs/, changes to it, and how to run it."""

    base: str
    """The name of the config in configs/, such as base32_8m."""
    suffix: str
    """The suffix of the names of the written config and the workdir; "" for the text-to-image
    stage."""
    command: str
    """The module that trains this stage, run with `python -m`."""
    prepare: Callable[[Any, Mesh], loop.RunInputs]
    """A function (settings, mesh) that opens the task and the batches of a training run."""
    share: float = 1.0
    """Share of the total training time that this stage gets, from 0 to 1."""
    changes: Callable[[str], Changes] = lambda workdir: {}
    """A function that maps the workdir of the text-to-image stage to config changes."""
    max_epochs: float = math.inf
    """Maximum number of passes over the data. More passes would only memorise a small data set."""


class Candidate(NamedTuple):
    """A model that may be chosen: its stages, and the conditions for choosing it."""

    image_size: int
    """Side of the model's pictures in pixels. The training pictures must be at least as large."""
    min_images: int
    """The least number of images that the first stage must process within its training time."""
    stages: Sequence[TrainingStage]


class Opened(NamedTuple):
    """A stage with its settings. Usually, its training step was traced, but not run."""

    stage: TrainingStage
    changes: Changes
    config: Mapping[str, Any]
    settings: Any
    traced: memory.Traced | None = None
    """The traced step; None if there was no time to trace it."""
    fits: bool = True
    """Whether the smallest micro-batch fits in a device's memory."""
    seconds: float = 0.0
    """The time that opening took."""


class Measured(NamedTuple):
    """A stage and its speed on this machine."""

    opened: Opened
    images_per_second: float
    overhead: float
    """Seconds that opening, compiling and saving took, in addition to the training steps."""
    waiting: float = 0.0
    """The share of the steps' time that was spent waiting for pictures, from 0 to 1."""
    assumed: bool = False
    """Whether the speed is a guess, because there was no time to measure it."""

    @property
    def seconds(self) -> float:
        """The measured seconds per training step."""
        return self.opened.settings.run.batch_size / self.images_per_second


def open_stage(stage: TrainingStage, changes: Changes) -> Opened:
    """Open a stage and trace its training step, without compiling or running it.

    If a whole batch does not fit in memory, optimizer.micro_batch is set to the largest size that
    fits. Raises ValueError or OSError if the config, data or weights cannot be used.
    """
    start, config = time.time(), written.config(stage.base, changes)
    s = systems.read(config, config["system"])
    mesh = sharding.make_mesh(*s.mesh)
    inputs = stage.prepare(s, mesh)
    with inputs.batches:
        tx = optimizer.make_optimizer(s.optimizer, s.run.steps)
        create = lambda key: init_state(inputs.task.init(key), tx, s.optimizer.ema_decays)
        state = jax.eval_shape(create, memory.abstract_key())
        traced = memory.trace(inputs.task, state, inputs.batches.example())
    share = samples = s.run.batch_size // sharding.batch_ways(mesh)
    limit = memory.USABLE * hardware.limit(jax.local_devices()[0])
    need = lambda n: memory.bytes_per_device(traced, mesh, n, share // n).total
    while samples % 2 == 0 and need(samples) > limit:
        samples //= 2
    opened = Opened(stage, changes, config, s, traced, need(samples) <= limit, time.time() - start)
    if samples == share or s.optimizer.micro_batch:
        return opened
    micro_batch = {"optimizer.micro_batch": (samples, "The largest that fits in memory.")}
    return open_stage(stage, {**changes, **micro_batch})


def measure(opened: Opened, workdir: str) -> Measured:
    """Measure the speed of a stage by training it for a few steps in `workdir`, a temporary folder.

    Raises ValueError or OSError if the config, data or weights cannot be used.
    """
    start, stage, s = time.time(), opened.stage, opened.settings
    mesh = sharding.make_mesh(*s.mesh)
    runs.claim(workdir, opened.config)
    constant = s.optimizer._replace(schedule="constant")
    inputs = stage.prepare(s, mesh)
    every = {"log_every": _LEFT_OUT, "sample_every": 0, "save_every": _STEPS}
    with inputs.batches:
        run = s.run._replace(steps=_STEPS, **every)
        state = loop.train(inputs, run, constant, mesh, pathlib.Path(workdir), opened.config)
    exit_if_stopped(state, _STEPS)
    lines = run_log.read_metrics(pathlib.Path(workdir) / run_log.METRICS)
    lines = [line for line in lines if line["step"] > _LEFT_OUT]
    speed = len(lines) / sum(1 / line["images_per_second"] for line in lines)
    spent = opened.seconds + time.time() - start - _STEPS * s.run.batch_size / speed
    waiting = sum(line["data/waiting"] for line in lines) / len(lines)
    return Measured(opened, speed, max(0.0, spent), waiting)


def assume(
    stage: TrainingStage, changes: Changes, opened: Opened | None, measured: Sequence[Measured]
) -> Measured:
    """Return a stage that there was no time to measure, with a guess of its speed.

    It is assumed to reach the FLOP/s of a stage in `measured` or, if there is none, of two CPU
    cores. `opened` is the opened stage, or None if there was no time to open it.
    """
    if opened is None:
        config = written.config(stage.base, changes)
        opened = Opened(stage, changes, config, systems.read(config, config["system"]))
    rates = [one.images_per_second * _flops(one.opened) for one in measured]
    return Measured(opened, (rates or [_RATE])[0] / _flops(opened), _OVERHEAD, assumed=True)


def choose(
    candidates: Sequence[Candidate], side: float, seconds: float,
    opened: Callable[[TrainingStage], Opened], measured: Callable[[TrainingStage], Measured],
) -> Candidate:  # fmt: skip
    """Return the largest model that the picture size, memory and training time allow.

    The smallest model is always allowed. Only the first stage of the smallest model is measured.
    All other stages are assumed to reach the same FLOP/s.

    Args:
        candidates: single models or cascades, from the smallest to the largest.
        side: the median of the training pictures' shorter sides, in pixels.
        seconds: the total training time of all stages.
        opened: a function that opens and traces a stage.
        measured: a function that measures the speed of a stage.
    """
    if len(candidates) == 1:
        return candidates[0]
    first = measured(candidates[0].stages[0])
    rate = first.images_per_second * _flops(first.opened)

    def allowed(candidate: Candidate) -> bool:
        if candidate.image_size > side:
            return False
        base = candidate.stages[0]
        num_images = rate / _flops(opened(base)) * seconds * base.share
        if num_images < candidate.min_images:
            return False
        # Tracing the other stages takes seconds, so this check comes last.
        return all(opened(stage).fits for stage in candidate.stages)

    return [candidates[0], *filter(allowed, candidates[1:])][-1]


def timed(measured: Measured, seconds: float, num_images: int) -> tuple[Changes, float]:
    """Return (config changes that make training take about `seconds`, the expected seconds).

    The changes set the number of steps and the fields that depend on it, such as the intervals of
    logging and saving. Fine-tuning may take less time, because stage.max_epochs limits its steps.
    If there is time for fewer than 20 steps, training takes 20 steps, and longer than `seconds`.

    Args:
        measured: a stage and its speed.
        seconds: the time for training, including compilation and the drawing of samples.
        num_images: the number of pictures in the data set.
    """
    s, stage = measured.opened.settings, measured.opened.stage
    period = min(_PERIOD, seconds / _TIMES)
    drawing = 0.0
    if hasattr(s, "sampler"):  # A network evaluation takes a third of a training step.
        images = len(s.run.prompts) * s.sampler.steps * (1 + (s.sampler.guidance != 1))
        drawing = seconds / period * images / (3 * measured.images_per_second)
    overhead = 2 * measured.overhead + drawing  # Twice, because the sampler is compiled too.
    steps = int((seconds - overhead) / measured.seconds)
    how = "assumed" if measured.assumed else "measured"
    note = f"Fills --hours at the {how} {measured.images_per_second:.3g} images/s."
    if steps < _LEAST:
        note = f"--hours allows {max(0, steps)}; fewer than {_LEAST} are not worth training."
        steps = _LEAST
    most = stage.max_epochs * num_images / s.run.batch_size
    if most < steps:
        steps = max(_LEAST, round(most))
        note = f"{stage.max_epochs:,.0f} passes over the pictures; more would only memorise them."
    every = lambda period: min(steps, max(1, round(period / measured.seconds)))
    early = min(every(period), max(1, steps // _TIMES))
    changes = {
        "steps": (steps, note),
        "log_every": (min(every(20), early), ""),
        "sample_every": (early, f"About every {_duration(early * measured.seconds)}."),
        "save_every": (early, ""),
        "keep_every": (0, ""),
        "optimizer.schedule": ("cosine", "The learning rate falls to 0."),
        "optimizer.warmup": (min(s.optimizer.warmup, steps // 10), ""),
    }
    return changes, steps * measured.seconds + overhead


def _flops(opened: Opened) -> float:
    return opened.traced.flops if opened.traced else _FLOPS


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
