"""The training loop, whole, for every system.

Data -> sharded step -> metrics, pictures, checkpoints. It starts where the last whole checkpoint
ends, and SIGTERM makes it save and stop. A step that hangs ends the process.
"""

import contextlib
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from diffusion_jax import heldout, runs
from diffusion_jax.config.settings import Optimizer, Run
from diffusion_jax.data.pipeline import Batches, to_global
from diffusion_jax.draw.program import Draw, make_draw
from diffusion_jax.machine import distributed, flops, hardware, sheets
from diffusion_jax.machine.log import MetricWriter, noise_level_means, write_manifest
from diffusion_jax.machine.progress import step_line
from diffusion_jax.machine.sharding import (
    ambient,
    batch_sharding,
    batch_ways,
    place,
    place_all,
    placed,
    replicated,
    shardings,
)
from diffusion_jax.task import Metrics, Params, Task, Texts
from diffusion_jax.train import not_finite, out_of_memory
from diffusion_jax.train.checkpoint import Checkpointer
from diffusion_jax.train.optimizer import make_optimizer, snapshot_every
from diffusion_jax.train.state import (
    TrainState,
    averaged,
    constant_decay,
    init_state,
    make_train_step,
    micro_key,
    warmup_decay,
)
from diffusion_jax.train.trace import NO_TRACE, Trace
from diffusion_jax.train.watchdog import Watchdog

_IN_FLIGHT = 2  # Steps that the host may be ahead of the devices.


class Examples(NamedTuple):
    """A batch of texts to draw on the way, always from the same seeds, and their captions."""

    batch: Texts
    captions: tuple[str, ...]
    guidance: float


class Scoring(NamedTuple):
    """Scores on the way: after each `every` images, and at the end."""

    every: int
    score: Callable[[Draw, Params], Mapping[str, float]]
    rehearse: Callable[[Draw, Params], None] = lambda draw, params: None
    """Draws and scores one batch of whatever `draw` gives."""

    def is_due(self, step: int, batch_size: int) -> bool:
        """Whether this step passed a multiple of `every`."""
        return step * batch_size // self.every > (step - 1) * batch_size // self.every


class Inputs(NamedTuple):
    """All that training takes besides settings and mesh: opened and checked, nothing computed."""

    task: Task
    batches: Batches
    examples: Examples = Examples({}, (), 0.0)
    evaluation: Scoring | None = None
    start: Callable[[], Params] | None = None
    """Reads the parameters to start from, host arrays; None: the task's own initial ones."""
    records: heldout.Records | None = None
    """What the held-out loss is taken of, if it is."""
    base: str = ""
    """The fingerprint of the frozen weights that a LoRA adapts: see finetune."""


class Program(NamedTuple):
    """The compiled step."""

    step: Any
    """(state, frozen, batch, key) -> (state, metrics), with the program's memory_analysis()."""
    flops: float
    """Floating-point operations of one, as the program counts them."""


def train(
    inputs: Inputs, run: Run, settings: Optimizer, mesh: Mesh, workdir: pathlib.Path,
    config: Mapping[str, Any], trace: Trace = NO_TRACE, program: Program | None = None,
) -> TrainState:  # fmt: skip
    """Trains from the last checkpoint in `workdir`, or from the start, to step `run.steps`.

    Returns the last state, of an earlier step if SIGTERM came. `config` is kept for the record;
    `program` is what `warm_up` made of the same task and settings, else the step is compiled here.
    NothingLearned, and nothing saved, after settings.max_skipped skipped steps in a row;
    OutOfMemory where a device's memory does not hold what is asked.
    """
    task, batches = inputs.task, inputs.batches
    tx, key, create, layout = _plan(task, run, settings, mesh)
    frozen = place_all(task.frozen, mesh, task.rules)
    with contextlib.ExitStack() as stack:
        stopping = stack.enter_context(distributed.sigterm())  # It outlasts the last save.
        closing = lambda thing: stack.enter_context(contextlib.closing(thing))
        # Before what it is to see the end of.
        watchdog = closing(Watchdog(run.step_timeout, distributed.hanging))
        kept = workdir / runs.CHECKPOINTS, run.keep_last, run.keep_every
        checkpoints = closing(Checkpointer(*kept))
        state = _first_state(checkpoints, create, key, layout, batches, inputs.start)
        first = int(state.step)
        writer = closing(MetricWriter(workdir, config, first))
        write_manifest(workdir, config, run.seed, first)
        if first >= run.steps:
            logging.info("%s is at step %d already: nothing to train", workdir, first)
            return state
        rows, where = run.batch_size // settings.accumulate, batch_sharding(mesh)
        batch = to_global(next(batches), where)
        jitted, arguments = make_step(task, settings, tx, layout), (state, frozen, batch, key)
        told = _compiled(program, jitted, arguments, workdir, rows // batch_ways(mesh))
        program = stack.enter_context(told)
        closing(trace)
        progress = _Progress(run, writer, program.flops, mesh.size, batches)
        explain = _explainer(task, frozen, key, settings, batches, workdir, mesh)
        occasions = _occasions(inputs, run, settings, frozen, mesh, workdir, writer)
        save = _saver(run, settings, checkpoints, batches, config, progress)
        due = _beside(state, settings.max_skipped, explain, occasions, run.steps)

        for step in range(first + 1, run.steps + 1):
            watchdog.beat()
            with trace.step(step) as results:
                state, metrics = program.step(state, frozen, batch, key)
                results.append(metrics)
            progress.add(metrics)
            last = (stopped := stopping(step)) or step == run.steps
            aside = due(step, batch, metrics, last)
            if step % run.log_every == 0 or last:
                progress.report(step)
            for write in aside:
                with progress.paused(), watchdog.paused():
                    write(step, state)
            save(step, state, last, stopped)
            if last:
                break
            with progress.waiting():
                batch = to_global(next(batches), where)
    return state


def make_step(
    task: Task, settings: Optimizer, tx: optax.GradientTransformationExtraArgs, layout: Any
):
    """The jitted (state, frozen, batch, key) -> (state, metrics); the state is donated."""
    step = make_train_step(
        task.loss,
        tx,
        settings.ema_decays,
        settings.ema_widths,
        accumulate=settings.accumulate,
        one_noise=settings.micro_batch > 0,
        clip=settings.clip,
        decay_at=warmup_decay if settings.ema_warmup else constant_decay,
    )
    # Metrics are whole everywhere, as the step is, so that each process can read them.
    step = ambient(layout.step.mesh, step)
    return jax.jit(step, donate_argnums=0, out_shardings=(layout, layout.step))


@contextlib.contextmanager
def _compiled(program, step, arguments, workdir, samples) -> Iterator[Program]:
    """The program, compiled unless it is there; inside, full memory is explained."""
    state, frozen, batch, _ = arguments
    held = {**state._asdict(), "frozen": frozen, "batch": batch}
    with out_of_memory.explained(workdir, held, samples) as sizes:
        program = program or _compile(step, arguments)
        sizes["the step's temporaries"] = program.step.memory_analysis().temp_size_in_bytes
        yield program


def warm_up(
    task: Task, run: Run, settings: Optimizer, mesh: Mesh, batch: Mapping[str, np.ndarray]
) -> Program:
    """The step, compiled, and made once on made-up rows of this process: its state is dropped."""
    tx, key, create, layout = _plan(task, run, settings, mesh)
    state = jax.jit(create, out_shardings=layout)(key)
    frozen, rows = place_all(task.frozen, mesh, task.rules), to_global(batch, batch_sharding(mesh))
    step = make_step(task, settings, tx, layout)
    program = _compile(step, (state, frozen, rows, key))
    jax.block_until_ready(program.step(state, frozen, rows, key))
    return program


def _plan(task, run, settings, mesh):
    """The optimizer, the run's key, key -> the first state, and where a state's parts live."""
    tx = make_optimizer(settings, run.steps)
    key = jax.jit(jax.random.key, static_argnums=0, out_shardings=replicated(mesh))(run.seed)
    create = lambda key: init_state(task.init(key), tx, settings.ema_decays, settings.ema_widths)
    return tx, key, create, shardings(jax.eval_shape(create, key), mesh, task.rules)


def _compile(step, arguments) -> Program:
    logging.info("compiling the step ...")
    times = [time.time()]
    traced = step.trace(*arguments)
    times.append(time.time())
    lowered = traced.lower()
    times.append(time.time())
    compiled = lowered.compile()
    times.append(time.time())
    logging.info(
        "the train step for %s: traced in %.1f s, lowered in %.1f s, compiled in %.1f s",
        jax.default_backend(),
        *np.diff(times),
    )
    if jax.process_count() > 1:  # No step is to take the time that another process compiles.
        multihost_utils.sync_global_devices("compiled")
    return Program(compiled, float(flops.count(traced.jaxpr.jaxpr)))


def _first_state(checkpoints, create, key, layout, batches, start) -> TrainState:
    """The last checkpoint's state, or step 0's, whose averages are also what `start` reads."""
    step = checkpoints.latest_step()
    if step is None:
        state = jax.jit(create, out_shardings=layout)(key)
    else:
        logging.info("continuing from the checkpoint of step %d", step)
        state = checkpoints.restore(placed(jax.eval_shape(create, key), layout), batches, step)
    if start is None or step:
        return state
    # What a weighting learns is in no file: it starts as it is.
    params = {**state.params, **start()}
    copy = lambda: jax.tree.map(place, params, layout.params)
    return state._replace(params=copy(), ema={decay: copy() for decay in state.ema})


def _explainer(task, frozen, key, settings, batches, workdir, mesh):
    """explain(step, batch, now, state), which writes the report of a step that is not finite."""
    everywhere, accumulate = replicated(mesh), settings.accumulate

    def explain(step, batch, now, state):
        logging.warning("step %d is not finite: its batch runs again, to say where", step)
        step_key = jax.random.fold_in(key, step - 1)
        key_of = lambda index: micro_key(step_key, index, accumulate, settings.micro_batch > 0)
        keys = [key_of(index) for index in range(accumulate)]
        try:
            seen = not_finite.watch(task.loss, state.params, frozen, batch, keys, everywhere)
        except jax.errors.JaxRuntimeError as error:  # Out of memory, mostly: the run goes on.
            logging.warning("step %d is not finite, and could not run again: %s", step, error)
            return
        names = functools.partial(batches.names, back=now - step)
        not_finite.explain(workdir / not_finite.REPORT, step, now, seen, accumulate, names)

    return explain


def _beside(state, max_skipped, explain, occasions, steps):
    """due(step, batch, metrics, last): each write(step, state) that a step is followed by."""
    lookout = not_finite.Lookout(int(state.step), int(state.skipped), _IN_FLIGHT, max_skipped)

    def due(step, batch, metrics, last):
        found = lookout.failed(step, batch, metrics, last)
        explained = [functools.partial(explain, *found)] if found else []
        return explained + [write for when, write in occasions if when(step) or step == steps]

    return due


def _saver(run, settings, checkpoints, batches, config, progress):
    """save(step, state, last, stopped) of what is due. The watchdog sees it: peers may hang."""
    every = snapshot_every(settings, run.steps)
    snapshots = checkpoints.snapshots(settings) if every else None

    def save(step, state, last, stopped):
        if snapshots and (step % every == 0 or step == run.steps):
            with progress.paused():
                snapshots.save(step, state)
        if step % run.save_every == 0 or last:
            with progress.paused():
                progress.flush()  # What a run goes on from has its metrics.
                checkpoints.save(step, state, batches, config, read_back=not stopped)

    return save


def _occasions(inputs, run, settings, frozen, mesh, workdir, writer):
    """What is drawn and measured on the way: is_due(step), and write(step, state), of each."""
    task, _, examples, evaluation, _, records, _ = inputs
    draw, occasions = make_draw(task.sample, frozen, mesh), []
    if run.sample_every:
        drawn = _example_drawer(draw, examples, workdir / "samples", run.seed)
        write = lambda step, state: writer.write_images(
            step, {"samples": drawn(step, averaged(state))}
        )
        occasions.append((lambda step: step % run.sample_every == 0, write))
    if evaluation:
        score = lambda step, state: writer.write_scalars(
            step, evaluation.score(draw, averaged(state))
        )
        occasions.append((lambda step: evaluation.is_due(step, run.batch_size), score))
    if records:
        rows = run.batch_size // settings.accumulate
        losses = heldout.make_scorer(task, frozen, mesh, records, rows)
        measure = lambda step, state: writer.write_scalars(
            step, heldout.of_all(losses, state.params, state.ema)
        )
        occasions.append((lambda step: step % records.every == 0, measure))
    return occasions


def _example_drawer(draw, examples, folder, seed):
    """draw(step, params): the examples, always from the same seeds, also as a PNG in `folder`."""
    seeds = [seed + i for i in range(len(examples.captions))]
    guidance = np.full(len(seeds), examples.guidance, np.float32)

    def draw_examples(step, params):
        images = sheets.to_uint8(draw(params, examples.batch, seeds, guidance))
        sheet = sheets.contact_sheet(images, examples.captions)
        if jax.process_index() == 0:
            folder.mkdir(exist_ok=True)
            sheets.write_png(folder / f"step_{step:08}.png", sheet)
        return sheet[None]

    return draw_examples


class _Progress:
    """Metrics since the last report, and the time that training, not drawing or saving, took."""

    def __init__(
        self, run: Run, writer: MetricWriter, flops: float, num_devices: int, batches: Batches
    ) -> None:
        self._run, self._writer, self._batches = run, writer, batches
        self._flops, self._num_devices = flops, num_devices
        self._metrics: list[Metrics] = []
        self._since, self._waited = time.time(), 0.0

    def add(self, metrics: Metrics) -> None:
        """Takes a step's metrics without waiting for them, but for those of two steps before."""
        self._metrics.append(metrics)
        if len(self._metrics) > _IN_FLIGHT:
            jax.block_until_ready(self._metrics[-1 - _IN_FLIGHT])

    def report(self, step: int) -> None:
        """Writes the means since the last report, and prints the progress line."""
        metrics = jax.device_get(self._metrics)
        seconds = (time.time() - self._since) / len(metrics)
        total = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *metrics)
        scalars = {k: v / len(metrics) for k, v in total.items() if np.ndim(v) == 0}
        scalars["skipped"] = metrics[-1]["skipped"]
        device = jax.local_devices()[0]
        line = {
            "images_per_second": self._run.batch_size / seconds,
            "loss": float(scalars["loss"]),
            "seconds_left": (self._run.steps - step) * seconds,
            "memory": hardware.memory(device),
            "utilization": hardware.utilization(
                self._flops, seconds, device.device_kind, self._num_devices
            ),
        }
        logging.info("%s", step_line(step, self._run.steps, **line))
        unusable = {f"data/{name}": count for name, count in self._batches.skipped().items()}
        speed = {
            "images_per_second": line["images_per_second"],
            "data/waiting": self._waited / (seconds * len(metrics)),
        }
        self._writer.write_scalars(step, scalars | noise_level_means(total) | speed | unusable)
        self._metrics, self._since, self._waited = [], time.time(), 0.0

    def flush(self) -> None:
        """Returns when what was reported is where it is kept."""
        self._writer.flush()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The time inside, which is for data, counts as waiting: a share of all, in the metrics."""
        start = time.time()
        with jax.profiler.TraceAnnotation("data"):
            yield
        self._waited += time.time() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside does not count."""
        jax.block_until_ready(self._metrics)
        start = time.time()
        yield
        self._since += time.time() - start
