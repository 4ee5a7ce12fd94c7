"""Continue a run in a new workdir with changed settings: --continue_from=RUN.

The new workdir starts with one checkpoint: the state of the other run, in the arrays that the new
config asks for. From there, training continues as from any other checkpoint of the workdir.
"""

import contextlib
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from diffusion_jax import files, runs, systems
from diffusion_jax.config import picture_fields
from diffusion_jax.config.named import calls
from diffusion_jax.config.settings import Optimizer, Run
from diffusion_jax.data.pipeline import Batches, OtherData
from diffusion_jax.devices import distributed
from diffusion_jax.devices.sharding import placed
from diffusion_jax.files import checksums, manifest, settings_record
from diffusion_jax.logs import progress, run_log
from diffusion_jax.train import checkpoint, loop, optimizer
from diffusion_jax.train.state import TrainState
from diffusion_jax.weights import finetune, restore

# Prefixes of the config fields that --continue_from accepts: no array has another shape or meaning.
_CHANGES = (
    *runs.FREE,
    "batch_size",
    "seed",
    "deterministic",
    "log.",
    "optimizer.",
    "data.",
    "lora.scale",
    "text.drop_prob",
    "text.weights",
    "text.dtype",
    "conditioning.drop_to",
    "unet.weights",
    "unet.dropout",
    "unet.dtype",
    "vae.weights",
    "vae.dtype",
    "latents.image_size",
    "diffusion.offset_noise",
    "diffusion.distance",
    "reconstruction.distance",
    "reconstruction.kl",
)
_RECORDS = ("data.source", "data.path", "data.mixture", "data.prior")
"""Config fields that choose the records. If one of them changes, the data start anew."""


class ContinuedRun(NamedTuple):
    """The checkpoint of another run that a new workdir continues from."""

    run: str
    """The workdir of the other run."""
    step: int
    changed: dict[str, tuple[Any, Any]]
    """The config fields that differ: name -> (value in the other run, value in the new run)."""
    adds_lora: bool
    """Whether the new run trains a LoRA on the weights of the other run."""
    less_heldout: float | None = None
    """The smallest share of held-out pictures so far, if the new run holds out more of them."""

    @property
    def name(self) -> str:
        """The checkpoint as RUN@STEP, the form in which unet.weights names it."""
        return f"{self.run}@{self.step}"

    @property
    def averages_from(self) -> int:
        """The step at which the averages begin."""
        return self.step if self.adds_lora else manifest.read_averages_from(self.run)

    @property
    def folder(self) -> Any:
        """The folder of the checkpoint."""
        return restore.absolute(files.path(self.run) / runs.CHECKPOINTS) / str(self.step)


def find(workdir: pathlib.Path, named: str, config: dict[str, Any]) -> ContinuedRun | None:
    """Return the checkpoint from which a workdir continues, or None if it needs none.

    It needs none if it has checkpoints of its own. If the start before was killed before it wrote
    the first one, the result is the checkpoint that this start had chosen.

    Args:
        workdir: The workdir of the new run.
        named: The value of --continue_from: RUN, RUN@STEP or RUN:STEP; "" for none. Without a step,
            it is the newest undamaged checkpoint.
        config: The config of the new run. If it adds a LoRA and names no weights of its own, its
            field unet.weights becomes RUN@STEP.

    Raises:
        ValueError: `workdir` is a run already, or the config changes a setting that has to stay.
        FileNotFoundError: There is no such run or checkpoint.
    """
    distributed.check_equal({"--continue_from": named}, "start all processes with the same value")
    (run, step), lineage = _parsed(named), run_log.read_lineage(workdir)
    started = restore.steps(workdir / runs.CHECKPOINTS)
    if lineage:
        same = not run or (run == lineage["run"] and step in (None, lineage["step"]))
        origin, run, step = "{run}@{step}".format(**lineage), lineage["run"], lineage["step"]
    else:
        same, origin = not (run and started), "no other run"
    if not same:
        raise ValueError(
            f"--continue_from={named}, but {workdir} holds a run that continues {origin}: choose a "
            "new --workdir, or leave --continue_from out"
        )
    if started and lineage:
        _adapt(config, f"{run}@{step}", run)
    if started or not run:
        return None
    if files.path(run).is_file():
        raise ValueError(
            f"--continue_from={run} is a file, which holds no optimizer or position in the data: "
            "start from its weights with --config.unet.weights. To train on from a LoRA file, "
            "first merge it into its model with `weights convert --lora=FILE --to=RUN`"
        )
    before, root = runs.load(run), files.path(run) / runs.CHECKPOINTS
    restore.check_exists(restore.absolute(root), step)
    newest = restore.newest_sound(root, until=step)
    if step not in (None, newest):
        others = [other for other in restore.steps(root) if other != step]
        advice = f"choose another of {others}" if others else f"the run {run} has no other"
        raise restore.Damaged(f"the checkpoint {run}@{step} is damaged: {advice}")
    adds_lora = bool(_rank(config)) and not _rank(before)
    _adapt(config, f"{run}@{newest}", run)
    now = json.loads(json.dumps(systems.complete(config)))
    free = ("version", *_CHANGES, *runs.unread_text(now), *(["lora."] if adds_lora else []))
    # A run that learned a word trained nothing else: its base holds the model.
    base = before["unet"]["weights"] if before.get("text", {}).get("learned_tokens") else run
    weights = f"--config.{'unet' if 'unet' in now else 'vae'}.weights={base}"
    if refused := settings_record.differences(before, now, free):
        raise ValueError(
            f"--continue_from={run} cannot change these settings ({refused}): use the stored "
            f"values, or start from the weights alone with {weights}"
        )
    if "unet.weights" in settings_record.changed_fields(before, now) and not _rank(now):
        raise ValueError(
            f"--continue_from={run} takes the weights of this run, but unet.weights is "
            f"{now['unet']['weights']!r}: leave one of them out"
        )
    ranges = [picture_fields.ranges(c["data"].get("fields", ())) for c in (before, now)]
    if ranges[0] != ranges[1]:
        raise ValueError(
            f"--continue_from={run} cannot change data.fields from {before['data']['fields']} to "
            f"{now['data']['fields']}: keep their names and ranges"
        )
    kinds = [calls("optimizer.name", c["optimizer"]["name"])[0].name for c in (before, now)]
    if kinds[0] != kinds[1] and not adds_lora:
        raise ValueError(
            f"--continue_from={run} cannot change optimizer.name from {kinds[0]} to {kinds[1]}, "
            f"whose state differs: keep it, or start from the weights alone with {weights}"
        )
    if now["steps"] <= newest:
        raise ValueError(
            f"steps is {now['steps']}, but {run}@{newest} has reached step {newest}: raise "
            "--config.steps, the step at which training ends"
        )
    entries = [e["config"] for e in manifest.read_manifest(run) if e["first_step"] < newest]
    least = min(c.get("data", {}).get("heldout", 0.0) for c in (before, *entries))
    changed = settings_record.changed_fields(before, now, ("version",))
    less_heldout = least if now["data"]["heldout"] > least else None
    return ContinuedRun(run, newest, changed, adds_lora, less_heldout)


def prepare(source: ContinuedRun, inputs: loop.RunInputs, run: Run, settings: Optimizer, mesh: Mesh) -> str:
    """Move the data to the other run's position, and return a text that lists the changes.

    The text has one line for all changes, one for what is kept, and one for what starts anew.
    `source` is the run to continue, and the other arguments are those of the new run. Raises
    ValueError if an array in the checkpoint has another shape than in the new run.
    """
    finetune.check_frozen(source.run, inputs.task.frozen)
    abstract = _abstract(inputs, run, settings, mesh)
    wanted, stored = set(abstract.ema), set(restore.stored(source.folder))
    kept, anew, dropped = sorted(wanted & stored), sorted(wanted - stored), sorted(stored - wanted)
    if source.adds_lora:
        kept, anew, dropped = [], [], sorted(stored)
        keeps = ["the averaged weights, which the LoRA adapts"]
        starts = ["the LoRA factors, their averages and the optimizer"]
    else:
        checkpoint.check_changed(source.folder, abstract)
        finetune.check_base(source.run, inputs.base)
        keeps, starts = ["weights and optimizer"], []
    keeps += [f"averages {', '.join(kept)}"] if kept else []
    starts += [f"average {name}, from the weights of step {source.step}" for name in anew]
    if reason := _move(source, inputs.batches):
        starts.append(f"the data, because {reason}")
    else:
        samples = json.loads(inputs.batches.get_state())["samples"]
        keeps.append(f"the position in the data (sample {samples:,})")
    keeps.append(f"the count of steps, for schedule and noise (step {source.step:,})")
    changes = [f"{name} {old!r} -> {new!r}" for name, (old, new) in source.changed.items()]
    rows = [
        ("continues", source.name),
        ("changes", "; ".join(changes) or "nothing"),
        ("keeps", "; ".join(keeps)),
        *([("starts anew", "; ".join(starts))] if starts else []),
        *([("drops", f"averages {', '.join(dropped)}")] if dropped else []),
    ]
    if (share := source.less_heldout) is not None:
        rows.append(
            (
                "note",
                f"earlier steps, with data.heldout={share:g}, may have trained on "
                "pictures that are now held out, whose loss is then too low",
            )
        )
    return progress.block(rows)


def write_first_checkpoint(
    source: ContinuedRun,
    inputs: loop.RunInputs,
    run: Run,
    settings: Optimizer,
    mesh: Mesh,
    workdir: pathlib.Path,
    config: Mapping[str, Any],
) -> None:
    """Write the first checkpoint of a workdir, after its lineage and the metrics up to this step.

    Call `prepare` before.

    Args:
        source: The run to continue.
        inputs: The inputs of the new run.
        run: The new run's steps, batch size, seed and checkpoints to keep.
        settings: The new run's optimizer.
        mesh: The devices.
        workdir: The new run's folder.
        config: The new run's config, saved with the checkpoint.
    """
    fingerprint = checksums.fingerprint(source.folder)
    run_log.begin_from(workdir, source.run, source.step, fingerprint, source.averages_from)
    abstract = _abstract(inputs, run, settings, mesh)
    if source.adds_lora:
        state = _with_lora(source.step, inputs, run, settings, mesh)
    else:
        state = checkpoint.restore_changed(source.folder, abstract)
    folder = workdir / runs.CHECKPOINTS
    saved = checkpoint.Checkpointer(folder, run.keep_last, run.keep_every)
    with contextlib.closing(saved):
        saved.save(source.step, state, inputs.batches, config)


def _abstract(inputs: loop.RunInputs, run: Run, settings: Optimizer, mesh: Mesh) -> TrainState:
    _, key, create, layout = loop.set_up(inputs.task, run, settings, mesh)
    return placed(jax.eval_shape(create, key), layout)


def _move(source: ContinuedRun, batches: Batches) -> str:
    """Move `batches` to the position of the other run, or return why they start anew."""
    if other := [name for name in _RECORDS if name in source.changed]:
        return f"{' and '.join(other)} changed"
    try:
        batches.set_state(checkpoint.position(source.folder))
    except OtherData:
        return "its records, the seed, or the batch size with aspect buckets changed"
    return ""


def _with_lora(step: int, inputs: loop.RunInputs, run: Run, settings: Optimizer, mesh: Mesh) -> TrainState:
    """Return the state of new LoRA factors at a step. Their learning rate is that of this step."""
    _, key, create, layout = loop.set_up(inputs.task, run, settings, mesh)

    def create_at_step(key: Any) -> TrainState:
        state = create(key)
        opt_state = optimizer.at_step(state.opt_state, step)
        return state._replace(step=jnp.int32(step), opt_state=opt_state)

    return loop.new_state(create_at_step, key, layout)


def _parsed(named: str) -> tuple[str, int | None]:
    """Split RUN@STEP or RUN:STEP into (RUN, STEP). A workdir may have such a name itself."""
    if not files.path(named).exists():
        named = re.sub(r":(\d+)$", r"@\1", named)
    workdir, step = finetune.at_step(named)
    return os.fspath(files.path(workdir)) if workdir else "", step


def _adapt(config: dict[str, Any], name: str, run: str) -> None:
    """Set the weights that a LoRA adapts: `name`, a checkpoint of `run`, or the base of its LoRA.

    If the config names weights of a run that `run` does not descend from, it stays as it is.
    """
    if not _rank(config):
        return
    known, base, visited = {""}, "", {""}
    while run not in visited and (files.path(run) / runs.CONFIG).exists():
        visited.add(run)  # The name may have been that of an earlier run, too.
        former = runs.load(run)
        weights = former.get("unet", {}).get("weights", "")
        known.add(weights)
        if not _rank(former):
            break
        base = base or weights
        run = (manifest.read_lineage(run) or {}).get("run", "")
    if config["unet"]["weights"] in known:
        config["unet"]["weights"] = base or name


def _rank(config: Mapping[str, Any]) -> int:
    return config.get("lora", {}).get("rank", 0)
