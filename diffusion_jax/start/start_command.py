"""Define the start command, which writes training configs for a set of pictures."""

import contextlib
import math
import pathlib
import shlex
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from absl import flags

from diffusion_jax import cli, exits, files, runs, systems
from diffusion_jax.data import guess, show
from diffusion_jax.devices import hardware, stop_signals
from diffusion_jax.files import sheets
from diffusion_jax.logs import progress
from diffusion_jax.start import changes, questions, stages, training_pictures
from diffusion_jax.start.stages import Candidate, Measured, Trial
from diffusion_jax.start.training_pictures import PictureSet
from diffusion_jax.train.out_of_memory import OutOfMemory

flags.disclaim_key_flags()  # --help shows the flags with the module that calls `command`.
T = TypeVar("T")
_LIMIT, _LEAST_LIMIT, _SHARE = 600.0, 60.0, 0.5
"""Measuring takes at most _SHARE of --hours, but not below the second or above the first value, in
seconds."""
_SMALLEST = 32  # The side of shrunk pictures in pixels, if no model draws pictures this small.
_WAITING = 0.2  # If training waits for a larger share of the time, reading is the bottleneck.
_MEMORISES = 100  # Few pictures that come more often are memorised.
_JUDGED = 100  # The smallest number of different captions with which a judge can be trained.


def command(
    package: str,
    candidates: Callable[[], Sequence[Candidate]],
    trained: str = "",
    fine_tuned: Callable[[str], Candidate] | None = None,
) -> None:
    """Run the command `python -m PACKAGE.start --data=PHOTOS`.

    Its --help shows the docstring of the calling module.

    Args:
        package: the package of the command.
        candidates: returns the models to choose from, from the smallest to the largest.
        trained: the workdir of a trained model that may be fine-tuned if there are few pictures.
        fine_tuned: maps the method ("lora" or "full") to the candidate that fine-tunes this model.
    """
    text = flags.DEFINE_string
    data = text("data", None, "The pictures to train on: a path, or SOURCE:PATH::TEXT.", required=True)
    where = text("text", "", "Where the captions are (data.text); default: guessed from the files.")
    hours = flags.DEFINE_float("hours", 2.0, "Total training time of all stages, in hours.")
    out = text("out", "configs/mine.py", "The config to write; further stages get files beside it.")
    weights = text("text_weights", "", "T5 or CLIP to encode captions with; default: word hashes.")
    tall, shrink, finetune = map(_define, ("tall", "shrink", "finetune"))

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
            questions.go_on(show.doubts(photos.records))

            # Ask how to train on few pictures, and what to do with tall and large ones.
            is_available = not weights.value and (pathlib.Path(trained) / runs.CONFIG).is_file()
            method = questions.method(finetune.value, photos, trained if is_available else "")
            if fine_tuned and method != "no":
                models = [fine_tuned(method)]
            shape = questions.tall(tall.value, photos)
            size = max([m.image_size for m in models if m.image_size <= photos.side] or [_SMALLEST])
            if shape == "pad" or questions.shrink(shrink.value, photos, size):
                photos = training_pictures.shrink(photos, size, pathlib.Path("data", path.stem), pad=shape == "pad")

            # Choose a model, measure it, and write its configs.
            of_data = lambda base: changes.of_data(base, photos, weights.value, shape == "keep")
            limit = min(_LIMIT, max(_LEAST_LIMIT, _SHARE * 3600 * hours.value))
            with tempfile.TemporaryDirectory() as folder:
                trial = Trial(models, of_data, f"{folder}/{path.stem}")

                def write(measured: Sequence[Measured]) -> None:
                    shutil.rmtree(folder, ignore_errors=True)
                    _write(package, path, photos, trial.chosen.image_size, measured, hours.value)

                measure = lambda: trial.measure(photos.side, 3600 * hours.value)
                write(until(limit, measure, lambda: write(_assumed(trial, limit))))

    cli.run(main, "write --data={}")


def _define(flag: str) -> flags.FlagHolder[str]:
    """Define the flag that answers a question. By default, the command asks in the terminal."""
    about, answers = questions.QUESTIONS[flag]
    meanings = "; ".join(f"{answer}: {meaning}" for answer, meaning in answers.items())
    values = [questions.ASK, *answers]
    return flags.DEFINE_enum(flag, questions.ASK, values, f"{about}: {meanings}.")


def _check_out(path: pathlib.Path, suffixes: set[str]) -> None:
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ValueError(
            f"--out={path}: give the name of a Python file, such as configs/mine.py, whose stem "
            "has only letters, digits and underscores"
        )
    files.check_writable(path.parent, "--out")
    paths = [*(path.with_stem(path.stem + s) for s in suffixes), path.with_suffix(".png")]
    if existing := [p for p in paths if p.exists()]:
        raise ValueError(f"{existing[0]} exists already: give another --out, or delete this file")


def until(limit: float, measure: Callable[[], T], otherwise: Callable[[], object]) -> T:
    """Return measure(). If this takes over `limit` seconds, call `otherwise` and end the process.

    A compilation cannot be interrupted, so another thread calls `otherwise`. The exit code is 0, or
    2 after an error.
    """
    ends = threading.Lock()  # Whoever acquires it goes on.

    def end() -> None:
        if not ends.acquire(blocking=False):
            return
        try:
            with cli.bad_input():
                otherwise()
            stop_signals.end(0)
        except Exception:  # A bug: show its traceback, then end the process below.
            traceback.print_exc()
        finally:
            stop_signals.end(exits.REFUSED)

    timer = threading.Timer(limit, end)
    timer.daemon = True
    timer.start()
    try:
        return measure()
    finally:
        timer.cancel()
        if not ends.acquire(blocking=False):
            timer.join()  # It ends the process.


def _assumed(trial: Trial, limit: float) -> list[Measured]:
    """Return the stages with an assumed speed if they were not measured in time, and say so."""
    measured = trial.assumed()
    speeds = [
        f"{one.stage.base} trains on {one.images_per_second:.3g} pictures per second" for one in measured if one.assumed
    ]
    print(
        f"\nMeasuring ended after {limit / 60:.2g} minutes. Assumed instead: "
        f"{' and '.join(speeds)}. If training is faster or slower, change the number of steps "
        "(--config.steps)."
    )
    return measured


def _write(
    package: str, path: pathlib.Path, photos: PictureSet, size: int, measured: Sequence[Measured], hours: float
) -> None:
    """Write a config per stage and a sheet of pictures, and print the commands to run next."""
    texts, rows, commands, total = {}, [], [], 0.0
    device = jax.local_devices()[0]
    devices = f"{jax.device_count()} x {device.device_kind}"
    for one in measured:
        stage, allowed = one.stage, 3600 * hours * one.stage.share
        num_pictures = round(len(photos.records) * (1 - one.settings.data.heldout))
        steps, seconds = stages.timed(one, allowed, num_pictures)
        all_changes = {**one.changes, **stage.changes(f"runs/{path.stem}"), **steps}
        config = path.with_stem(path.stem + stage.suffix)
        epochs = steps["steps"][0] * one.settings.run.batch_size / num_pictures
        is_new = not getattr(one.settings, "unet_weights", "")
        notes = {
            "The speed is assumed, because measuring took too long.": one.assumed,
            "This is longer than --hours.": _is_longer(seconds, allowed),
            "This is too short to train on every picture once.": epochs < 1,
            "A new model memorises so few pictures, and draws little else.": is_new
            and epochs > _MEMORISES
            and len(photos.records) < questions.FEW,
        }
        speed = " ".join(
            [
                f"{progress.counted(steps['steps'][0], 'step')} of "
                f"{progress.counted(one.settings.run.batch_size, 'picture')} "
                f"({epochs:,.1f} epochs) take about {_hours(seconds)} on {devices}.",
                *(note for note, true in notes.items() if true),
            ]
        )
        module = systems.find(changes.full_config(stage.base, {})["system"]).command
        commands.append(
            f"python -m {module} --config={shlex.quote(str(config))} --workdir=runs/{path.stem}{stage.suffix}"
        )
        about = f"{stage.base} on the pictures of {photos.data.path}.\n\n{speed}\n\n{commands[-1]}"
        texts[config] = changes.source(stage.base, all_changes, about)
        rows.append((f"{config}", f"{stage.base}: {speed}"))
        total += seconds
    sheet, picture = path.with_suffix(".png"), show.sample_sheet(photos.records, size=size)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as written_last:  # After an error, no file remains.
        for config, content in texts.items():
            written_last.enter_context(files.whole(config)).write_text(content)
        sheets.write_png(sheet, picture)
    print(
        progress.block(
            [
                ("device", f"{devices}, {hardware.limit(device) / 1e9:.1f} GB each"),
                ("chosen", f"pictures of {size}x{size}; training takes about {_hours(total)}"),
                *rows,
                ("bottleneck", _bottleneck(measured)),
                ("sheet", f"{sheet}: training pictures at this size"),
            ]
        )
    )
    print("\nnext:")
    for line in [*commands, *_after(package, path.stem, photos, measured, size)]:
        print(f"  {line}")


def _is_longer(seconds: float, allowed: float) -> bool:
    """Return whether a time is longer than another one, also when both are rounded as shown."""
    return seconds > allowed and _hours(seconds) != _hours(allowed)


def _hours(seconds: float) -> str:
    if seconds < 3600:
        minutes = max(1, round(seconds / 60))
        return f"{minutes} minute" + "s" * (minutes > 1)
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


def _after(package: str, name: str, photos: PictureSet, measured: Sequence[Measured], size: int) -> list[str]:
    """Return the commands to run after training.

    They draw pictures, say whether the model is good, and show the page and the report.
    """
    drawn = [one for one in measured if hasattr(one.settings, "sampler")]
    runs_drawn = [f"runs/{name}{one.stage.suffix}" for one in drawn]
    workdirs = " ".join(f"--workdir={run}" for run in runs_drawn)
    prompt = shlex.quote(drawn[-1].settings.run.prompts[0])
    sample = f"python -m {package}.sample {workdirs} --prompt={prompt} --num_images=8"
    sample += f" --out=pictures/{name}"
    verdict = f"python -m diffusion_jax.verdict {workdirs}"
    page = f"python -m {package}.web --workdir={','.join(runs_drawn)}"
    shown = [page, f"python -m diffusion_jax.report {' '.join(runs_drawn)}"]
    if photos.report["different_texts"] < _JUDGED:
        return [sample, verdict, *shown]
    data = photos.data
    named = shlex.quote(f"{data.source}:{data.path}::{data.text}")
    return [
        sample,
        f"python -m diffusion_jax.metrics train_judge --data={named} --size={max(32, size)} "
        f"--seen=40000 --out=judges/{name}",
        f"{verdict} --judge=judges/{name}",
        f"python -m {package}.evaluate {workdirs} --judge=judges/{name} --prompts={named} --num_prompts=200",
        *shown,
    ]
