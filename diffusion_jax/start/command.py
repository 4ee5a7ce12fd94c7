"""Define the start command, which writes training configs for a set of pictures."""

import math
import pathlib
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from diffusion_jax import cli
from diffusion_jax.config.settings import Data
from diffusion_jax.data import guess, pipeline, sources
from diffusion_jax.data.prepare import validate
from diffusion_jax.machine import files, hardware, progress, sheets, untrusted
from diffusion_jax.start import changes, stages, written
from diffusion_jax.start.stages import Candidate, Measured, Opened, Stage
from diffusion_jax.start.written import Changes
from diffusion_jax.train.out_of_memory import OutOfMemory

flags.disclaim_key_flags()  # --help shows the flags with the module that calls `command`.
_LOOKED = 2_000  # The largest number of records to read.
_SHOWN = 32  # Pictures on the sheet.
_JUDGED = 100  # The smallest number of different captions for training a judge.


def command(package: str, candidates: Callable[[], Sequence[Candidate]]) -> None:
    """Run `python -m PACKAGE.start --data=PHOTOS`.

    The docstring of the calling module is the --help text. `candidates()` returns the models to
    choose from, from the smallest to the largest.
    """
    text = flags.DEFINE_string
    data = text(
        "data", None, "The pictures to train on: a path, or SOURCE:PATH::TEXT.", required=True
    )
    where = text("text", "", "Where the captions are (data.text); default: guessed from the files.")
    hours = flags.DEFINE_float("hours", 2.0, "Hours that all training may take.")
    out = text("out", "configs/mine.py", "The config to write; other stages get files beside it.")
    weights = text("text_weights", "", "A folder of T5 or CLIP to encode the captions with.")

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unknown arguments {argv[1:]}: write --data={argv[1]}", 2)
        cli.start(alone=True)
        with cli.bad_input(OutOfMemory):
            path = pathlib.Path(out.value)
            # Check the flags.
            if not 0 < hours.value < math.inf:
                raise ValueError(f"--hours={hours.value:g}: give a time above 0")
            models = candidates()
            _check_out(path, {s.suffix for model in models for s in model.stages})
            if not data.value:
                raise ValueError("--data is empty: name a folder of pictures, tars or a table")

            # Read the pictures and report on them.
            opened = guess.guess(data.value, where.value)
            if opened.embedded:
                raise ValueError(
                    f"--text={opened.text} names embeddings: name the field of the captions"
                )
            records = sources.open_records(opened)
            report = validate.validate(records, _LOOKED)
            print(progress.block(_describe(opened, report)), flush=True)

            # Choose a model, measure it, and write its configs.
            prompts = changes.prompts(records)
            of_stage = changes.of_data(opened, report, prompts, weights.value)
            measured = _measure(models, of_stage, report, hours.value, path.stem)
            _write(package, path, opened, report, measured, hours.value)

    cli.run(main)


def _check_out(path: pathlib.Path, suffixes: set[str]) -> None:
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ValueError(f"--out={path}: give the name of a Python file, such as configs/mine.py")
    files.check_writable(path.parent, "--out")
    paths = [*(_with_suffix(path, s) for s in suffixes), path.with_suffix(".png")]
    if existing := [p for p in paths if p.exists()]:
        raise ValueError(f"{existing[0]} exists already: give another --out, or delete it")


def _with_suffix(path: pathlib.Path, suffix: str) -> pathlib.Path:
    return path.with_stem(path.stem + suffix)


def _describe(data: Data, report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labelled lines about the data set. Raises ValueError if no picture is usable."""
    unusable = ", ".join(f"{n:,} {reason}" for reason, n in report["unusable"].items())
    first = "; ".join(report["unusable_first"][:1])
    if not report["usable"]:
        raise ValueError(
            f"none of {report['read']:,} pictures of {data.path} can be used: {unusable} ({first})"
        )
    side, aspect, words = (report[name] for name in ("smaller_side", "aspect", "text_words"))
    read = "" if report["read"] == report["records"] else f", {report['read']:,} of them read"
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in report["formats"].items())
    frequent = ", ".join(f"{word} {n:,}" for word, n in list(report["words"].items())[:12])
    rows = [
        ("data", f"{data.source}:{data.path}::{data.text}: {report['records']:,} pictures{read}"),
        ("sides", f"{side['min']:.0f} to {side['max']:.0f} pixels, median {side['median']:.0f}, "
         f"the longer side {aspect['median']:.2g} times it (up to {aspect['max']:.2g}); {kinds}"),
        ("unusable", f"{unusable} ({first})" if unusable else "none"),
        ("left out", ", ".join(f"{n:,} {why}" for why, n in report["left_out"].items()) or "none"),
        ("duplicates", f"{report['duplicates']:,} files that occur twice"),
        ("captions", f"{report['different_texts']:,} different ones of {words['min']:.0f} to "
         f"{words['max']:.0f} words; most frequent: {frequent}" if frequent else
         "none: the model learns to draw such pictures without a prompt"),
    ]  # fmt: skip
    return [(name, untrusted.printable(line)) for name, line in rows]


def _measure(
    candidates: Sequence[Candidate], of_data: Callable[[Stage], Changes], report: Mapping[str, Any],
    hours: float, name: str,
) -> list[Measured]:  # fmt: skip
    """Choose a model for the data; return its stages with their speed on this machine."""
    measured_stages: dict[str, Measured] = {}
    opened_stages: dict[str, Opened] = {}
    with tempfile.TemporaryDirectory() as folder:
        trial = f"{folder}/{name}"
        of_stage = lambda stage: {**of_data(stage), **stage.changes(trial)}

        def measured(stage: Stage) -> Measured:
            if stage.base not in measured_stages:
                one = stages.measure(stage, of_stage(stage), trial + stage.suffix)
                measured_stages[stage.base] = one
                opened_stages[stage.base] = one.opened
            one = measured_stages[stage.base]
            # Another candidate may give this stage another share of the time.
            return one._replace(opened=one.opened._replace(stage=stage))

        def opened(stage: Stage) -> Opened:
            if stage.base not in opened_stages:
                opened_stages[stage.base] = stages.open_stage(stage, of_stage(stage))
            return opened_stages[stage.base]

        side = report["smaller_side"]["median"]
        candidate = stages.choose(candidates, side, 3600 * hours, opened, measured)
        return [measured(stage) for stage in candidate.stages]


def _write(
    package: str, path: pathlib.Path, data: Data, report: Mapping[str, Any],
    measured: Sequence[Measured], hours: float,
) -> None:  # fmt: skip
    """Write a config per stage and a sheet of pictures; print the commands to run next."""
    texts, rows, commands, total = {}, [], [], 0.0
    device = f"{jax.device_count()} x {jax.local_devices()[0].device_kind}"
    for one in measured:
        stage, s = one.opened.stage, one.opened.settings
        steps, seconds = stages.timed(one, 3600 * hours * stage.share)
        config, workdir = _with_suffix(path, stage.suffix), f"runs/{path.stem}{stage.suffix}"
        train = f"python -m {stage.command} --config={shlex.quote(str(config))} --workdir={workdir}"
        parameters = sum(x.size for x in jax.tree.leaves(one.opened.traced.state.params))
        speed = (
            f"{parameters:,} parameters; {steps['steps'][0]:,} steps of {s.run.batch_size}, each "
            f"picture {steps['steps'][0] * s.run.batch_size / report['records']:,.1f} times, take "
            f"about {seconds / 3600:.2g} hours on {device}."
        )
        all_changes = {**one.opened.changes, **stage.changes(f"runs/{path.stem}"), **steps}
        about = f"{stage.base} on the pictures of {data.path}.\n\n{speed}\n\n{train}"
        texts[config] = written.source(stage.base, all_changes, about)
        rows.append((f"{config}", f"{stage.base}: {speed}"))
        commands.append(train)
        total += seconds
    last = measured[-1].opened
    path.parent.mkdir(parents=True, exist_ok=True)
    for config, content in texts.items():
        files.write_new(config, content)
    size, sheet = _size(last.settings), path.with_suffix(".png")
    sheets.write_png(sheet, _sheet(last.settings, size))
    memory = hardware.limit(jax.local_devices()[0]) / 1e9
    print(progress.block([
        ("device", f"{device}, {memory:.1f} GB each"),
        ("chosen", f"pictures of {size}x{size}; training takes about {total / 3600:.2g} hours"),
        *rows,
        ("sheet", f"{sheet}: the first pictures that training will see"),
    ]))  # fmt: skip
    print("\nnext:")
    for line in [*commands, *_after(package, path, data, report, measured, size)]:
        print(f"  {line}")


def _size(settings: Any) -> int:
    """Return the side of the pictures that a stage learns to draw, in pixels."""
    return settings.output_size if hasattr(settings, "output_size") else settings.unet.image_size


def _sheet(settings: Any, size: int) -> np.ndarray:
    """Return a sheet of the first training pictures, as the pipeline crops them."""
    pictures = sources.open_pictures(settings.data, size)
    count = min(_SHOWN, len(pictures))
    captions = lambda texts: {"captions": np.array(list(texts), dtype=object)}
    with pipeline.make_batches(
        pictures, captions, batch_size=count, seed=settings.run.seed,
        crop=settings.data.crop, flip=settings.data.flip,
    ) as batches:  # fmt: skip
        batch = next(batches)
    return sheets.contact_sheet(batch["image"], batch["captions"].tolist())


def _after(
    package: str, path: pathlib.Path, data: Data, report: Mapping[str, Any],
    measured: Sequence[Measured], size: int,
) -> list[str]:  # fmt: skip
    """Return the commands that sample from the trained model and score the samples."""
    name, prompt = path.stem, measured[-1].opened.settings.run.prompts[0]
    drawn = [one.opened.stage for one in measured if one.opened.stage.command.endswith(".train")]
    workdirs = " ".join(f"--workdir=runs/{name}{stage.suffix}" for stage in drawn)
    sample = f"python -m {package}.sample {workdirs} --prompt={shlex.quote(prompt)}"
    sample += f" --num_images=8 --out=pictures/{name}"
    if report["different_texts"] < _JUDGED:
        return [sample, f"python -m diffusion_jax.heldout --workdir=runs/{name} --share=0.1"]
    named = shlex.quote(f"{data.source}:{data.path}::{data.text}")
    return [
        sample,
        f"python -m diffusion_jax.metrics train_judge --data={named} --size={max(32, size)} "
        f"--seen=40000 --out=judges/{name}",
        f"python -m {package}.evaluate {workdirs} --judge=judges/{name} --prompts={named} "
        "--num_prompts=200",
    ]
