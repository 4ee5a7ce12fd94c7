"""Choose the model that the start command suggests, measure its speed, and set its steps.

The number of training steps is chosen to fill the time that the user gives.
"""

import importlib
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from jax.sharding import Mesh

from diffusion_jax import runs, systems
from diffusion_jax.devices import hardware, sharding
from diffusion_jax.logs import run_log
from diffusion_jax.start.changes import Changes, full_config
from diffusion_jax.train import loop, memory
from diffusion_jax.train.train_command import exit_if_stopped

_TIMES, _PERIOD = 10, 300
"""A run draws and saves at least _TIMES times, and at least about every _PERIOD seconds."""
_STEPS, _LEFT_OUT = 6, 2  # A measurement takes 6 steps, of which the first 2 do not count.
_LEAST = 20  # The smallest number of steps worth training.
_OVERHEAD = 90.0  # About the seconds in which two CPU cores compile a small model's step.
_GFLOPS = 100.0  # GFLOP/s of about two CPU cores.


class TrainingStage(NamedTuple):
    """One network to train: a config of configs/, and the changes to it."""

    base: str
    """The name of the config in configs/, such as base32_8m."""
    gflop: float
    """Billions of floating-point operations per training image. Models are compared by it."""
    suffix: str = ""
    """The suffix of the names of the written config and the workdir; "" for the text-to-image
    stage."""
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


class Measured(NamedTuple):
    """A stage, its config, and its speed on this machine."""

    stage: TrainingStage
    changes: Changes
    """Changes to the config `stage.base`."""
    settings: Any
    """The settings of the changed config."""
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
        return self.settings.run.batch_size / self.images_per_second


class Trial:
    """The measurement of the models that may be chosen, and what is known of them so far."""

    def __init__(self, candidates: Sequence[Candidate], of_data: Callable[[str], Changes], workdir: str) -> None:
        """Prepare a measurement, for which nothing is opened yet.

        Args:
            candidates: single models or cascades, from the smallest to the largest.
            of_data: maps the base config of a stage to changes for the data set and this machine.
            workdir: a temporary workdir. Those of stages with a suffix lie beside it.
        """
        self._candidates, self._of_data, self._workdir = candidates, of_data, workdir
        self.chosen = candidates[0]
        """The model that is measured."""
        self._fitted: dict[str, tuple[Changes, bool]] = {}
        self._measured: dict[str, Measured] = {}

    def measure(self, side: float, seconds: float) -> list[Measured]:
        """Choose a model for the data, and return its stages with their speed on this machine.

        Args:
            side: the median of the training pictures' shorter sides, in pixels.
            seconds: the total training time of all stages.

        Raises:
            ValueError, OSError: the data or weights cannot be used.
        """
        if len(self._candidates) > 1:
            first = self._measure(self._candidates[0].stages[0])
            rate = first.images_per_second * first.stage.gflop
            for candidate in reversed(allowed(self._candidates, side, seconds, rate)):
                self.chosen = candidate
                if all(self._fit(stage)[1] for stage in candidate.stages):
                    break
        return [self._measure(stage) for stage in self.chosen.stages]

    def assumed(self) -> list[Measured]:
        """Return the stages of the model chosen so far, with a guess of the speeds not measured.

        A stage is assumed to reach the FLOP/s of a measured stage or, if there is none, of two CPU
        cores.
        """
        known = dict(self._measured)
        rates = [one.images_per_second * one.stage.gflop for one in known.values()]
        stages = []
        for stage in self.chosen.stages:
            if stage.base in known:
                stages.append(known[stage.base]._replace(stage=stage))
                continue
            own = self._fitted.get(stage.base, (self._changes(stage),))[0]
            speed = (rates or [_GFLOPS])[0] / stage.gflop
            config = full_config(stage.base, own)
            settings = systems.read(config, config["system"])
            stages.append(Measured(stage, own, settings, speed, _OVERHEAD, assumed=True))
        return stages

    def _changes(self, stage: TrainingStage) -> Changes:
        return {**self._of_data(stage.base), **stage.changes(self._workdir)}

    def _fit(self, stage: TrainingStage) -> tuple[Changes, bool]:
        if stage.base not in self._fitted:
            self._fitted[stage.base] = fit(stage, self._changes(stage))
        return self._fitted[stage.base]

    def _measure(self, stage: TrainingStage) -> Measured:
        if stage.base not in self._measured:
            workdir = self._workdir + stage.suffix
            self._measured[stage.base] = measure(stage, self._fit(stage)[0], workdir)
        # Another candidate may give this stage another share of the time.
        return self._measured[stage.base]._replace(stage=stage)


def allowed(candidates: Sequence[Candidate], side: float, seconds: float, rate: float) -> list[Candidate]:
    """Return the models that the picture size and training time allow, at `rate` GFLOP/s.

    The smallest model is always allowed. The other arguments are those of Trial.measure.
    """
    enough = lambda stage, images: rate / stage.gflop * seconds * stage.share >= images
    fits = lambda c: c.image_size <= side and enough(c.stages[0], c.min_images)
    return [candidates[0], *filter(fits, candidates[1:])]


def fit(stage: TrainingStage, changes: Changes) -> tuple[Changes, bool]:
    """Trace a training step, and return (config changes with which it fits in memory, fits).

    `fits` is False if not even one sample fits. If a whole batch does not fit,
    optimizer.micro_batch is set to the largest size that does.
    """
    s, mesh, inputs = _open(full_config(stage.base, changes))
    with inputs.batches:
        state = memory.new_state(inputs.task, s.optimizer, s.run.steps)
        traced = memory.trace(inputs.task, state, inputs.batches.example())
    limit = memory.USABLE * hardware.limit(jax.local_devices()[0])
    plan = memory.plan(traced, mesh, s.run.batch_size, 1, limit)
    if plan.largest < plan.samples:
        micro_batch = (max(1, plan.largest), "The largest that fits in memory.")
        changes = {**changes, "optimizer.micro_batch": micro_batch}
    return changes, plan.largest > 0


def measure(stage: TrainingStage, changes: Changes, workdir: str) -> Measured:
    """Measure the speed of a stage by training it for a few steps in `workdir`, a temporary folder.

    Nothing but warnings is logged meanwhile, because these steps are not the training.

    Raises ValueError or OSError if the config, data or weights cannot be used.
    """
    logging.info("measuring the speed of %s, with %d steps that are not kept", stage.base, _STEPS)
    start, config = time.time(), full_config(stage.base, changes)
    s, mesh, inputs = _open(config)
    constant = s.optimizer._replace(schedule="constant")
    every = {"log_every": _LEFT_OUT, "sample_every": 0, "save_every": _STEPS}
    runs.claim(workdir, config)
    with inputs.batches:
        run = s.run._replace(steps=_STEPS, **every)
        shown = logging.get_verbosity()
        logging.set_verbosity(logging.WARNING)
        state = loop.train(inputs, run, constant, mesh, pathlib.Path(workdir), config)
        logging.set_verbosity(shown)
    exit_if_stopped(state, _STEPS)
    lines = run_log.read_metrics(pathlib.Path(workdir) / run_log.METRICS)
    lines = [line for line in lines if line["step"] > _LEFT_OUT]
    speed = len(lines) / sum(1 / line["images_per_second"] for line in lines)
    waiting = sum(line["data/waiting"] for line in lines) / len(lines)
    overhead = time.time() - start - _STEPS * s.run.batch_size / speed
    return Measured(stage, changes, s, speed, max(0.0, overhead), waiting)


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
    s, stage = measured.settings, measured.stage
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


def _open(config: Mapping[str, Any]) -> tuple[Any, Mesh, loop.RunInputs]:
    """Return the settings, the mesh and the inputs of a training run."""
    s = systems.read(config, config["system"])
    mesh = sharding.make_mesh(*s.mesh)
    command = importlib.import_module(systems.find(config["system"]).command)
    return s, mesh, command.prepare(s, mesh)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
