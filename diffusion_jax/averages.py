"""List a run's power-function averages, or write the average of any width as a new run.

    python -m diffusion_jax.averages --workdir=runs/quickstart
    python -m diffusion_jax.averages --workdir=runs/quickstart --width=0.07 --out=runs/width_0.07

A power-function average is a weighted mean of the parameters over all training steps, in which
later steps count more (Karras et al. 2024; weights/power_averages.py). With a small relative width,
only the last steps count. A run with config.optimizer.ema_widths=(0.05, 0.1) keeps averages of
these relative widths and writes snapshots of them. After training, averages of other widths can be
computed from the snapshots. For example, evaluate, sample and diffusion_jax.heldout do this with
--ema=0.05,0.07,0.15. This command lists the snapshots. For a range of widths, it reports how
accurately the average at a step can be computed. With --width and --out, it writes one average as
the parameters of a new run. evaluate, sample and heldout accept the folder of the new run as
--workdir.

In the report, "error" is the error of the average's profile (the weight that it gives to each
step), relative to the norm of the profile. The relative error of the averaged parameters is about a
hundred times smaller. "rounding factor" is the factor by which the rounding errors of the snapshots
grow in the computed average. This factor is large for widths far below the stored ones. An average
that --continue_from added starts at the weights of that step, so its error is also large at first.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import flags
from etils import epath

from diffusion_jax import cli, files, runs
from diffusion_jax.devices import sharding
from diffusion_jax.logs import progress
from diffusion_jax.logs.progress import counted
from diffusion_jax.text import vocabulary
from diffusion_jax.train.checkpoint import Checkpointer
from diffusion_jax.weights import finetune, new_run, power_averages, restore

_TABLE = (0.02, 0.03, 0.05, 0.07, 0.1, 0.12, 0.15, 0.2, 0.25)


def describe(workdir: str, step: int | None = None) -> str:
    """Return a text that lists a run's stored averages, and the errors of averages of other widths.

    The errors hold for averages at `step`, which must be the step of a checkpoint or snapshot.
    None selects the newest such step. Raises ValueError if there is no such step, or if the run
    stores no power-function averages.
    """
    root, sources = _sources(workdir, step)
    at = sources[-1][0]
    snapshots = restore.steps(root.parent / restore.SNAPSHOTS)
    span = f", of steps {snapshots[0]:,} to {snapshots[-1]:,}" if snapshots else ""
    rows = [
        ("snapshots", f"{len(snapshots)} in {root.parent / restore.SNAPSHOTS}{span}"),
        ("stored", ", ".join(dict.fromkeys(name for *_, name in sources))),
        ("at step", f"{at:,}, computed from {counted(len(sources), 'average')} stored before:"),
    ]
    widths = (power_averages.width_of(name) or 0.0 for *_, name in sources)
    for width in sorted({*_TABLE, *widths}):
        counts, error = restore.combination(root, sources, at, width)
        times = float(np.linalg.norm(counts))
        rows.append((f"width {width:g}", f"error {100 * error:.2g} %, rounding factor {times:.2g}"))
    return progress.block(rows)


def write(workdir: str, which: str, step: int | None, out: str) -> int:
    """Write one average of a run as the only weights of a new run. Return the average's step.

    Args:
        workdir: The workdir of the run with the stored averages.
        which: The relative width of the average, such as "0.07".
        step: The step of a checkpoint or snapshot. None selects the newest undamaged checkpoint.
        out: The workdir of the new run.

    Raises:
        ValueError: There is no such average or step, or `out` already holds checkpoints.
    """
    runs.load(workdir)
    root, sources = _sources(workdir, step)
    _, stored, name = sources[-1]
    shapes = restore.shapes(stored, restore.EMA + name)
    where = sharding.shardings(shapes, sharding.make_mesh(), [(r"", sharding.FSDP)])
    params, step = restore.load_params_and_step(root, sharding.placed(shapes, where), which, step)
    with weights_alone(workdir, runs.load(workdir), out) as folder:
        checkpoints = Checkpointer(folder, keep_last=1)
        checkpoints.save_trees(step, {"params": params})
        checkpoints.close()
    return step


@contextlib.contextmanager
def weights_alone(workdir: files.Path, config: dict[str, Any], out: files.Path) -> Iterator[pathlib.Path]:
    """Create a run at `out` with a config and the vocabulary of `workdir`, but no checkpoint yet.

    In its config, ema_decays and ema_widths are empty. This context manager yields the folder for
    the checkpoints, holds the lock of `out`, and can start again after a kill.
    """
    words = vocabulary.read(workdir)
    config["optimizer"] |= {"ema_decays": (), "ema_widths": ()}
    base = files.path(workdir) / finetune.BASE
    with new_run.writing(out, config) as folder:
        if (
            base.is_file() and jax.process_index() == 0
        ):  # A LoRA run: copy the fingerprint of the weights that the LoRA adapts.
            files.write_whole(files.path(out) / finetune.BASE, base.read_text())
        if words and jax.process_index() == 0:
            vocabulary.write(out, words)
        yield folder


def _sources(workdir: str, step: int | None) -> tuple[epath.Path, list[restore.StoredAverage]]:
    """Return the folder of a run's checkpoints, and each average stored up to `step`.

    The averages are power-function averages. None selects the step of the newest checkpoint or
    snapshot. Raises ValueError if the run has no such step or no such averages.
    """
    runs.load(workdir)
    root = restore.absolute(workdir) / runs.CHECKPOINTS
    steps = {*restore.steps(root), *restore.steps(root.parent / restore.SNAPSHOTS)}
    if step not in (None, *steps):
        raise ValueError(
            f"--checkpoint={step}: {workdir} has no checkpoint or snapshot of this step: choose one of {sorted(steps)}"
        )
    at = max(steps, default=0) if step is None else step
    if not (sources := restore.traces(root, at)):
        raise ValueError(
            f"{workdir} holds no power-function averages: train with "
            "--config.optimizer.ema_widths=(0.05,0.1), so that a run stores such averages"
        )
    return root, sources


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "The workdir of a run.", required=True)
    _WIDTH = flags.DEFINE_string("width", None, "Relative width of the average to write to --out.")
    _CHECKPOINT = flags.DEFINE_integer("checkpoint", None, "The step of a checkpoint or snapshot; default: the newest.")
    _OUT = flags.DEFINE_string("out", None, "The workdir of the new run that --width creates.")

    def main() -> None:
        cli.start()
        with cli.bad_input():
            width, out = _WIDTH.value, _OUT.value
            if (width is None) != (out is None):
                raise ValueError("--width (the average) and --out (the folder to write) belong together: give both")
            if width is None or out is None:
                text = describe(_WORKDIR.value, _CHECKPOINT.value)
            else:
                if power_averages.width_of(width) is None:
                    raise ValueError(f"--width={width}: it must be above 0 and at most {power_averages.WIDEST}")
                step = write(_WORKDIR.value, width, _CHECKPOINT.value, out)
                text = f"wrote the average of width {width} at step {step:,} to {out}"
        if jax.process_index() == 0:
            print(text)

    cli.run(main)
