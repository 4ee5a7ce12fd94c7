"""The models that a start chooses among: their stages, measured here, and the steps for a time."""

import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from diffusion_jax import runs, systems
from diffusion_jax.machine import hardware, log, sharding
from diffusion_jax.start import written
from diffusion_jax.start.written import Changes
from diffusion_jax.train import loop, memory, optimizer
from diffusion_jax.train.command import exit_if_stopped
from diffusion_jax.train.state import init_state

SHEETS = 10
"""Sheets of pictures that are drawn on the way."""
_STEPS, _LEFT_OUT = 6, 2  # Steps that are measured, and the first of them, which are not counted.
_LEAST = 20  # Steps that are a training.


class Stage(NamedTuple):
    """A model that is trained: a config of configs/, and what is changed of it."""

    base: str
    """The config's name, such as base32_8m."""
    suffix: str
    """What ends the names of its config and workdir: "" for the stage that reads the prompts."""
    command: str
    """The module that trains it."""
    prepare: Callable[[Any, Mesh], loop.Inputs]
    share: float = 1.0
    """Of the time."""
    changes: Callable[[str], Changes] = lambda workdir: {}
    """Its own changes, for the workdir of the stage without a suffix."""


class Rung(NamedTuple):
    """Stages that give pictures of one size, and what makes them worth their time."""

    size: int
    """Pixels of a side; smaller pictures are not enlarged to it."""
    images: int
    """The least number that the first stage must see."""
    stages: Sequence[Stage]


class Opened(NamedTuple):
    """A stage, read and traced; nothing is computed yet."""

    stage: Stage
    changes: Changes
    config: Mapping[str, Any]
    settings: Any
    mesh: Mesh
    traced: memory.Traced
    fits: bool
    """Whether one sample does in this device's memory, at the least."""


class Measured(NamedTuple):
    """A stage that has made some steps here."""

    opened: Opened
    images_per_second: float
    overhead: float
    """Seconds that opening, compiling and saving took."""

    @property
    def seconds(self) -> float:
        """Those of a step."""
        return self.opened.settings.run.batch_size / self.images_per_second


def open_stage(stage: Stage, changes: Changes) -> Opened:
    """Reads and traces it, with the largest micro batch that fits; ValueError or OSError."""
    config = written.config(stage.base, changes)
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
    opened = Opened(stage, changes, config, s, mesh, traced, need(samples) <= limit)
    if samples == share or s.optimizer.micro_batch:
        return opened
    return open_stage(stage, {**changes, "optimizer.micro_batch": (samples, "What fits.")})


def measure(stage: Stage, changes: Changes, workdir: str) -> Measured:
    """Trains it for some steps as its command does, on its own data, in a workdir to throw away."""
    start, opened = time.time(), open_stage(stage, changes)
    s, mesh = opened.settings, opened.mesh
    runs.claim(workdir, opened.config)
    passes = optimizer.for_mesh(s.optimizer, s.run.batch_size, mesh)._replace(schedule="constant")
    inputs = stage.prepare(s, mesh)
    every = {"log_every": _LEFT_OUT, "sample_every": 0, "save_every": _STEPS}
    with inputs.batches:
        run = s.run._replace(steps=_STEPS, **every)
        state = loop.train(inputs, run, passes, mesh, pathlib.Path(workdir), opened.config)
    exit_if_stopped(state, _STEPS)
    lines = log.read_metrics(pathlib.Path(workdir) / log.METRICS)
    speeds = [line["images_per_second"] for line in lines if line["step"] > _LEFT_OUT]
    speed = len(speeds) / sum(1 / each for each in speeds)
    spent = time.time() - start - _STEPS * s.run.batch_size / speed
    return Measured(opened, speed, max(0.0, spent))


def choose(
    rungs: Sequence[Rung], side: float, seconds: float,
    opened: Callable[[Stage], Opened], measured: Callable[[Stage], Measured],
) -> Rung:  # fmt: skip
    """The last rung that the pictures' size, the memory and the time allow; the first is for all.

    The first one's first stage is measured; others do as much arithmetic a second.
    """
    if len(rungs) == 1:
        return rungs[0]
    first = measured(rungs[0].stages[0])
    rate = first.images_per_second * first.opened.traced.flops

    def allowed(rung: Rung) -> bool:
        if rung.size > side:
            return False
        base = rung.stages[0]
        sees = rate / opened(base).traced.flops * seconds * base.share
        # Others are traced, which takes seconds, only where it decides.
        return sees >= rung.images and all(opened(stage).fits for stage in rung.stages)

    return [rungs[0], *filter(allowed, rungs[1:])][-1]


def timed(measured: Measured, seconds: float) -> tuple[Changes, float]:
    """Steps that fill so many seconds, with what depends on them, and the seconds that they take.

    ValueError if those are no training.
    """
    s = measured.opened.settings
    drawing = 0.0
    if hasattr(s, "sampler"):  # An evaluation with guidance is two thirds of a training step.
        images = len(s.run.prompts) * s.sampler.steps * (1 + (s.sampler.guidance != 1))
        drawing = SHEETS * images / (3 * measured.images_per_second)
    besides = 2 * measured.overhead + drawing  # What draws is compiled too.
    steps = int((seconds - besides) / measured.seconds)
    if steps < _LEAST:
        least = (besides + _LEAST * measured.seconds) / measured.opened.stage.share
        hours = 1.1 * least / 3600  # Two digits of it are shown.
        raise ValueError(
            f"the time is enough for {max(0, steps)} steps of {measured.opened.stage.base} here: "
            f"give --hours={hours:.2g} or more"
        )
    every = lambda period: min(steps, max(1, round(period / measured.seconds)))
    speed = f"{measured.images_per_second:.3g} images/s, measured"
    changes = {
        "steps": (steps, f"{(seconds - besides) / 3600:.2g} hours at {speed}."),
        "log_every": (every(20), ""),
        "sample_every": (max(1, steps // SHEETS), ""),
        "save_every": (every(600), "Ten minutes."),
        "keep_every": (0, ""),
        "optimizer.schedule": ("cosine", "To 0 at the last step: for longer, raise steps first."),
        "optimizer.warmup": (min(s.optimizer.warmup, steps // 10), ""),
    }
    return changes, steps * measured.seconds + besides
