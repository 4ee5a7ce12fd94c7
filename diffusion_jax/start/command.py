"""The start command, whole, for every system: a set of pictures -> configs that train on it."""

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
from diffusion_jax.start.stages import Measured, Opened, Rung, Stage
from diffusion_jax.start.written import Changes
from diffusion_jax.train.out_of_memory import OutOfMemory

flags.disclaim_key_flags()  # They belong to the command that calls `command`: --help shows them.
_LOOKED = 2_000  # Records that are read, at most.
_SHOWN = 32
_JUDGED = 100  # Different captions from which on a judge can be trained.


def command(package: str, rungs: Callable[[], Sequence[Rung]]) -> None:
    """Runs `python -m PACKAGE.start --data=PHOTOS`; the caller's is its --help.

    `rungs` are the models to choose among, from the smallest on.
    """
    text = flags.DEFINE_string
    data = text("data", None, "Pictures: a path, or SOURCE:PATH::TEXT.", required=True)
    where = text("text", "", "Where their captions are, data.text; by default what the files say.")
    hours = flags.DEFINE_float("hours", 2.0, "How long all training may take.")
    out = text("out", "configs/mine.py", "The config to write; those of other stages beside it.")
    weights = text("text_weights", "", "A folder of T5 or CLIP, which then reads the captions.")

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unknown arguments {argv[1:]}: write --data={argv[1]}", 2)
        cli.start(alone=True)
        with cli.bad_input(OutOfMemory):
            path = pathlib.Path(out.value)
            if not 0 < hours.value < math.inf:
                raise ValueError(f"--hours={hours.value:g}: give a time above 0")
            ladder = rungs()
            _check_out(path, {s.suffix for rung in ladder for s in rung.stages})
            if not data.value:
                raise ValueError("--data is empty: name a folder of pictures, tars or a table")
            chosen = guess.guess(data.value, where.value)
            if chosen.embedded:
                raise ValueError(f"--text={chosen.text}: captions are read here, not embeddings")
            records = sources.open_records(chosen)
            report = validate.validate(records, _LOOKED)
            print(progress.block(_told(chosen, report)), flush=True)
            prompts = changes.prompts(records)
            of_stage = changes.of_data(chosen, report, prompts, weights.value)
            measured = _measured(ladder, of_stage, report, hours.value, path.stem)
            _write(package, path, chosen, report, measured, hours.value)

    cli.run(main)


def _check_out(path: pathlib.Path, suffixes: set[str]) -> None:
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ValueError(f"--out={path}: give the name of a Python file, such as configs/mine.py")
    files.check_writable(path.parent, "--out")
    written = [*(_beside(path, s) for s in suffixes), path.with_suffix(".png")]
    if there := [p for p in written if p.exists()]:
        raise ValueError(f"{there[0]} is there already: give another --out, or delete it")


def _beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    return path.with_stem(path.stem + suffix)


def _told(data: Data, report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The set in lines; ValueError if no picture of it can be used."""
    unusable = ", ".join(f"{n:,} {reason}" for reason, n in report["unusable"].items())
    first = "; ".join(report["unusable_first"][:1])
    if not report["usable"]:
        raise ValueError(
            f"none of {report['read']:,} pictures of {data.path} can be used: {unusable} ({first})"
        )
    side, aspect, words = (report[name] for name in ("smaller_side", "aspect", "text_words"))
    read = "" if report["read"] == report["records"] else f", {report['read']:,} of them looked at"
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in report["formats"].items())
    frequent = ", ".join(f"{word} {n:,}" for word, n in list(report["words"].items())[:12])
    rows = [
        ("data", f"{data.source}:{data.path}::{data.text}: {report['records']:,} pictures{read}"),
        ("sides", f"{side['min']:.0f} to {side['max']:.0f} pixels, median {side['median']:.0f}, "
         f"the longer side {aspect['median']:.2g} times it (up to {aspect['max']:.2g}); {kinds}"),
        ("unusable", f"{unusable} ({first})" if unusable else "none"),
        ("left out", ", ".join(f"{n:,} {why}" for why, n in report["left_out"].items()) or "none"),
        ("duplicates", f"{report['duplicates']:,} files that are there twice"),
        ("captions", f"{report['different_texts']:,} different ones of {words['min']:.0f} to "
         f"{words['max']:.0f} words; most frequent: {frequent}" if frequent else
         "none: what is trained draws such pictures without being asked for one"),
    ]  # fmt: skip
    return [(name, untrusted.printable(line)) for name, line in rows]


def _measured(
    rungs: Sequence[Rung], of_data: Callable[[Stage], Changes], report: Mapping[str, Any],
    hours: float, name: str,
) -> list[Measured]:  # fmt: skip
    """The stages that were chosen, with their speed here."""
    known: dict[str, Measured] = {}
    traced: dict[str, Opened] = {}
    with tempfile.TemporaryDirectory() as folder:
        trial = f"{folder}/{name}"
        of_stage = lambda stage: {**of_data(stage), **stage.changes(trial)}

        def measured(stage: Stage) -> Measured:
            if stage.base not in known:
                known[stage.base] = stages.measure(stage, of_stage(stage), trial + stage.suffix)
                traced[stage.base] = known[stage.base].opened
            one = known[stage.base]  # Of another rung it had another share of the time.
            return one._replace(opened=one.opened._replace(stage=stage))

        def opened(stage: Stage) -> Opened:
            if stage.base not in traced:
                traced[stage.base] = stages.open_stage(stage, of_stage(stage))
            return traced[stage.base]

        side = report["smaller_side"]["median"]
        rung = stages.choose(rungs, side, 3600 * hours, opened, measured)
        return [measured(stage) for stage in rung.stages]


def _write(
    package: str, path: pathlib.Path, data: Data, report: Mapping[str, Any],
    measured: Sequence[Measured], hours: float,
) -> None:  # fmt: skip
    """Writes the configs and the sheet, and says the commands that follow."""
    texts, rows, commands, total = {}, [], [], 0.0
    device = f"{jax.device_count()} x {jax.local_devices()[0].device_kind}"
    for one in measured:
        stage, s = one.opened.stage, one.opened.settings
        steps, seconds = stages.timed(one, 3600 * hours * stage.share)
        config, workdir = _beside(path, stage.suffix), f"runs/{path.stem}{stage.suffix}"
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
        ("sheet", f"{sheet}: the first that training will see"),
    ]))  # fmt: skip
    print("\nnext:")
    for line in [*commands, *_after(package, path, data, report, measured, size)]:
        print(f"  {line}")


def _size(settings: Any) -> int:
    """Pixels of a side of what a stage learns to draw."""
    return settings.output_size if hasattr(settings, "output_size") else settings.unet.image_size


def _sheet(settings: Any, size: int) -> np.ndarray:
    """The first pictures of training as its pipeline makes them, over their captions."""
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
    """The commands that draw with what was trained and score it."""
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
