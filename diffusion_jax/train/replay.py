"""Replay a training step: rebuild its state, batch and noise, and compare it with the run's log.

A step depends only on the config, the data and the step number. So training again from a checkpoint
before a step repeats the step, bit for bit, on the same machine with the same versions. On GPUs,
the replay uses the kernels of the run (see `autotuning`). The compiled training step computes the
metrics. A second program computes the loss of each example and the gradient norm of each module,
which training does not report. The rounding of the second program may differ from that of the
training step.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import UInt8

from diffusion_jax import runs
from diffusion_jax.config.settings import Optimizer, Run
from diffusion_jax.data.pipeline import Batches, to_global
from diffusion_jax.devices import sharding
from diffusion_jax.files import manifest, settings_record, sheets
from diffusion_jax.logs import run_log
from diffusion_jax.logs.progress import Meter
from diffusion_jax.train import autotuning, loop, step_report
from diffusion_jax.train.optimizer import num_passes
from diffusion_jax.train.state import image_keys
from diffusion_jax.weights import restore

_CHANGING = ("start", "first_step", "command", "autotuning", "config.steps", "seconds.")
"""Prefixes of the fields of the manifest that `changes` ignores, because each start of a run may
change them."""


class Window(NamedTuple):
    """A line of metrics.jsonl: the mean of each metric over the steps `first` + 1 to `last`."""

    first: int
    last: int
    logged: Mapping[str, float | None]


class ReplayedLine(NamedTuple):
    """The comparison of a line of metrics.jsonl with a replay of its steps.

    The line covers the steps `first` + 1 to `last`.
    """

    first: int
    last: int
    equal: Sequence[str]
    """Names of the metrics that are equal, bit for bit."""
    differ: Mapping[str, tuple[float | None, float | None]]
    """The metrics that differ: name -> (logged value, replayed value)."""


class Replayed(NamedTuple):
    """The result of replaying a step."""

    step: int
    checkpoint: int | None
    """The step of the checkpoint that the replay started from; None: the initial weights."""
    metrics: Mapping[str, float | None]
    """The metrics of this step alone, keyed by their names in metrics.jsonl."""
    compared: Sequence[ReplayedLine]
    """A comparison for each line of metrics.jsonl whose steps were all replayed."""
    modules: Mapping[str, float]
    """The gradient norm of each module before clipping."""
    examples: Sequence[Mapping[str, Any]]
    """A dict for each example of the batch, with the keys row, name, text, sigma and loss. If the
    task's loss does not label sigma and loss, these two are missing."""
    pictures: UInt8[np.ndarray, "B H W 3"] | None
    """The pictures of the batch, either as the network saw them or decoded from the batch. None if
    neither is possible."""


def replay(
    inputs: loop.RunInputs, run: Run, settings: Optimizer, mesh: Mesh, workdir: pathlib.Path, step: int
) -> Replayed:
    """Replay a step of the run in `workdir`. Nothing is written.

    If a line of metrics.jsonl covers the step, all steps of that line are replayed.

    Args:
        inputs: The inputs of the run, as the system's `prepare` returns them.
        run: The run's steps, batch size and seed.
        settings: The run's optimizer, and its micro batch.
        mesh: The devices of the replay.
        workdir: The folder with the checkpoints, metrics.jsonl and manifest.json.
        step: The step, from 1 to run.steps.

    Raises:
        ValueError: The step is out of range, or the checkpoint was trained on other data.
        restore.Damaged: All checkpoints before the step are damaged.
    """
    lineage = run_log.read_lineage(workdir)
    before = lineage["step"] if lineage else 0  # The last step of the run that this one continues.
    if not before < step <= run.steps:
        raise ValueError(f"--step={step}: {workdir} has the steps {before + 1} to {run.steps}, so choose one of these")
    # The line that covers the step is a mean over a window of steps: replay all of them.
    logged = windows(workdir)
    covering = [window for window in logged if window.first < step <= window.last]
    begin, end = covering[0][:2] if covering else (step - 1, step)
    checkpoint = _nearest(workdir / runs.CHECKPOINTS, begin)
    if checkpoint is None and lineage:
        raise ValueError(
            f"{workdir} continues {lineage['run']}@{before} and keeps no checkpoint up to step "
            f"{begin}: choose a later --step"
        )

    # Rebuild the state and the position in the data.
    task, batches = inputs.task, inputs.batches
    tx, key, create, layout = loop.set_up(task, run, settings, mesh)
    frozen = sharding.place_all(task.frozen, mesh, task.rules)
    state = loop.starting_state(workdir, checkpoint, create, key, layout, batches, inputs.start)

    # Train to the end of the window. Examine `step` just before it is taken.
    first, metrics, everywhere = int(state.step), {}, sharding.replicated(mesh)
    since = manifest.read_averages_from(workdir)
    passes = num_passes(settings, run.batch_size, mesh)
    train_step = loop.make_step(task, settings, tx, layout, passes, since)
    tuned = autotuning.find(workdir, run.deterministic)
    programs: dict[loop.BatchShapes, loop.CompiledStep] = {}
    modules = pictures = examples = None
    meter = Meter("steps", end - first, name="replaying")
    for now in range(first + 1, end + 1):
        batch = to_global(next(batches), sharding.batch_sharding(mesh))
        shapes = loop.shapes_of(batch)
        if shapes not in programs:
            arguments = (state, frozen, batch, key)
            programs[shapes] = loop.compiled(train_step, arguments, tuned.options)
        if now == step:
            keys = image_keys(key, now - 1, run.batch_size)
            modules, labels = step_report.examine(task, state.params, frozen, batch, keys, passes, everywhere)
            examples = _examples(batches, run.batch_size, labels)
            pictures = _pictures(frozen, batch, task.shown, everywhere)
        state, values = programs[shapes].step(state, frozen, batch, key)
        metrics[now] = jax.device_get(values)
        meter.add()
    assert modules is not None and examples is not None
    compared = [_compare(w, metrics) for w in logged if first <= w.first and w.last <= end]
    alone = _written(step, step_report.mean_metrics([metrics[step]]))
    return Replayed(step, checkpoint, alone, compared, modules, examples, pictures)


def windows(workdir: pathlib.Path) -> list[Window]:
    """Return a Window for each line of training metrics in a run's metrics.jsonl.

    The value `first` of a window is the last step of the previous window, or the step from which
    the run was continued, if that is later.
    """
    path, found = workdir / run_log.METRICS, []
    starts: list[int] = []
    for entry in run_log.read_manifest(workdir):
        # A start from an earlier checkpoint removes the lines after it.
        starts = [start for start in starts if start < entry["first_step"]]
        starts.append(entry["first_step"])
    last = 0
    for line in run_log.read_metrics(path) if path.exists() else []:
        if "grad_norm" in line:
            first = max([last, *(start for start in starts if start < line["step"])])
            last = line["step"]
            found.append(Window(first, last, line))
    return found


def changes(workdir: pathlib.Path, step: int, config: Mapping[str, Any]) -> str:
    """Describe how this process differs from the process that last trained `step` of the run.

    The comparison covers versions, devices, commit, environment variables and the config. `config`
    is the config that this process uses. Returns "" if all are equal, or if the manifest has no
    entry for the step.
    """
    entries = [run for run in run_log.read_manifest(workdir) if run["first_step"] < step]
    if not entries:
        return ""
    then = settings_record.flat(entries[-1])
    now = settings_record.flat(run_log.manifest_entry(config, then["seed"], 0))
    different = [name for name in then if now.get(name) != then[name]]
    names = [name for name in different if not name.startswith(_CHANGING)]
    return "; ".join(f"{name} was {then[name]} and is {now.get(name)}" for name in names)


def _nearest(folder: pathlib.Path, step: int) -> int | None:
    """Return the step of the newest undamaged checkpoint up to `step`.

    Return None if there is no checkpoint up to `step`. Raises restore.Damaged if all of these
    checkpoints are damaged.
    """
    if not any(saved <= step for saved in restore.steps(folder)):
        return None
    return restore.newest_sound(folder, until=step)


def _pictures(frozen, batch, shown, everywhere) -> np.ndarray | None:
    if "image" in batch:
        return jax.device_get(jax.jit(lambda x: x, out_shardings=everywhere)(batch["image"]))
    images = jax.device_get(jax.jit(shown, out_shardings=everywhere)(frozen, batch))
    if images is None:
        return None
    if np.isfinite(images).all():
        return sheets.to_uint8(images)
    logging.warning("the decoded pictures are not finite, so none is shown")
    return None


def _examples(batches: Batches, batch_size: int, labels: Mapping[str, np.ndarray]):
    """Return a dict for each row of the last batch, with the keys row, name, text and the labels.

    `labels` holds an array [batch_size] for each label.
    """
    names, texts = batches.names(range(batch_size)), batches.texts(range(batch_size))
    rows = []
    for row, (name, text) in enumerate(zip(names, texts, strict=True)):
        numbers = {label: float(values[row]) for label, values in labels.items()}
        text = text if isinstance(text, str) else ""
        rows.append({"row": row, "name": name, "text": text, **numbers})
    return rows


def _compare(window: Window, metrics: Mapping[int, Any]) -> ReplayedLine:
    steps = range(window.first + 1, window.last + 1)
    here = _written(window.last, step_report.mean_metrics([metrics[step] for step in steps]))
    both = [name for name in here if name in window.logged]
    differ = {k: (window.logged[k], here[k]) for k in both if window.logged[k] != here[k]}
    equal = [name for name in both if name not in differ]
    return ReplayedLine(window.first, window.last, equal, differ)


def _written(step: int, scalars: Mapping[str, Any]) -> dict[str, float | None]:
    """Return metrics as if they were written to metrics.jsonl and read back: NaN becomes None."""
    line = run_log.metrics_line(step, {name: float(value) for name, value in scalars.items()})
    return {name: value for name, value in json.loads(line).items() if name != "step"}
