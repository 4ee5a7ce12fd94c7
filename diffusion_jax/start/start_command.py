"""Define the start command, which writes training configs for a set of pictures."""

import contextlib
import math
import pathlib
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from absl import flags

from diffusion_jax import cli, files
from diffusion_jax.data import guess, pipeline, sources
from diffusion_jax.devices import hardware, stop_signals
from diffusion_jax.files import sheets
from diffusion_jax.logs import progress
from diffusion_jax.start import (
    changes,
    finetuned,
    questions,
    stages,
    training_pictures,
    written,
)
from diffusion_jax.start.finetuned import Shipped
from diffusion_jax.start.questions import Question
from diffusion_jax.start.stages import Candidate, Measured, Opened, TrainingStage
from diffusion_jax.start.training_pictures import PictureSet
from diffusion_jax.start.written import Changes
from diffusion_jax.train.out_of_memory import OutOfMemory

flags.disclaim_key_flags()  # --help shows the flags with the module that calls `command`.
T = TypeVar("T")
_LIMIT, _LEAST_LIMIT, _SHARE = 600.0, 60.0, 0.5
"""Measuring takes at most _SHARE of --hours, but not below the second or above the first value, in
seconds."""
_SHOWN = 32  # Pictures on the sheet.
_SMALLEST = 32  # The side of shrunk pictures in pixels, if no model draws pictures this small.
_WAITING = 0.2  # If training waits for a larger share of the time, reading is the bottleneck.
_JUDGED = 100  # The smallest number of different captions with which a judge can be trained.


def command(
    package: str, candidates: Callable[[], Sequence[Candidate]], shipped: Shipped | None = None
) -> None:
    """Run the command `python -m PACKAGE.start --data=PHOTOS`.

    Its --help shows the docstring of the calling module.

    Args:
        package: the package of the command.
        candidates: returns the models to choose from, from the smallest to the largest.
        shipped: a trained model that may be fine-tuned if there are few pictures.
    """
    text = flags.DEFINE_string
    data = text(
        "data", None, "The pictures to train on: a path, or SOURCE:PATH::TEXT.", required=True
    )
    where = text("text", "", "Where the captions are (data.text); default: guessed from the files.")
    hours = flags.DEFINE_float("hours", 2.0, "Total training time of all stages, in hours.")
    out = text("out", "configs/mine.py", "The config to write; further stages get files beside it.")
    weights = text("text_weights", "", "T5 or CLIP to encode captions with; default: word hashes.")
    tall, shrink, finetune = map(_define, (questions.TALL, questions.SHRINK, questions.FINETUNE))

    def main() -> None:
        cli.start(alone=True)
        with cli.bad_input(OutOfMemory):
            path = pathlib.Path(out.value)
            # Check the flags.
            if not 0 < hours.value < math.inf:
                raise ValueError(f"--hours={hours.value:g}: give a number of hours above 0")
            models = candidates()
            _check_out(path, {s.suffix for model in models for s in model.stages})
            if not data.value:
                raise ValueError(
                    "--data is empty: give the path of your pictures, such as a folder of "
                    "pictures, a folder of tars or a .parquet table"
                )

            # Read the pictures and report on them.
            photos = training_pictures.read(guess.guess(data.value, where.value))
            print(progress.block(training_pictures.described(photos)), flush=True)

            # Ask how to train on few pictures, and what to do with tall ones.
            trained = None if weights.value else shipped
            method = questions.method(finetune.value, photos, trained)
            if trained and method != finetuned.NO:
                models = [finetuned.candidate(trained, models[0].stages[0], method)]
            shape = questions.tall(tall.value, photos)
            pad = shape == "pad"

            # Shrink the pictures, choose a model, and measure it.
            size = max([m.image_size for m in models if m.image_size <= photos.side] or [_SMALLEST])
            if pad or questions.shrink(shrink.value, photos, size):
                photos = training_pictures.shrink(
                    photos, size, pathlib.Path("data", path.stem), pad=pad
                )
            of_data = changes.of_data(photos, weights.value, shape == "keep")
            limit = min(_LIMIT, max(_LEAST_LIMIT, _SHARE * 3600 * hours.value))
            trial = Trial(models, photos, of_data, hours.value, path.stem, limit)

            # Write the configs.
            write = lambda measured: _write(package, path, photos, measured, hours.value)
            write(until(limit, trial.measure, lambda: write(trial.assumed())))

    cli.run(main, "write --data={}")


def _define(question: Question) -> flags.FlagHolder[str]:
    """Define the flag that answers a question. By default, the command asks in the terminal."""
    meanings = "; ".join(f"{answer}: {meaning}" for answer, meaning in question.answers.items())
    values, text = [questions.ASK, *question.answers], f"{question.about}: {meanings}."
    return flags.DEFINE_enum(question.flag, questions.ASK, values, text)


def _check_out(path: pathlib.Path, suffixes: set[str]) -> None:
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ValueError(
            f"--out={path}: give the name of a Python file, such as configs/mine.py, whose stem "
            "has only letters, digits and underscores"
        )
    files.check_writable(path.parent, "--out")
    paths = [*(_with_suffix(path, s) for s in suffixes), path.with_suffix(".png")]
    if existing := [p for p in paths if p.exists()]:
        raise ValueError(f"{existing[0]} exists already: give another --out, or delete this file")


def _with_suffix(path: pathlib.Path, suffix: str) -> pathlib.Path:
    return path.with_stem(path.stem + suffix)


def until(limit: float, measure: Callable[[], T], otherwise: Callable[[], object]) -> T:
    """Return measure(). If this takes over `limit` seconds, call `otherwise` and end the process.

    A compilation cannot be interrupted, so another thread calls `otherwise`. The exit code is 0, or
    2 after a ValueError or OSError, whose message is printed.
    """
    ends = threading.Lock()  # Whoever acquires it goes on.

    def end() -> None:
        if not ends.acquire(blocking=False):
            return
        code = 1
        try:
            with cli.bad_input():
                otherwise()
            code = 0
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1
        finally:
            stop_signals.end(code)

    timer = threading.Timer(limit, end)
    timer.daemon = True
    timer.start()
    try:
        return measure()
    finally:
        timer.cancel()
        if not ends.acquire(blocking=False):
            timer.join()  # It ends the process.


class Trial:
    """The measurement of the models that may be chosen, and what is known of them so far."""

    def __init__(
        self, candidates: Sequence[Candidate], photos: PictureSet,
        of_data: Callable[[TrainingStage], Changes], hours: float, name: str, limit: float = 0.0,
    ) -> None:  # fmt: skip
        """Prepare the measurement, which may take `limit` seconds.

        `of_data` maps a stage to config changes for the data set and this machine. `name` names the
        temporary workdirs.
        """
        self._candidates, self._photos, self._of_data = candidates, photos, of_data
        self._hours, self._name, self._limit = hours, name, limit
        self._chosen, self._folder = candidates[0], ""
        self._opened: dict[str, Opened] = {}
        self._measured: dict[str, Measured] = {}

    def measure(self) -> list[Measured]:
        """Choose a model for the data, and return its stages with their speed on this machine."""
        with tempfile.TemporaryDirectory() as self._folder:
            self._chosen = stages.choose(
                self._candidates, self._photos.side, 3600 * self._hours, self._open, self._time
            )
            return [self._time(stage) for stage in self._chosen.stages]

    def assumed(self) -> list[Measured]:
        """Return the stages of the model chosen so far, with a guess of the speeds not measured."""
        shutil.rmtree(self._folder, ignore_errors=True)
        known = dict(self._measured)
        all_stages = [
            self._of(known[stage.base], stage) if stage.base in known else stages.assume(
                stage, self._changes(stage), self._opened.get(stage.base), list(known.values())
            )
            for stage in self._chosen.stages
        ]  # fmt: skip
        speeds = [
            f"{one.opened.stage.base} trains on {one.images_per_second:.3g} pictures per second"
            for one in all_stages if one.assumed
        ]  # fmt: skip
        print(
            f"\nMeasuring ended after {self._limit / 60:.2g} minutes. Assumed instead: "
            f"{' and '.join(speeds)}. If training is faster or slower, change the number of steps "
            "(--config.steps)."
        )
        return all_stages

    def _changes(self, stage: TrainingStage) -> Changes:
        return {**self._of_data(stage), **stage.changes(f"{self._folder}/{self._name}")}

    def _open(self, stage: TrainingStage) -> Opened:
        if stage.base not in self._opened:
            self._opened[stage.base] = stages.open_stage(stage, self._changes(stage))
        return self._opened[stage.base]

    def _time(self, stage: TrainingStage) -> Measured:
        if stage.base not in self._measured:
            workdir = f"{self._folder}/{self._name}{stage.suffix}"
            self._measured[stage.base] = stages.measure(self._open(stage), workdir)
        return self._of(self._measured[stage.base], stage)

    def _of(self, measured: Measured, stage: TrainingStage) -> Measured:
        # Another candidate may give this stage another share of the time.
        return measured._replace(opened=measured.opened._replace(stage=stage))


def _write(
    package: str, path: pathlib.Path, photos: PictureSet, measured: Sequence[Measured],
    hours: float,
) -> None:  # fmt: skip
    """Write a config per stage and a sheet of pictures, and print the commands to run next."""
    texts, rows, commands, total = {}, [], [], 0.0
    count = len(photos.records)
    device = f"{jax.device_count()} x {jax.local_devices()[0].device_kind}"
    for one in measured:
        stage, s = one.opened.stage, one.opened.settings
        steps, seconds = stages.timed(one, 3600 * hours * stage.share, count)
        config, workdir = _with_suffix(path, stage.suffix), f"runs/{path.stem}{stage.suffix}"
        train = f"python -m {stage.command} --config={shlex.quote(str(config))} --workdir={workdir}"
        size = ""
        if one.opened.traced:
            params = jax.tree.leaves(one.opened.traced.state.params)
            size = f"{sum(x.size for x in params):,} parameters; "
        num_images = steps["steps"][0] * s.run.batch_size
        epochs = num_images / count
        speed = (
            f"{size}{steps['steps'][0]:,} steps of {s.run.batch_size} "
            f"pictures ({epochs:,.1f} epochs) take about {_hours(seconds)} on {device}."
        )
        if one.assumed:
            speed += " The speed is assumed, because measuring took too long."
        if seconds > 3600 * hours * stage.share:
            speed += " This is longer than --hours."
        if epochs < 1:
            speed += f" This is too short to train on each of the {count:,} pictures once."
        all_changes = {**one.opened.changes, **stage.changes(f"runs/{path.stem}"), **steps}
        about = f"{stage.base} on the pictures of {photos.data.path}.\n\n{speed}\n\n{train}"
        texts[config] = written.source(stage.base, all_changes, about)
        rows.append((f"{config}", f"{stage.base}: {speed}"))
        commands.append(train)
        total += seconds
    last = measured[-1].opened
    size, sheet = _size(last.settings), path.with_suffix(".png")
    picture = _sheet(last.settings, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as written_last:  # After an error, no file remains.
        for config, content in texts.items():
            written_last.enter_context(files.whole(config)).write_text(content)
        sheets.write_png(sheet, picture)
    memory = hardware.limit(jax.local_devices()[0]) / 1e9
    print(progress.block([
        ("device", f"{device}, {memory:.1f} GB each"),
        ("chosen", f"pictures of {size}x{size}; training takes about {_hours(total)}"),
        *rows,
        ("bottleneck", _bottleneck(measured)),
        ("sheet", f"{sheet}: the first pictures that training will see"),
    ]))  # fmt: skip
    print("\nnext:")
    for line in [*commands, *_after(package, path, photos, measured, size)]:
        print(f"  {line}")


def _hours(seconds: float) -> str:
    hours = f"{seconds / 3600:.2g}"
    return f"{hours} hour" if hours == "1" else f"{hours} hours"


def _bottleneck(measured: Sequence[Measured]) -> str:
    if any(one.assumed for one in measured):
        return "not measured"
    waiting = max(one.waiting for one in measured)
    shown = f"training waits for pictures {waiting:.0%} of the time"
    if waiting < _WAITING:
        return f"the network: {shown}"
    return f"reading the pictures: {shown}; to train faster, start again with --shrink=yes"


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
    package: str, path: pathlib.Path, photos: PictureSet, measured: Sequence[Measured], size: int
) -> list[str]:  # fmt: skip
    """Return the commands to run after training: draw pictures with the model, and score it."""
    name, prompt = path.stem, measured[-1].opened.settings.run.prompts[0]
    drawn = [one.opened.stage for one in measured if one.opened.stage.command.endswith(".train")]
    workdirs = " ".join(f"--workdir=runs/{name}{stage.suffix}" for stage in drawn)
    sample = f"python -m {package}.sample {workdirs} --prompt={shlex.quote(prompt)}"
    sample += f" --num_images=8 --out=pictures/{name}"
    if photos.report["different_texts"] < _JUDGED:
        return [sample, f"python -m diffusion_jax.heldout --workdir=runs/{name} --share=0.1"]
    data = photos.data
    named = shlex.quote(f"{data.source}:{data.path}::{data.text}")
    return [
        sample,
        f"python -m diffusion_jax.metrics train_judge --data={named} --size={max(32, size)} "
        f"--seen=40000 --out=judges/{name}",
        f"python -m {package}.evaluate {workdirs} --judge=judges/{name} --prompts={named} "
        "--num_prompts=200",
    ]
