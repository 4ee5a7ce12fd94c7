"""The training loop of every system, from the first batch to the last checkpoint.

The loop continues from the newest checkpoint in the workdir. On SIGTERM, SIGHUP or Ctrl-C it saves
a checkpoint and stops. If a step hangs, a watchdog ends the process.
"""

import contextlib
import functools
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from diffusion_jax import heldout, runs
from diffusion_jax.config.picture_fields import PREFIX
from diffusion_jax.config.settings import Optimizer, Run
from diffusion_jax.data.pipeline import Batches, to_global
from diffusion_jax.devices import distributed, flops, stop_signals
from diffusion_jax.devices.sharding import (
    ambient,
    batch_sharding,
    batch_ways,
    place,
    place_all,
    placed,
    replicated,
    shardings,
)
from diffusion_jax.draw.program import make_draw
from diffusion_jax.draw.seeds import halves, keys_of
from diffusion_jax.files.manifest import read_averages_from
from diffusion_jax.logs import events
from diffusion_jax.logs.run_log import MetricWriter, read_cpu_seconds, write_manifest, write_seconds
from diffusion_jax.task import Params, Task, Texts
from diffusion_jax.train import autotuning, not_finite, out_of_memory
from diffusion_jax.train.checkpoint import Checkpointer, restore_state
from diffusion_jax.train.measuring import Examples, Measurements, Scoring, attempt, is_due
from diffusion_jax.train.moving_average import constant_decay, warmup_decay
from diffusion_jax.train.optimizer import make_optimizer, num_passes, snapshot_every
from diffusion_jax.train.state import TrainState, averaged, image_keys, init_state, make_train_step
from diffusion_jax.train.step_report import IN_FLIGHT, StepReport
from diffusion_jax.train.trace import NO_TRACE, Trace
from diffusion_jax.train.watchdog import Watchdog

OpenPrompts = Callable[[Sequence[str]], Callable[[Sequence[str]], Texts]]
"""Maps all prompts of an evaluation to a function that tokenizes a batch of these prompts."""


class RunInputs(NamedTuple):
    """The inputs of a run, opened and checked.

    A system's `prepare` returns them without `evaluation` and `records`. The training command adds
    these two for all systems.
    """

    task: Task
    batches: Batches
    examples: Examples = Examples({}, (), 0.0)
    evaluation: Scoring | None = None
    start: Callable[[], Params] | None = None
    """Reads the initial parameters as host arrays. None: task.init creates random parameters."""
    records: heldout.HeldOutRecords | None = None
    """The records for the held-out loss. None: training does not measure a held-out loss."""
    base: str = ""
    """A hash of the frozen weights that a LoRA adapts; "" without LoRA."""
    open_prompts: OpenPrompts | None = None
    """Opens the prompts of an evaluation. None: the system does not draw from prompts."""


BatchShapes = tuple[tuple[int, ...], ...]


class CompiledStep(NamedTuple):
    """A compiled training step, for batches of one shape."""

    step: Any
    """The compiled function (state, frozen, batch, key) -> (state, metrics), a jax.stages.Compiled.
    """
    flops: float
    """The number of floating-point operations in one step, counted in its jaxpr."""


def train(
    inputs: RunInputs,
    run: Run,
    settings: Optimizer,
    mesh: Mesh,
    workdir: pathlib.Path,
    config: Mapping[str, Any],
    trace: Trace = NO_TRACE,
    program: CompiledStep | None = None,
    cpu_seconds: float = math.inf,
) -> TrainState:
    """Train to step `run.steps`, continuing from the newest checkpoint in `workdir`.

    Args:
        inputs: The task, its data, and the examples and scores computed during training.
        run: Steps, batch size, seed, and the intervals of logging, drawing and saving.
        settings: The optimizer, and the micro batch.
        mesh: The devices. `task.rules` place the parameters and frozen weights on them.
        workdir: The folder for metrics, samples/, checkpoints/ and manifest.json.
        config: The run's config, which is written to the manifest and the checkpoints.
        trace: The steps to trace for xprof.
        program: The step that `warm_up` compiled for the same task and settings; None: compile it.
        cpu_seconds: The run also ends once its steps, those of earlier starts included, have taken
            this CPU time. With several processes, this must be infinite.

    Returns:
        The last state. After a signal, such as SIGTERM, or if the CPU time is spent, its step is
        below `run.steps`.

    Raises:
        NothingLearned: Too many steps in a row were skipped (settings.max_skipped, or at most 10
            before the first finite step). No checkpoint of the last step is saved.
        OutOfMemory: The step does not fit in the memory of a device.
        NotSaved: A checkpoint or snapshot cannot be written.
    """
    task, batches = inputs.task, inputs.batches
    evaluation, records = inputs.evaluation, inputs.records
    with contextlib.ExitStack() as stack:
        # From the first step until the last save, a signal only sets a flag. Before the first step,
        # it ends the process, because there is nothing to save. The watchdog ends a hung step.
        release = functools.partial(runs.release, workdir)
        should_stop = stack.enter_context(stop_signals.stopping(release))
        watchdog = Watchdog(run.step_timeout, distributed.advice)
        stack.callback(watchdog.close)

        # Set up the state: the newest checkpoint's, or a new one.
        tx, key, create, layout = set_up(task, run, settings, mesh)
        frozen = place_all(task.frozen, mesh, task.rules)
        checkpoints = Checkpointer(workdir / runs.CHECKPOINTS, run.keep_last, run.keep_every)
        stack.callback(checkpoints.close)
        newest = checkpoints.latest_step()
        tuned, began = autotuning.find(workdir, run.deterministic), time.time()
        write_manifest(workdir, config, run.seed, newest or 0, tuned.loaded)
        state = starting_state(workdir, newest, create, key, layout, batches, inputs.start)
        first_step = int(state.step)
        draw = make_draw(task.sample, frozen, mesh)
        passes = num_passes(settings, run.batch_size, mesh)
        rows = run.batch_size // passes
        heldout_losses = heldout.make_scorer(task, frozen, mesh, records, rows) if records else None
        measurements = Measurements(
            run, inputs.examples, evaluation, records, draw, heldout_losses, workdir, attempt(workdir)
        )
        missing = measurements.missing(first_step)
        cpu_seconds -= read_cpu_seconds(workdir, first_step)
        if first_step >= run.steps or cpu_seconds <= 0:
            if missing:
                with contextlib.closing(MetricWriter(workdir, config, first_step)) as writer:
                    measurements.take(missing, first_step, state, writer)
            logging.info("%s is at step %d already: nothing to train", workdir, first_step)
            return state
        events.import_beside()

        # From here on, a lost process ends this one without waiting for a save.
        stack.enter_context(distributed.ending_at_disconnection())

        # Compile the step for each shape of batches. From here on, OutOfMemory lists what fills the
        # device.
        batch = to_global(next(batches), batch_sharding(mesh))
        explained = out_of_memory.explained(
            workdir, {**state._asdict(), "frozen": frozen, "batch": batch}, rows // batch_ways(mesh)
        )
        sizes = stack.enter_context(explained)
        compiling = time.time()
        if program is None:
            since = read_averages_from(workdir)
            train_step = make_step(task, settings, tx, layout, passes, since)
            programs = compiled_all(train_step, state, frozen, batch, key, batches, tuned.options)
            autotuning.keep(workdir, tuned)
        else:
            programs = {shapes_of(batch): program}
        sizes["the step's temporaries"] = max(
            each.step.memory_analysis().temp_size_in_bytes for each in programs.values()
        )

        # Set up metrics, reports and snapshots.
        seconds = {"starting": compiling - began, "compiling": time.time() - compiling}
        writer = MetricWriter(workdir, config, first_step)
        stack.callback(writer.close)
        stack.callback(trace.close)
        progress = StepReport(run, writer, mesh.size, batches, seconds)
        write_seconds(workdir, progress.seconds)
        skips = not_finite.SkippedSteps(first_step, int(state.skipped), IN_FLIGHT, settings.max_skipped)
        snapshot_steps = snapshot_every(settings, run.steps)
        snapshots = checkpoints.snapshots() if snapshot_steps else None
        if missing:
            with progress.paused("drawing and scoring"), watchdog.paused():
                measurements.take(missing, first_step, state, writer)

        for step in range(first_step + 1, run.steps + 1):
            # Take a step. The host runs up to IN_FLIGHT steps ahead of the devices.
            watchdog.beat()
            with trace.step(step) as results:
                chosen = programs[shapes_of(batch)]
                state, metrics = chosen.step(state, frozen, batch, key)
                results.append(metrics)
            progress.add(metrics, chosen.flops)
            stopped = should_stop(step) or progress.cpu_seconds() >= cpu_seconds
            last = stopped or step == run.steps

            # Report the metrics. A skipped step is noticed IN_FLIGHT steps later, so that the host
            # does not wait for the devices.
            skipped = skips.failed(step, batch, metrics, last)
            if step % run.log_every == 0 or last:
                progress.report(step)
            if skipped:  # The first skipped step: run its batch again to find the module at fault.
                skipped_step, skipped_batch = skipped
                names = functools.partial(batches.names, back=step - skipped_step)
                with progress.paused("checking"), watchdog.paused():
                    not_finite.investigate(
                        workdir / not_finite.REPORT,
                        skipped_step,
                        step,
                        task.loss,
                        state.params,
                        frozen,
                        skipped_batch,
                        image_keys(key, skipped_step - 1, run.batch_size),
                        passes,
                        replicated(mesh),
                        names,
                    )

            # Save. The watchdog is not paused, because a save waits for all processes and may hang.
            if evaluation and measurements.is_scored(step, before_save=True):
                with progress.paused("drawing and scoring"), watchdog.paused():
                    writer.write_scalars(step, evaluation.score(draw, averaged(state)))
            if snapshots and is_due(step, snapshot_steps, run.steps):
                with progress.paused("saving"):
                    snapshots.save(step, state)
            if step % run.save_every == 0 or last:
                with progress.paused("saving"):
                    writer.flush()  # Write the metrics to disk before the checkpoint.
                    checkpoints.save(step, state, batches, config, read_back=not stopped)
                write_seconds(workdir, progress.seconds)

            # Draw the examples, score pictures, and measure the held-out loss. A run that is told
            # to stop does so when it continues.
            due = measurements.due(step)
            if due and (not stopped or step == run.steps):
                with progress.paused("drawing and scoring"), watchdog.paused():
                    measurements.take(due, step, state, writer)
            if last:
                write_seconds(workdir, progress.seconds)
                break

            with progress.waiting():
                batch = to_global(next(batches), batch_sharding(mesh))
    return state


def make_step(
    task: Task,
    settings: Optimizer,
    tx: optax.GradientTransformationExtraArgs,
    layout: Any,
    passes: int = 1,
    averages_from: int = 0,
):
    """Return the jitted training step, a function (state, frozen, batch, key) -> (state, metrics).

    The step donates its state. `tx` is the optimizer, and `layout` holds the state's shardings. The
    step computes the gradient in `passes` passes, each over a part of the batch. The averages of
    the weights begin at step `averages_from`.
    """
    step = make_train_step(
        task.loss,
        tx,
        settings.ema_decays,
        settings.ema_widths,
        passes=passes,
        clip=settings.clip,
        decay_at=warmup_decay if settings.ema_warmup else constant_decay,
        averages_from=averages_from,
        constrain=task.constrain,
    )
    # Metrics are replicated like state.step, so that each process can read them.
    step = ambient(layout.step.mesh, step)
    return jax.jit(step, donate_argnums=0, out_shardings=(layout, layout.step))


def warm_up(
    task: Task, run: Run, settings: Optimizer, mesh: Mesh, batch: Mapping[str, np.ndarray], workdir: pathlib.Path
) -> CompiledStep:
    """Compile the training step, run it once on `batch`, and return the compiled step.

    The results of the step are discarded. `batch` holds this process's rows of an artificial batch.
    On GPUs, XLA's choices of kernels are loaded from the workdir, or written there.
    """
    tx, key, create, layout = set_up(task, run, settings, mesh)
    state = new_state(create, key, layout)
    frozen, rows = place_all(task.frozen, mesh, task.rules), to_global(batch, batch_sharding(mesh))
    passes = num_passes(settings, run.batch_size, mesh)
    step = make_step(task, settings, tx, layout, passes, read_averages_from(workdir))
    tuned = autotuning.find(workdir, run.deterministic)
    program = compiled(step, (state, frozen, rows, key), tuned.options)
    autotuning.keep(workdir, tuned)
    jax.block_until_ready(program.step(state, frozen, rows, key))
    return program


def set_up(task: Task, run: Run, settings: Optimizer, mesh: Mesh):
    """Return (optimizer, the run's random key, create, layout).

    create(key) returns the state at step 0. `layout` holds the sharding of each leaf of the state.
    """
    tx = make_optimizer(settings, run.steps)
    to_key = jax.jit(lambda seeds: keys_of(seeds)[0], out_shardings=replicated(mesh))
    key = to_key(halves([run.seed]))
    create = lambda key: init_state(task.init(key), tx, settings.ema_decays, settings.ema_widths)
    return tx, key, create, shardings(jax.eval_shape(create, key), mesh, task.rules)


def compiled_all(
    step: Any,
    state: TrainState,
    frozen: Any,
    batch: Mapping[str, Any],
    key: Any,
    batches: Batches,
    options: Mapping[str, Any],
) -> dict[BatchShapes, CompiledStep]:
    """Compile the training step for each shape of batch in the data. `batch` is the first batch.

    `options` are XLA's options for the step, which `autotuning` chooses. Returns the compiled
    steps, keyed by the shapes of their batch.
    """
    programs = {shapes_of(batch): compiled(step, (state, frozen, batch, key), options)}
    examples = batches.examples()
    for number, example in enumerate(examples, 1):
        shape = lambda name, x, rows=example: (len(x), *rows[name].shape[1:])
        rows = {name: jax.ShapeDtypeStruct(shape(name, x), x.dtype, sharding=x.sharding) for name, x in batch.items()}
        if shapes_of(rows) not in programs:
            logging.info("the batch shape of bucket %d of %d:", number, len(examples))
            programs[shapes_of(rows)] = compiled(step, (state, frozen, rows, key), options)
    return programs


def shapes_of(batch: Mapping[str, Any]) -> BatchShapes:
    """Return the shapes of a batch's arrays, the key of the compiled step for such batches."""
    return tuple(x.shape for x in batch.values())


def compiled(step: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> CompiledStep:
    """Return the step compiled for the arguments (state, frozen, batch, key). Log the times.

    `options` are XLA's options for the step, which `autotuning` chooses. All processes wait until
    each of them has compiled the step.
    """
    logging.info("compiling the step ...")
    times = [time.time()]
    traced = step.trace(*arguments)
    times.append(time.time())
    lowered = traced.lower()
    times.append(time.time())
    executable = autotuning.compile_step(lowered, options)
    times.append(time.time())
    logging.info(
        "the train step for %s: traced in %.1f s, lowered in %.1f s, compiled in %.1f s",
        jax.default_backend(),
        *np.diff(times),
    )
    if jax.process_count() > 1:  # Otherwise, the first step would wait for the slowest process.
        multihost_utils.sync_global_devices("compiled")
    return CompiledStep(executable, float(flops.count(traced.jaxpr.jaxpr)))


def new_state(create: Callable[[Any], TrainState], key: Any, layout: Any) -> TrainState:
    """Return the state at step 0. The arguments are results of `set_up`.

    On GPUs, JAX's own kernel draws the random bits. Otherwise XLA would compile the random numbers
    of each parameter anew: for base64_500m, 204 s on two CPU cores instead of 23.
    """
    before = jax.config.jax_threefry_gpu_kernel_lowering  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)
    try:
        return jax.jit(create, out_shardings=layout)(key)
    finally:
        jax.config.update("jax_threefry_gpu_kernel_lowering", before)


def starting_state(
    workdir: pathlib.Path,
    step: int | None,
    create: Callable[[Any], TrainState],
    key: Any,
    layout: Any,
    batches: Batches,
    start: Callable[[], Params] | None,
) -> TrainState:
    """Return the state in the checkpoint of `step`, and move `batches` to the saved position.

    If `step` is None, return a new state. Its parameters and averages come from `start`, or from
    `create` if `start` is None. `create`, `key` and `layout` are results of `set_up`.
    """
    if step is None:
        state = new_state(create, key, layout)
    else:
        logging.info("continuing from the checkpoint of step %d", step)
        shapes = placed(jax.eval_shape(create, key), layout)
        state = restore_state(workdir / runs.CHECKPOINTS, shapes, batches, step)
    if start is None or step is not None:
        return state
    # `start` reads the network alone; a learned loss weighting keeps its initial values. So do
    # fields of data.fields that the network was trained without.
    read = start()
    params, layers = {**state.params, **read}, state.params.get("params", {})
    if new := {name: layers[name] for name in layers if name.startswith(PREFIX)}:
        params["params"] = {**new, **read["params"]}
    copy = lambda: jax.tree.map(place, params, layout.params)
    return state._replace(params=copy(), ema={decay: copy() for decay in state.ema})
