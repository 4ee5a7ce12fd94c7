"""The replay command, shared by all systems: repeat a training step, and compare it with the log.

This module defines the flags, the report and the contact sheet of the command.
"""

import importlib
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import flags

from diffusion_jax import cli, files, runs, systems
from diffusion_jax.data import home
from diffusion_jax.devices import sharding
from diffusion_jax.files import sheets, untrusted
from diffusion_jax.logs.progress import block
from diffusion_jax.train.replay import Replayed, ReplayedLine, changes, replay
from diffusion_jax.weights import finetune

FOLDER = "replay"
_LISTED = 16  # The printed report lists this many examples, those with the largest losses.
_SHOWN = 64  # The contact sheet shows this many pictures, those with the largest losses.
flags.disclaim_key_flags()  # --help shows the flags with the module that calls `command`.


def command(package: str) -> None:
    """Run the replay command, `python -m PACKAGE.replay --workdir=FOLDER --step=N`.

    The docstring of the calling module is the --help text. The exit code is 1 if a metric differs
    from the run's log, and 2 if the step cannot be rebuilt. `package` is the package of the systems
    whose runs the command replays.
    """
    workdir_flag = flags.DEFINE_string("workdir", None, "The workdir of a run.", required=True)
    step_flag = flags.DEFINE_integer("step", None, "The step to replay.", required=True)
    base = flags.DEFINE_string("unet_weights", None, "The new path of the weights that a LoRA run adapts.")

    def main() -> None:
        cli.start()
        workdir = files.path(workdir_flag.value)
        with cli.bad_input():
            files.check_writable(workdir / FOLDER, "--workdir")
            result, different = run(workdir, step_flag.value, package, base.value)
            if jax.process_index() == 0:
                print(block(report(workdir, result, different)), flush=True)
                write(workdir / FOLDER, result)
        if any(line.differ for line in result.compared):
            raise SystemExit(1)

    cli.run(main)


def run(workdir: pathlib.Path, step: int, package: str, base: str | None = None) -> tuple[Replayed, str]:
    """Replay a step of the run in `workdir`. Return the result and the text that `changes` returns.

    `package` is the package of the run's system, such as imagen_jax. `base` is the value of
    --unet_weights. Raises ValueError or OSError if the step cannot be rebuilt.
    """
    config = runs.load(workdir)
    if config["system"].partition(".")[0] != package:
        raise ValueError(
            f"{workdir} is a run of {config['system']}: replay it with "
            f"python -m {config['system'].partition('.')[0]}.replay"
        )
    system = systems.find(config["system"])
    s = systems.read(config, config["system"])
    if base:
        finetune.check_wanted(base, s.lora, s.text)
        s = s._replace(unet_weights=base)
    mesh = sharding.make_mesh(*s.mesh)
    with home.tables_of(workdir):
        inputs = importlib.import_module(system.command).prepare(s, mesh)
    with inputs.batches:
        finetune.check_base(workdir, inputs.base)
        result = replay(inputs, s.run, s.optimizer, mesh, workdir, step)
    return result, changes(workdir, step, config)


def report(workdir: pathlib.Path, result: Replayed, different: str) -> list[tuple[str, str]]:
    """Return the rows of the printed report: metrics, the comparison, modules and examples.

    A row is a pair (label, text). `different` is the text that `changes` returns.
    """
    origin = "the initial weights"
    if result.checkpoint is not None:
        origin = f"the checkpoint of step {result.checkpoint}"
    rows = [("step", f"{result.step}, replayed from {origin}")]
    rows += [(name, f"{value}") for name, value in result.metrics.items() if "/" not in name]
    rows += [("logged", _compared(line)) for line in result.compared]
    if not result.compared:
        rows.append(("logged", f"the metrics in {workdir} do not cover this step"))
    if any(line.differ for line in result.compared):
        cause = different or "nothing in manifest.json: probably the data or the initial weights"
        rows.append(("changed", cause))
    rows.append(("modules", "the gradient norm of each module, before clipping"))
    rows += [(f"  {name}", f"{norm:.6g}") for name, norm in result.modules.items()]
    examples = _by_loss(result)
    num_listed = min(_LISTED, len(examples))
    rows.append(("examples", f"{num_listed} of {len(examples)}, with the largest losses first"))
    rows += [(f"  row {x['row']}", f"{_numbers(x)}{x['name']}: {x['text']}") for x in examples[:_LISTED]]
    pictures = "" if result.pictures is None else f" and {_name(result.step)}.png"
    rows.append(("written", f"{workdir / FOLDER / _name(result.step)}.json{pictures}"))
    return [(name, untrusted.printable(text)) for name, text in rows]


def write(folder: pathlib.Path, result: Replayed) -> None:
    """Write the numbers in `result` to `folder` as JSON, and pictures, if any, as one PNG.

    The PNG shows the pictures with the largest losses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = {**result._asdict(), "compared": [line._asdict() for line in result.compared]}
    del values["pictures"]
    files.write_whole(folder / f"{_name(result.step)}.json", json.dumps(values, indent=1) + "\n")
    if result.pictures is not None:
        shown = _by_loss(result)[:_SHOWN]
        captions = [f"row {x['row']} {_numbers(x)}{x['text'] or x['name']}" for x in shown]
        images = result.pictures[[x["row"] for x in shown]]
        sheet = sheets.contact_sheet(images, captions)
        sheets.write_png(folder / f"{_name(result.step)}.png", sheet)


def _compared(line: ReplayedLine) -> str:
    one = line.last == line.first + 1
    steps = f"step {line.last}" if one else f"steps {line.first + 1} to {line.last}"
    if not line.differ:
        return f"{steps}: {', '.join(line.equal)} are equal, bit for bit"
    different = [f"{k} was {a} and is {b}" for k, (a, b) in line.differ.items()]
    return f"{steps}: different: {', '.join(different)}"


def _by_loss(result: Replayed) -> list[Mapping[str, Any]]:
    """Return the examples, sorted from the largest loss to the smallest. NaN comes first."""
    size = lambda example: -np.nan_to_num(example.get("loss", 0.0), nan=math.inf)
    return sorted(result.examples, key=size)


def _numbers(example: Mapping[str, Any]) -> str:
    if "loss" not in example:
        return ""
    return f"loss {example['loss']:.4g} at sigma {example['sigma']:.4g}, "


def _name(step: int) -> str:
    return f"step_{step:08}"
