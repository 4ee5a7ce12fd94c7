"""Rehearse a run before its first step: trace everything that it will compute, compile nothing.

The loss, the training step, the sampler and the evaluation are traced with real texts, and with a
real record of each data source or bucket. The shapes in existing checkpoints are compared with the
run's shapes. The rehearsal takes seconds and finds errors that would otherwise appear during
training. If it finds none, it returns a report that describes the run.
"""

import collections
import contextlib
import datetime
import math
import pathlib
import shutil
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh

from diffusion_jax import files, heldout, runs
from diffusion_jax.config.settings import Optimizer, Run, read
from diffusion_jax.data.pipeline import LOSS_MASK
from diffusion_jax.devices import flops, hardware, programs, sharding
from diffusion_jax.draw.program import Draw, make_draw
from diffusion_jax.files import folder_lock, manifest, sheets
from diffusion_jax.logs import progress, run_log
from diffusion_jax.logs.progress import counted
from diffusion_jax.task import Params
from diffusion_jax.train import checkpoint, continuing, loop, memory
from diffusion_jax.train.moving_average import warmup_decay
from diffusion_jax.train.optimizer import make_optimizer, make_schedule, num_passes
from diffusion_jax.train.state import TrainState
from diffusion_jax.weights import restore

ReportLines = list[tuple[str, str]]
_SAMPLED, _READ_AT_ONCE = 256, 32
"""Number of pictures that `--rehearse` reads, and how many of them at once."""
_SECONDS = 5.0  # After this time, it reads no further pictures.


def rehearse(
    inputs: loop.RunInputs,
    run: Run,
    settings: Optimizer,
    mesh: Mesh,
    workdir: pathlib.Path,
    alone: bool = True,
    device_memory: float | None = None,
    ignore_memory: bool = False,
    source: continuing.ContinuedRun | None = None,
) -> str:
    """Trace everything that a run will compute, and return a report on the run.

    Args:
        inputs: The model, the batches and the examples that training would use.
        run: The run's steps, batch size and intervals.
        settings: The optimizer, and the micro batch.
        mesh: The devices of the run.
        workdir: The folder of the run. If it holds checkpoints, the newest one is compared with
            this run. Nothing is written to it.
        alone: Whether the command ends after the rehearsal. If so, the rehearsal also looks for
            damaged checkpoints. Otherwise, training looks for them when it starts.
        device_memory: Memory of one device in bytes. None: the memory of this machine's devices.
        ignore_memory: Whether to warn, instead of failing, if a step needs more memory than a
            device has.
        source: The checkpoint of another run that this run continues from, if any.

    Raises ValueError if the run would fail. All errors while tracing get a note that names the
    traced part.
    """
    start, task = time.time(), inputs.task
    count = num_passes(settings, run.batch_size, mesh)
    tx = make_optimizer(settings, run.steps)
    limit = device_memory or hardware.limit(jax.local_devices()[0])
    state = memory.new_state(task, settings, run.steps)
    layout = sharding.shardings(state, mesh, task.rules)
    example = inputs.batches.example()
    frozen = memory.shapes(task.frozen)
    shapes: list[str] = []
    with _named("a training step"):
        step = loop.make_step(task, settings, tx, layout, count)
        for of_bucket in inputs.batches.examples():
            batch = memory.batch_of(of_bucket, run.batch_size)
            shapes.append(_shapes_of({k: x for k, x in of_bucket.items() if x.ndim == 4}))
            jax.eval_shape(step, state, frozen, batch, memory.abstract_key())
        traced = memory.trace(task, state, example)
    if inputs.start and not source and not restore.steps(workdir / runs.CHECKPOINTS):
        inputs.start()  # Fails now, not after a workdir is claimed, if the weights do not fit.
    drawn, rows_drawn = _rehearse_drawing(inputs, state.params, mesh)
    if inputs.records:
        with _named("the held-out loss"), programs.rehearsal():
            one = inputs.records.first()
            heldout.make_scorer(task, frozen, mesh, one, run.batch_size)(state.params)
    plan = memory.plan(traced, mesh, run.batch_size, count, memory.USABLE * limit)
    begun = source.averages_from if source else manifest.read_averages_from(workdir)
    at_once = []
    if rows_drawn:
        temporary = memory.drawing(task, state.params, inputs.examples.batch, rows_drawn)
        drawing = plan.need._replace(batch=0, temporary=temporary)
        at_once.append(("drawn at once", _drawing_memory(drawing, rows_drawn, limit)))
    rows = [
        ("device", _devices(mesh)),
        ("parameters", f"{_count(state.params):,} trained, {_count(frozen):,} frozen"),
        ("data", f"{counted(len(inputs.batches.pictures), 'picture')}; {_shapes_of(example)}"),
        *inputs.batches.pictures.inventory().rows(),
        *([("read", _sample(inputs.batches.pictures))] if alone else []),
        *([("buckets", "; ".join(shapes))] if len(shapes) > 1 else []),
        (
            "batch",
            f"{run.batch_size:,} images per step: {counted(count, 'pass')} of {plan.samples} "
            f"on each device; the largest micro batch that fits is {plan.largest}",
        ),
        ("memory", _memory(plan, limit, ignore_memory)),
        ("arithmetic", _arithmetic(traced.flops * run.batch_size, tx, state)),
        ("drawing", drawn),
        *at_once,
        ("learning", _learning(run, settings, len(inputs.batches.pictures), begun)),
        *_workdir(workdir, run, settings, memory.disk(run, settings, state), state, alone, source),
    ]
    rows.append(("rehearsed", f"in {time.time() - start:.1f} s; nothing was compiled"))
    return progress.block(rows)


def _arithmetic(work: float, tx: optax.GradientTransformation, state: TrainState) -> str:
    """Say how much a step computes: `work` FLOPs in its passes, and those of the optimizer."""
    traced = jax.make_jaxpr(tx.update)(state.params, state.opt_state, state.params)
    update = flops.count(traced.jaxpr)
    more = f", of which the optimizer takes {update / 1e12:.3g}" if update else ""
    return f"{(work + update) / 1e12:.3g} TFLOP a step{more}"


def _sample(pictures: Any) -> str:
    """Read pictures that are spread over the data set, and say how many cannot be used, and why.

    At most _SAMPLED pictures are read, for at most _SECONDS seconds. Raises ValueError if more of
    them are damaged than data.max_broken allows.
    """
    rows = np.unique(np.linspace(0, len(pictures) - 1, _SAMPLED).astype(int))
    before, start = collections.Counter(pictures.skipped()), time.monotonic()
    count, masked, masks = 0, 0, None
    for first in range(0, len(rows), _READ_AT_ONCE):
        chunk = rows[first : first + _READ_AT_ONCE]
        masks = pictures.columns(chunk).mask
        masked += 0 if masks is None else int((masks < 255).sum())
        count += len(chunk)
        if time.monotonic() - start > _SECONDS:
            break
    if masks is not None and not masked:
        logging.warning(
            "data.loss_mask has no effect on the %d pictures that were read: every pixel of them counts in full", count
        )
    skipped = collections.Counter(pictures.skipped()) - before
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in skipped.items())
    usable = f"left out: {reasons}" if reasons else "all can be used"
    return f"{counted(count, 'picture')}; {usable}"


def _learning(run: Run, settings: Optimizer, pictures: int, begun: int) -> str:
    """Return a text that says how much the run learns, and how much of that its pictures show.

    `begun` is the step at which the averages begin. Log a warning if the learning rate stays below
    half of optimizer.lr, or if a tenth of the average that pictures are drawn with still comes from
    the initial weights at the last step.
    """
    steps = np.linspace(settings.restart, run.steps - 1, 1000)
    peak = float(np.max(make_schedule(settings, run.steps)(steps))) / settings.lr
    epochs = run.steps * run.batch_size / pictures
    text = f"{epochs:.3g} passes over the pictures; the learning rate rises to {peak:.0%} of "
    text += f"optimizer.lr={settings.lr:g}"
    if peak < 0.5:
        logging.warning(
            "the learning rate reaches only %.0f %% of optimizer.lr, because optimizer.warmup is "
            "%d, but the run has %d steps: lower optimizer.warmup",
            100 * peak,
            settings.warmup,
            run.steps - settings.restart,
        )
    if not settings.ema_decays:
        return text
    decay, age = max(settings.ema_decays), jnp.arange(run.steps - begun)
    decays = warmup_decay(decay, age) if settings.ema_warmup else np.full(len(age), decay)
    initial = float(np.exp(np.log(np.maximum(np.asarray(decays), 1e-38)).sum()))
    if initial > 0.1:
        logging.warning(
            "at the last step, %.0f %% of the average that pictures are drawn with are the initial "
            "weights, because its decay rate is %g: set optimizer.ema_warmup=True",
            100 * initial,
            decay,
        )
    return (
        f"{text}; pictures are drawn with averaged weights (optimizer.ema_decays={decay:g}), which "
        f"at the end consist of {1 - initial:.1%} training and {initial:.1%} initial weights"
    )


def _jump(workdir: pathlib.Path, run: Run, settings: Optimizer, step: int) -> None:
    before = runs.load(workdir)
    old = read(Optimizer, before["optimizer"], "optimizer")
    was = float(make_schedule(old, before["steps"])(step)) / old.lr
    now = float(make_schedule(settings, run.steps)(step)) / settings.lr
    if abs(now - was) > 0.01:
        logging.warning(
            "at step %d, the learning rate jumps from %.0f %% to %.0f %% of optimizer.lr, because "
            "the schedule %r now ends at step %d instead of %d; to warm up again instead, set "
            "optimizer.restart=%d",
            step,
            100 * was,
            100 * now,
            settings.schedule,
            run.steps,
            before["steps"],
            step,
        )


def _rehearse_drawing(inputs: loop.RunInputs, params: Params, mesh: Mesh) -> tuple[str, int]:
    """Trace the sampler for the examples, with and without guidance, and for a scored batch.

    Returns a phrase for the report, the pictures and scores that training will produce, and the
    number of example pictures that each device draws at once.
    """
    examples, evaluation, parts = inputs.examples, inputs.evaluation, []
    with programs.rehearsal():
        draw = make_draw(inputs.task.sample, memory.shapes(inputs.task.frozen), mesh)
        if examples.captions:
            with _named("drawing"):
                size = _draw(draw, params, examples)
            parts.append(f"{counted(len(examples.captions), 'example')} of {size[1]}x{size[0]}")
        if evaluation:
            with _named("the evaluation"):
                evaluation.rehearse(draw, params)
            parts.append(f"scores after every {counted(evaluation.every, 'image')}")
    text = ", ".join(parts) or "nothing during training"
    return text, -(-examples.at_once // sharding.batch_ways(mesh))


def _drawing_memory(need: memory.Bytes, rows: int, limit: float | int) -> str:
    """Return a phrase with the memory for drawing. Log a warning if it may not fit on a device."""
    pictures = counted(rows, "picture")
    if need.total > memory.USABLE * limit:
        logging.warning(
            "drawing %s at once may not fit into a device's memory: it needs about %.2f of %.1f GB;"
            " pictures that do not fit are left out. Draw smaller ones, or set sample_every=0",
            pictures,
            need.total / 1e9,
            limit / 1e9,
        )
    return f"{pictures} on each device, for which it needs about {need.total / 1e9:.2f} GB"


def _draw(draw: Draw, params: Params, examples: loop.Examples) -> tuple[int, ...]:
    seeds, captions = list(range(examples.at_once)), examples.captions[: examples.at_once]
    texts = {name: array[: len(seeds)] for name, array in examples.batch.items()}
    images = draw(params, texts, seeds, np.full(len(seeds), examples.guidance, np.float32))
    guided, unguided = images.shape[1:], draw(params, texts, seeds, None).shape[1:]
    if guided != unguided or len(guided) != 3 or guided[2] != 3:
        raise ValueError(
            "the sampler must return pictures [height, width, 3] of the same shape with and "
            f"without guidance, but returned {list(guided)} and {list(unguided)}: check the Task's "
            "sample function"
        )
    sheets.contact_sheet(sheets.to_uint8(images), captions)
    return images.shape[1:3]


class _named:
    """A context manager that adds a note to errors raised inside it: "while rehearsing `what`"."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(f"(while rehearsing {self._what}, before anything was compiled)")


def _devices(mesh: Mesh) -> str:
    kind = mesh.devices.flat[0].device_kind
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f"{mesh.size} x {kind}, {counted(jax.process_count(), 'process')}; mesh: {sizes}"


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _shapes_of(example: dict[str, np.ndarray]) -> str:
    """Return a text with the shapes of a batch's rows, and the range of text lengths in tokens."""
    shapes = [f"{k} {'x'.join(map(str, x.shape[1:]))}".strip() for k, x in example.items()]
    masks = [x for name, x in example.items() if name.endswith("mask") and name != LOSS_MASK]
    lengths = [int(n) for mask in masks for n in mask.sum(1)]
    if not lengths:
        return ", ".join(shapes)
    shortest = f"{min(lengths)} to " if min(lengths) < max(lengths) else ""
    return f"{', '.join(shapes)}; texts of {shortest}{counted(max(lengths), 'token')}"


def _memory(plan: memory.Plan, limit: float | int, ignore: bool) -> str:
    """Return a text with the memory that a step needs. Log a warning if it may not fit on a device.

    Raises ValueError if the step certainly does not fit, unless `ignore` is True.
    """
    need = plan.need
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in need._asdict().items() if size)
    line = f"{need.total / 1e9:.2f} of {limit / 1e9:.1f} GB per device, estimated: {parts}"
    micro = f"set optimizer.micro_batch={plan.largest}" if plan.largest else "lower batch_size"
    advice = f"{micro}, or set unet.remat=True"
    if need.total > limit / memory.USABLE and not ignore:
        raise ValueError(
            f"a training step needs about {need.total / 1e9:.2f} GB per device ({parts}), but a "
            f"device has {limit / 1e9:.1f} GB: {advice}, or try with --ignore_memory"
        )
    if need.total > memory.USABLE * limit:
        logging.warning(
            "a training step may not fit into a device's memory: it needs about %.2f GB (%s) of %.1f GB; %s",
            need.total / 1e9,
            parts,
            limit / 1e9,
            advice,
        )
    return line


def _workdir(
    workdir: pathlib.Path,
    run: Run,
    settings: Optimizer,
    usage: memory.Disk,
    state: TrainState,
    alone: bool,
    source: continuing.ContinuedRun | None,
) -> ReportLines:
    """Return the report's rows on the workdir: its checkpoints, disk use, lock and time left.

    `usage` is the disk space of the finished run. `alone`: training will not follow, so damaged
    checkpoints are searched here. Raises ValueError if the run cannot write to the workdir, or
    cannot continue from its checkpoints.
    """
    if jax.process_index() == 0 or not files.store_path(workdir):
        files.check_writable(workdir, "--workdir")
    steps, free = restore.steps(workdir / runs.CHECKPOINTS), _free(workdir)
    disk = f"at most {counted(usage.checkpoints, 'checkpoint')} of {usage.checkpoint / 1e9:.2f} GB"
    disk += " each" * (usage.checkpoints > 1)
    if usage.snapshots:
        disk += f", {counted(usage.snapshots, 'snapshot')} of {usage.snapshot / 1e9:.3f} GB"
        disk += " each" * (usage.snapshots > 1)
    disk += f"; {free / 1e9:,.1f} GB are free" * (free < math.inf)
    written = len(steps) * usage.checkpoint
    written += len(restore.steps(workdir / restore.SNAPSHOTS)) * usage.snapshot
    # The old checkpoint is deleted only after the new one is written.
    if usage.total + usage.checkpoint - written > free:
        logging.warning("the disk may fill up: %s", disk)
    step, begin = 0, "a new run"
    if source:
        step, begin = source.step, f"continues {source.name}"
        _jump(files.path(source.run), run, settings, step)
    if steps:
        folder = workdir / runs.CHECKPOINTS
        step = restore.newest_sound(folder) if alone else steps[-1]
        with contextlib.suppress(*() if alone else (restore.Damaged,)):
            checkpoint.check(folder, step, state)
        if (workdir / runs.CONFIG).exists() and step < run.steps:
            _jump(workdir, run, settings, step)
        begin = f"continues from step {step:,}" + (", whose checkpoint is sound" if alone else "")
    rows = [("workdir", f"{workdir}: {begin}"), ("disk", disk)]
    if held := folder_lock.refusal(workdir):
        rows.append(("in use", held))
    return [*rows, ("time", _time_left(workdir, run, step))]


def _free(workdir: pathlib.Path) -> int | float:
    """Return the number of free bytes on the disk of a workdir; inf for a bucket."""
    if files.store_path(workdir):
        return math.inf
    existing = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _time_left(workdir: pathlib.Path, run: Run, step: int) -> str:
    path = workdir / run_log.METRICS
    lines = run_log.read_sound_metrics(path) if path.exists() else []
    speeds = [line["images_per_second"] for line in lines if line.get("images_per_second")]
    if not speeds:
        return f"{run.steps - step:,} steps; their speed is measured during training"
    left = datetime.timedelta(seconds=round((run.steps - step) * run.batch_size / speeds[-1]))
    return f"{run.steps - step:,} steps at {speeds[-1]:.3g} images/s, as last measured: {left}"
