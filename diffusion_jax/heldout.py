"""Measure the loss on held-out records, with fixed noise and at fixed noise levels.

    python -m diffusion_jax.heldout --workdir=runs/quickstart

The loss is reproducible to the last digit, so that it can compare runs, averages or commits. The
records are a share of the data (config.data.heldout), chosen by a hash of their keys (file names,
positions in tars, row numbers in tables). Every measurement uses the same noise levels, and the
same noise for each record and level. No text is dropped. Training writes the loss every
config.heldout.every steps. This command measures any checkpoint of a run.

The command prints one line of JSON for the raw parameters, and one for each average. A line holds
"step", "weights" ("raw" or a name such as "ema_0.999"), "loss" (the mean of the unweighted loss
over all levels), and "loss/sigma_S" for each level S. It also holds "v_loss" and "v_loss/sigma_S".
The v-loss is the mean of |D - x0|^2 (1 + sigma^2) / sigma^2, where D is the denoised image. It does
not depend on what the network predicts, so it can compare runs that have different objectives, if
all are measured with the same --levels, such as --levels=0.1,0.3,1,3,10. A run without held-out
records can be measured on a share of its training data, --share=0.01, or on another data set,
--data=SOURCE:PATH::TEXT.
"""

import functools
import importlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags, logging
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Float, UInt32

from diffusion_jax import cli, files, runs, systems
from diffusion_jax.config import ranges
from diffusion_jax.config.settings import Heldout
from diffusion_jax.data import home, sources
from diffusion_jax.data.pipeline import Batches
from diffusion_jax.devices import programs, sharding
from diffusion_jax.task import Measure, Params, Task, Texts
from diffusion_jax.weights import finetune, restore

_SEED = 0  # The seed of the noise, independent of the run's seed.


class HeldOutRecords(NamedTuple):
    """The records and noise levels on which the held-out loss is measured."""

    every: int
    """The number of training steps from one measurement to the next."""
    batch: Texts
    """The pictures and their tokenized texts, one row per record."""
    numbers: UInt32[np.ndarray, "R"]
    """The low 32 bits of each record's key. They seed the noise of the record."""
    sigmas: Float[np.ndarray, "L"]
    """The noise levels. Each record is measured at all of them."""

    def first(self) -> "HeldOutRecords":
        """Return a copy that holds only the first record."""
        batch = {name: array[:1] for name, array in self.batch.items()}
        return self._replace(batch=batch, numbers=self.numbers[:1])


def open_records(s: Heldout, batches: Batches, measure: Measure | None) -> HeldOutRecords | None:
    """Read the held-out records, and choose the noise levels at which they are measured.

    `s` is the config's `heldout` group. Return None if `s.every` is 0, or if `measure` is None
    because the system has no held-out loss. Raises ValueError if the data set has no held-out
    records.
    """
    if not s.every or measure is None:
        return None
    if batches.apart is None:
        raise ValueError(
            f"heldout.every is {s.every}, but no records are held out: set the share to hold out, "
            "such as data.heldout=0.01"
        )
    keys, batch = batches.apart.read(s.records)
    return HeldOutRecords(s.every, batch, keys.astype(np.uint32), measure.levels(s.levels))


def make_scorer(
    task: Task, frozen: Any, mesh: Mesh, records: HeldOutRecords, batch_size: int
) -> Callable[[Params], dict[str, float]]:
    """Return a function that maps a model's parameters to its held-out losses, keyed by name.

    The keys "loss" and "v_loss" are means over all noise levels; "loss/sigma_S" and
    "v_loss/sigma_S" are the losses at each level S. A row is one
    record at one noise level. The function processes `batch_size` rows at a time and computes the
    loss of each row in float32. The means are taken in float64, in an order that does not depend on
    the number of devices.
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
            arrays = inputs, records.numbers[row], level.astype(np.uint32), sigmas[level]
            placed = jax.tree.map(lambda x: sharding.place(x, where), arrays)
            parts.append(jax.device_get(errors_of(params, frozen, *placed)))
        both = np.concatenate(parts, axis=1)[:, : count * len(sigmas)].astype(np.float64)
        return _named(both.reshape(2, len(sigmas), count).mean(2), sigmas)  # [loss / v_loss, L]

    return score


def of_all(score: Callable[[Params], dict[str, float]], raw: Params, ema: Mapping[str, Params]) -> dict[str, float]:
    """Return the held-out losses of the raw parameters and of all averages.

    Args:
        score: The result of `make_scorer`.
        raw: The raw parameters.
        ema: The averages, keyed by names such as "0.999".

    Returns:
        The losses, keyed by names such as "heldout/ema_0.999/loss".
    """
    weights = {"raw": raw, **{restore.EMA + name: tree for name, tree in ema.items()}}
    return {f"heldout/{w}/{k}": v for w, p in weights.items() for k, v in score(p).items()}


def _named(means: Float[np.ndarray, "2 L"], sigmas: Float[np.ndarray, "L"]) -> dict[str, float]:
    named = {}
    for name, levels in zip(("loss", "v_loss"), means, strict=True):
        named[name] = float(levels.mean())
        by_level = zip(sigmas, levels, strict=True)
        named |= {f"{name}/sigma_{sigma:.3g}": float(value) for sigma, value in by_level}
    return named


class OpenedRun(NamedTuple):
    """A checkpoint of a run, with all that is needed to compute its losses."""

    settings: Heldout
    """The `heldout` group of the run's config."""
    rows: int
    """The number of rows that a scorer processes at a time."""
    inputs: Any
    """The loop.RunInputs of the run. The threads of its batches have ended."""
    mesh: Mesh
    frozen: Any
    folder: epath.Path
    """The folder of the checkpoints."""
    step: int

    def scorer(self, records: HeldOutRecords) -> Callable[[Params], dict[str, float]]:
        """Return a function that maps parameters to their losses on `records`."""
        return make_scorer(self.inputs.task, self.frozen, self.mesh, records, self.rows)

    def params(self, name: str) -> Params:
        """Load the raw parameters or an average onto the devices. See restore.load_params."""
        task = self.inputs.task
        shapes = jax.eval_shape(task.init, jax.random.key(0))
        placed = sharding.placed(shapes, sharding.shardings(shapes, self.mesh, task.rules))
        return restore.load_params(self.folder, placed, name, self.step)


def open_run(
    workdir: pathlib.Path,
    step: int | None = None,
    share: float | None = None,
    records: int | None = None,
    base: str | None = None,
    data: str = "",
) -> OpenedRun:
    """Open a run to measure its held-out loss. Takes the arguments of `measure_run`.

    Raises ValueError or OSError if the run or its data cannot be read.
    """
    config = runs.load(workdir)
    if base is not None:
        config["unet"] |= {"weights": base}
    system = systems.find(config["system"])
    s = systems.read(config, config["system"])
    if not hasattr(s, "heldout"):
        raise ValueError(f"{workdir} is a run of {config['system']}, which has no held-out loss")
    if data:
        place, share = sources.named(data), share or 1.0
        s = s._replace(data=s.data._replace(source=place.source, path=place.path, text=place.text))
    finetune.check_wanted(base, s.lora, s.text)
    s = s._replace(
        data=s.data._replace(heldout=s.data.heldout if share is None else share),
        heldout=s.heldout._replace(every=1, records=records or s.heldout.records),
        run=s.run._replace(sample_every=0),
    )
    mesh = sharding.make_mesh()
    with home.tables_of(workdir, begun=not data):
        inputs = importlib.import_module(system.command).prepare(s, mesh)
    inputs.batches.close()
    finetune.check_base(workdir, inputs.base)
    frozen = sharding.place_all(inputs.task.frozen, mesh, inputs.task.rules)
    folder = restore.absolute(workdir) / runs.CHECKPOINTS
    step = restore.newest_sound(folder) if step is None else step
    ways = sharding.batch_ways(mesh)
    rows = (s.optimizer.micro_batch or -(-s.run.batch_size // ways)) * ways
    return OpenedRun(s.heldout, rows, inputs, mesh, frozen, folder, step)


def measure_run(
    workdir: pathlib.Path,
    step: int | None = None,
    weights: Sequence[str] = (),
    share: float | None = None,
    records: int | None = None,
    sigmas: Sequence[float] = (),
    base: str | None = None,
    data: str = "",
) -> list[dict[str, Any]]:
    """Measure the held-out losses of a run. Return one dict for each entry of `weights`.

    A dict holds "step", "weights" and the losses, under the keys that `make_scorer` documents.

    Args:
        workdir: The workdir of the run.
        step: The step of the checkpoint; None: the newest undamaged one.
        weights: "raw" and names of averages; (): all that are saved.
        share: The share of the data to measure on; None: config.data.heldout.
        records: The largest number of records; None: config.heldout.records.
        sigmas: The noise levels; (): the levels in config.heldout.
        base: The new path of the weights that a LoRA run adapts; None: the path in the
            run's config.
        data: A data set to measure on, "SOURCE:PATH::TEXT"; "": the data of the run's config.

    Raises ValueError or FileNotFoundError if the run, its data or the weights cannot be read.
    """
    if not (share or data or runs.load(workdir)["data"].get("heldout")):
        raise ValueError(
            f"{workdir} has no held-out records: give the share of its data to measure on, such as "
            "--share=0.01, or --data=SOURCE:PATH::TEXT"
        )
    opened = open_run(workdir, step, share, records, base, data)
    held = open_records(opened.settings, opened.inputs.batches, opened.inputs.task.measure)
    assert held is not None
    if sigmas:
        held = held._replace(sigmas=np.asarray(sigmas, np.float32))
    score, lines = opened.scorer(held), []
    folder = opened.folder / str(opened.step)
    for name in weights or ("raw", *restore.stored(folder)):
        losses, full_name = score(opened.params(name)), restore.name_of(folder, name)
        label = name if name in ("raw", "ema") else restore.EMA + full_name
        lines.append({"step": opened.step, "weights": label, **losses})
        logging.info("%s: %s %.6g", workdir, label, lines[-1]["loss"])
    return lines


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "The workdir of a run.", required=True)
    _EMA = flags.DEFINE_list(
        "ema",
        [],
        'Weights to measure: decays or widths of averages, "ema" for the largest '
        'average, or "raw"; default: all that are saved.',
    )
    _CHECKPOINT = flags.DEFINE_integer(
        "checkpoint", None, "The step of a checkpoint; default: the newest undamaged one."
    )
    _SHARE = flags.DEFINE_float("share", None, "Share of the data to measure; default: config.data.heldout.", 1e-9, 1.0)
    _DATA = flags.DEFINE_string("data", "", "Another data set to measure on, SOURCE:PATH::TEXT; default: the run's.")
    _RECORDS = flags.DEFINE_integer("records", None, "The largest number of records to measure.", lower_bound=1)
    _BASE = flags.DEFINE_string("unet_weights", None, "The new path of the weights that a LoRA run adapts.")
    _LEVELS = flags.DEFINE_list("levels", [], "Noise levels; default: quantiles of the noise levels in training.")

    def main() -> None:
        cli.start()
        with cli.bad_input():
            lines = measure_run(
                files.path(_WORKDIR.value),
                _CHECKPOINT.value,
                _EMA.value,
                _SHARE.value,
                _RECORDS.value,
                [ranges.read_value("--levels", text, ranges.Positive) for text in _LEVELS.value],
                _BASE.value,
                _DATA.value,
            )
        if jax.process_index() == 0:
            print(*map(json.dumps, lines), sep="\n")

    cli.run(main)
