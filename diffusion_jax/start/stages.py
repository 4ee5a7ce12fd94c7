"""Choose the model that the start command suggests, measure its speed, and set its steps."""

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
"""Number of times that training samples images for its prompts."""
_STEPS, _LEFT_OUT = 6, 2  # A measurement takes 6 steps, of which the first 2 do not count.
_LEAST = 20  # The smallest number of steps worth training.


class Stage(NamedTuple):
    """One network to train: a config of configs/, changes to it, and how to run it."""

    base: str
    """The config's name, such as base32_8m."""
    suffix: str
    """Suffix of the names of config and workdir; "" for the text-to-image stage."""
    command: str
    """The module that trains this stage, run with `python -m`."""
    prepare: Callable[[Any, Mesh], loop.Inputs]
    """prepare(settings, mesh) opens the task and the batches of a training run."""
    share: float = 1.0
    """Fraction of the total training time that this stage gets."""
    changes: Callable[[str], Changes] = lambda workdir: {}
    """changes(workdir) returns config changes; `workdir` is that of the stage with suffix ""."""


class Candidate(NamedTuple):
    """A model that may be chosen: its stages, and the conditions for choosing it."""

    image_size: int
    """Side of the model's pictures in pixels. It must not exceed that of the data."""
    min_images: int
    """Minimum number of images that the first stage must process within its training time."""
    stages: Sequence[Stage]


class Opened(NamedTuple):
    """A stage whose inputs are opened and whose training step is traced, but not yet run."""

    stage: Stage
    changes: Changes
    config: Mapping[str, Any]
    settings: Any
    mesh: Mesh
    traced: memory.Traced
    fits: bool
    """Whether the smallest micro-batch fits in a device's memory."""


class Measured(NamedTuple):
    """A stage whose speed was measured on this machine."""

    opened: Opened
    images_per_second: float
    overhead: float
    """Seconds for opening, compiling and saving."""

    @property
    def seconds(self) -> float:
        """Return the measured seconds per training step."""
        return self.opened.settings.run.batch_size / self.images_per_second


def open_stage(stage: Stage, changes: Changes) -> Opened:
    """Open a stage and trace its training step, with the largest micro-batch that fits.

    Raises ValueError or OSError if its config, data or weights cannot be used.
    """
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
    micro_batch = {"optimizer.micro_batch": (samples, "The largest that fits.")}
    return open_stage(stage, {**changes, **micro_batch})


def measure(stage: Stage, changes: Changes, workdir: str) -> Measured:
    """Measure the speed of a stage by training it for some steps in a temporary workdir."""
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
    candidates: Sequence[Candidate], side: float, seconds: float,
    opened: Callable[[Stage], Opened], measured: Callable[[Stage], Measured],
) -> Candidate:  # fmt: skip
    """Return the largest model that the picture size, memory and training time allow.

    The smallest model is always allowed. Only the speed of its first stage is measured. Other
    stages are assumed to reach the same FLOP/s.

    Args:
        candidates: single models or cascades, from the smallest to the largest.
        side: the side of the training pictures in pixels.
        seconds: the total training time.
        opened: a function that opens and traces a stage.
        measured: a function that measures the speed of a stage.
    """
    if len(candidates) == 1:
        return candidates[0]
    first = measured(candidates[0].stages[0])
    rate = first.images_per_second * first.opened.traced.flops

    def allowed(candidate: Candidate) -> bool:
        if candidate.image_size > side:
            return False
        base = candidate.stages[0]
        num_images = rate / opened(base).traced.flops * seconds * base.share
        if num_images < candidate.min_images:
            return False
        # Tracing the other stages takes seconds, so it comes last.
        return all(opened(stage).fits for stage in candidate.stages)

    return [candidates[0], *filter(allowed, candidates[1:])][-1]


def timed(measured: Measured, seconds: float) -> tuple[Changes, float]:
    """Return config changes that fit training into `seconds`, and its expected time in seconds.

    The changes set the number of steps and the intervals that depend on this number. Raises
    ValueError if the time suffices for fewer than 20 steps.
    """
    s = measured.opened.settings
    drawing = 0.0
    if hasattr(s, "sampler"):  # An evaluation with guidance is two thirds of a training step.
        images = len(s.run.prompts) * s.sampler.steps * (1 + (s.sampler.guidance != 1))
        drawing = SHEETS * images / (3 * measured.images_per_second)
    overhead = 2 * measured.overhead + drawing  # Twice, because the sampler is compiled too.
    steps = int((seconds - overhead) / measured.seconds)
    if steps < _LEAST:
        least = (overhead + _LEAST * measured.seconds) / measured.opened.stage.share
        hours = 1.1 * least / 3600  # The message shows two digits.
        raise ValueError(
            f"the time suffices for {max(0, steps)} steps of {measured.opened.stage.base} here: "
            f"give --hours={hours:.2g} or more"
        )
    every = lambda period: min(steps, max(1, round(period / measured.seconds)))
    speed = f"{measured.images_per_second:.3g} images/s, measured"
    changes = {
        "steps": (steps, f"{(seconds - overhead) / 3600:.2g} hours at {speed}."),
        "log_every": (every(20), ""),
        "sample_every": (max(1, steps // SHEETS), ""),
        "save_every": (every(600), "Ten minutes."),
        "keep_every": (0, ""),
        "optimizer.schedule": ("cosine", "To 0 at the last step; to train longer, raise steps."),
        "optimizer.warmup": (min(s.optimizer.warmup, steps // 10), ""),
    }
    return changes, steps * measured.seconds + overhead
