"""The held-out loss: of records that training never sees, with fixed noise at fixed noise levels.

    python -m diffusion_jax.heldout --workdir=runs/quickstart

Two runs, two averages or two commits compare by it to the last digit: the records are a share of
the data (config.data.heldout), chosen by a hash of their keys (names of files, places in tars,
numbers in tables), each meets the same levels with the same noise, and no text is dropped.
Training writes it every config.heldout.every steps; this command takes it of any run and
checkpoint.

Standard output holds a line of JSON for the parameters and each average: step, weights ("raw",
"ema_0.999"), "loss" over all levels, before any weighting, and "loss/sigma_S" at each. "v_loss" is
|D - x0|^2 (1 + sigma^2) / sigma^2, whatever the network predicts: runs of different objectives
compare by it at equal levels, --levels=0.1,0.3,1,3,10. A run that held nothing out is measured on
--share=0.01 of the data that it has seen.
"""

import functools
import importlib
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags, logging
from jax.sharding import Mesh
from jaxtyping import Float, UInt32

from diffusion_jax import cli, finetune, runs, systems
from diffusion_jax.config.settings import Heldout
from diffusion_jax.data.pipeline import Batches
from diffusion_jax.machine import files, programs, sharding
from diffusion_jax.task import Measure, Params, Task, Texts
from diffusion_jax.weights import restore

_SEED = 0  # Of the noise, whatever the run's.
flags.disclaim_key_flags()  # They are defined below, where this is run as a command.


class Records(NamedTuple):
    """What the loss is taken of."""

    every: int
    """Steps from one measurement to the next."""
    batch: Texts
    """Pictures, and what the encoder's tokenizer makes of their texts; a row a record."""
    numbers: UInt32[np.ndarray, "R"]
    """The low halves of the records' keys, which their noise is drawn from."""
    sigmas: Float[np.ndarray, "L"]
    """The noise levels, all of each record."""

    def first(self) -> "Records":
        """The first record alone."""
        batch = {name: array[:1] for name, array in self.batch.items()}
        return self._replace(batch=batch, numbers=self.numbers[:1])


def open_records(s: Heldout, batches: Batches, measure: Measure | None) -> Records | None:
    """The records that a config's `heldout` describes, read; None where it says never.

    ValueError if there are none.
    """
    if not s.every or measure is None:
        return None
    apart = batches.apart
    if apart is None:
        raise ValueError(
            "heldout.every is set and nothing is held out: keep some records from training, such "
            "as data.heldout=0.01"
        )
    keys, batch = apart.read(s.records)
    return Records(s.every, batch, keys.astype(np.uint32), measure.levels(s.levels))


def make_scorer(
    task: Task, frozen: Any, mesh: Mesh, records: Records, batch_size: int
) -> Callable[[Params], dict[str, float]]:
    """score(params): the losses by their names, `batch_size` images at a time.

    The losses of single images are float32; their means are taken in float64, in one order on any
    number of devices.
    """
    where, everywhere = sharding.batch_sharding(mesh), sharding.replicated(mesh)
    assert task.measure is not None
    errors = sharding.ambient(mesh, task.measure.errors)

    @functools.partial(jax.jit, out_shardings=everywhere)
    def of_rows(params, frozen, batch, numbers, levels, sigma):
        fold = jax.vmap(jax.random.fold_in)
        keys = fold(jax.vmap(lambda _: jax.random.key(_SEED))(numbers), numbers)
        return errors(params, frozen, batch, fold(keys, levels), sigma)

    errors_of = programs.announced(of_rows, "the held-out loss")
    count, sigmas = len(records.numbers), records.sigmas

    def score(params: Params) -> dict[str, float]:
        parts = []
        for start in range(0, count * len(sigmas), batch_size):
            rows = np.arange(start, start + batch_size) % (count * len(sigmas))
            row, level = rows % count, rows // count
            inputs = {name: array[row] for name, array in records.batch.items()}
            numbers, at = records.numbers[row], level.astype(np.uint32)
            placed = jax.tree.map(
                lambda x: sharding.place(x, where), (inputs, numbers, at, sigmas[level])
            )
            parts.append(jax.device_get(errors_of(params, frozen, *placed)))
        both = np.concatenate(parts, axis=1)[:, : count * len(sigmas)].astype(np.float64)
        return _named(both.reshape(2, len(sigmas), count).mean(2), sigmas)

    return score


def of_all(
    score: Callable[[Params], dict[str, float]], raw: Params, ema: Mapping[str, Params]
) -> dict[str, float]:
    """The losses of parameters and averages by their names: "heldout/ema_0.999/loss"."""
    weights = {"raw": raw, **{restore.EMA + name: tree for name, tree in ema.items()}}
    return {f"heldout/{w}/{k}": v for w, p in weights.items() for k, v in score(p).items()}


def _named(means: Float[np.ndarray, "2 L"], sigmas: Float[np.ndarray, "L"]) -> dict[str, float]:
    named = {}
    for name, levels in zip(("loss", "v_loss"), means, strict=True):
        named[name] = float(levels.mean())
        by_level = zip(sigmas, levels, strict=True)
        named |= {f"{name}/sigma_{sigma:.3g}": float(value) for sigma, value in by_level}
    return named


def measure_run(
    workdir: pathlib.Path,
    step: int | None = None,
    weights: Sequence[str] = (),
    share: float | None = None,
    records: int | None = None,
    sigmas: Sequence[float] = (),
    base: str | None = None,
) -> list[dict[str, Any]]:
    """The losses of a run's parameters and averages, a line of the command's output each.

    None and () stand for the last checkpoint, all weights and what the config says; `base` is where
    what a run of LoRA adapts lies now. ValueError or FileNotFoundError if they are not there.
    """
    config = runs.load(workdir)
    if base is not None:
        config["unet"] |= {"weights": base}
    system = systems.find(config["system"])
    s = systems.read(config, config["system"])
    if not hasattr(s, "heldout"):
        raise ValueError(f"{workdir} is a run of {config['system']}, which has no held-out loss")
    if not (share or s.data.heldout):
        raise ValueError(
            f"{workdir} held nothing out: say what share of its data to measure on, such as "
            "--share=0.01"
        )
    finetune.check_wanted(base, s.lora)
    s = s._replace(
        data=s.data._replace(heldout=s.data.heldout if share is None else share),
        heldout=s.heldout._replace(every=1, records=records or s.heldout.records),
        run=s.run._replace(sample_every=0),
    )
    mesh = sharding.make_mesh()
    inputs = importlib.import_module(system.command).prepare(s, mesh)
    task = inputs.task
    with inputs.batches:
        held = open_records(s.heldout, inputs.batches, task.measure)
    assert held is not None
    finetune.check_base(workdir, inputs.base)
    if sigmas:
        held = held._replace(sigmas=np.asarray(sigmas, np.float32))
    frozen = sharding.place_all(task.frozen, mesh, task.rules)
    ways = sharding.batch_ways(mesh)
    rows = -(-s.run.batch_size // s.optimizer.accumulate // ways) * ways
    if s.optimizer.micro_batch:
        rows = s.optimizer.micro_batch * ways
    score = make_scorer(task, frozen, mesh, held, rows)
    folder = restore.absolute(workdir) / runs.CHECKPOINTS
    step = restore.newest_sound(folder) if step is None else step
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    placed = sharding.placed(shapes, sharding.shardings(shapes, mesh, task.rules))
    lines = []
    for name in weights or ("raw", *restore.stored(folder / str(step))):
        params = restore.load_params(folder, placed, name, step)
        whole = restore.name_of(folder / str(step), name)
        label = name if name in ("raw", "ema") else restore.EMA + whole
        lines.append({"step": step, "weights": label, **score(params)})
        logging.info("%s: %s %.6g", workdir, label, lines[-1]["loss"])
    return lines


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a run.", required=True)
    _EMA = flags.DEFINE_list("ema", [], 'Decays, widths, "ema" or "raw"; default: all kept.')
    _CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "A step that was saved; else the last.")
    _SHARE = flags.DEFINE_float(
        "share", None, "Of the data, in place of config.data.heldout.", 1e-9, 1.0
    )
    _RECORDS = flags.DEFINE_integer("records", None, "How many at most.", lower_bound=1)
    _BASE = flags.DEFINE_string("unet_weights", None, "Of a run of LoRA, where its base lies now.")
    _LEVELS = flags.DEFINE_list("levels", [], "Noise levels; default: quantiles of training's.")

    def _level(text: str) -> float:
        try:
            level = float(text)
        except ValueError:
            level = math.nan
        if not 0 < level < math.inf:
            raise ValueError(f"--levels={text}: give noise levels above 0, such as 0.1,1,10")
        return level

    def main(argv: list[str]) -> None:
        """Prints the losses."""
        if len(argv) > 1:
            raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
        cli.start()
        with cli.bad_input():
            lines = measure_run(
                files.path(_WORKDIR.value), _CHECKPOINT.value, _EMA.value, _SHARE.value,
                _RECORDS.value, [_level(text) for text in _LEVELS.value], _BASE.value,
            )  # fmt: skip
        if jax.process_index() == 0:
            print(*map(json.dumps, lines), sep="\n")

    cli.run(main)
