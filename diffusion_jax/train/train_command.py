"""The training command, shared by all systems: it reads flags, checks the run and trains."""

import contextlib
import itertools
import math
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import flags, logging
from jax.sharding import Mesh
from ml_collections import config_flags

from diffusion_jax import cli, files, heldout, runs, systems
from diffusion_jax.config import picture_fields
from diffusion_jax.config.settings import Data, Evaluation
from diffusion_jax.config.unread import watched
from diffusion_jax.data import home, prompts
from diffusion_jax.data.captions import every
from diffusion_jax.data.pipeline import OtherData
from diffusion_jax.devices import distributed, sharding, stop_signals
from diffusion_jax.files import settings_record
from diffusion_jax.logs import goodput, run_log, weights_and_biases
from diffusion_jax.text import vocabulary
from diffusion_jax.train import continuing, loop, optimizer
from diffusion_jax.train.checkpoint import NotSaved
from diffusion_jax.train.measuring import MEASURING
from diffusion_jax.train.not_finite import NothingLearned
from diffusion_jax.train.out_of_memory import OutOfMemory
from diffusion_jax.train.rehearse import rehearse
from diffusion_jax.train.state import TrainState
from diffusion_jax.train.trace import FOLDER, Trace, parse
from diffusion_jax.weights import finetune, restore

_WATCHED = ("diffusion", "super_resolution", "sampler", "data", "text", "optimizer", "lora")
"""Config groups with fields that only some samplers, data sources, optimizers and so on read."""
_OPTIONAL = ("evaluation",)
"""Config groups that configs may set in advance, for runs that turn the group on."""
_PATHS = ("path", "weights", "store")
"""Names of config fields that hold a file or folder."""
_LOCAL = (*_PATHS, "prior", "mixture", "threads")
"""Names of config fields that may differ between processes, such as the path of a local copy."""
_OF_CONFIG = (home.RUN, finetune.BASE, finetune.FROZEN, vocabulary.FILE, run_log.METRICS, MEASURING)
"""Names of files in a workdir that depend on its config."""
# The largest number of captions that a vocabulary is made from, and how many are read at once.
_CAPTIONS, _CHUNK = 20_000, 256
_SECONDS = 15  # After this time, no further captions are read.
flags.disclaim_key_flags()  # --help shows the flags with the module that calls `command`.


def command(read: Callable[[Mapping[str, Any]], Any], prepare: Callable[[Any, Mesh], loop.RunInputs]) -> None:
    """Run the training command, `python -m SYSTEM.train --config=FILE --workdir=FOLDER`.

    The docstring of the calling module is the --help text. If `read` or `prepare` raises ValueError
    or OSError, the command prints one line and exits with code 2. On SIGTERM, SIGHUP or Ctrl-C it
    saves a checkpoint and exits with code 143, 129 or 130. It exits with code 1 if a checkpoint
    cannot be saved.

    Args:
        read: Converts a config to settings, which include `run`, `optimizer` and `mesh`.
        prepare: Maps (settings, mesh) to the loop.RunInputs of a run: it opens the task, the data
            and the examples.
    """
    config = cli.define_config()
    workdir_flag = flags.DEFINE_string("workdir", None, "The folder of this run; created if needed.", required=True)
    continue_from = flags.DEFINE_string(
        "continue_from",
        "",
        "Start a new workdir with the state of another run, as RUN or "
        "RUN@STEP, and with other settings, such as another batch size or learning rate.",
    )
    alone = flags.DEFINE_bool("rehearse", False, "Describe the run and exit without training.")
    device_memory = flags.DEFINE_float(
        "device_memory", None, "Device memory in bytes for --rehearse; default: this machine's."
    )
    ignore_memory = flags.DEFINE_bool(
        "ignore_memory", False, "Train even if a step seems to need more memory than a device has."
    )
    cpu_minutes = flags.DEFINE_float(
        "cpu_minutes",
        math.inf,
        "End the run, with a checkpoint, once all of its steps have taken "
        "this CPU time in all threads: for fair comparisons on a shared CPU.",
        lower_bound=0,
    )
    flags.mark_flag_as_required("config")
    profiled = flags.DEFINE_string(
        "profile_steps", "", "Steps to trace for xprof, such as 100:105; written to WORKDIR/profile."
    )

    def main() -> None:
        cli.start()
        workdir = files.path(workdir_flag.value)
        with contextlib.ExitStack() as stack:
            with cli.bad_input():
                # Read the flags and the config.
                if not workdir_flag.value:
                    raise ValueError("--workdir is empty: name the folder of this run")
                trace = Trace(workdir / FOLDER, parse(profiled.value))
                values = config.value.to_dict()
                weights_and_biases.check(values["log"]["wandb"])
                if cpu_minutes.value < math.inf and jax.process_count() > 1:
                    raise ValueError("--cpu_minutes works in a run of one process only: remove it")
                source = continuing.find(workdir, continue_from.value, values)
                s, unread = watched(read(values), (*_WATCHED, *_OPTIONAL))
                trained = "unet" if hasattr(s, "unet") else "vae"
                optimizer.check_dtype(trained, getattr(s, trained))
                check_configs(values)
                mesh = sharding.make_mesh(*s.mesh)
                sharding.check_batch(s.run.batch_size, s.optimizer.micro_batch, mesh)

                # Open the data, the text encoder, and the measurements during training.
                begun = runs.has_checkpoint(workdir)
                with home.tables_of(workdir, begun) as tables:
                    inputs = prepare(s, mesh)
                stack.enter_context(inputs.batches)
                check_data(inputs.batches.digests)
                if inputs.open_prompts and s.evaluation.every:
                    evaluation = open_evaluation(s.evaluation, s.data, s.output_size, inputs.open_prompts)
                    inputs = inputs._replace(evaluation=evaluation)
                if measure := inputs.task.measure:
                    records = heldout.open_records(s.heldout, inputs.batches, measure)
                    inputs = inputs._replace(records=records)

                # Check that the workdir belongs to this run. Trace everything the run will compute.
                runs.claim(workdir, values, write=False)
                if begun:
                    finetune.check_base(workdir, inputs.base)
                    finetune.check_frozen(workdir, inputs.task.frozen)
                report = rehearse(
                    inputs,
                    s.run,
                    s.optimizer,
                    mesh,
                    workdir,
                    alone.value,
                    device_memory.value,
                    ignore_memory.value,
                    source,
                )
                if source:
                    report += "\n" + continuing.prepare(source, inputs, s.run, s.optimizer, mesh)
                _print_report(report, unread(), config_flags.get_override_values(flags.FLAGS["config"]))
                if alone.value:
                    return

                # Claim the workdir, so that no other run writes to it until this process ends.
                stack.enter_context(runs.writing(workdir))
                if runs.claim(workdir, values) and jax.process_index() == 0:
                    for name in _OF_CONFIG:  # These belong to the config that was replaced.
                        (workdir / name).unlink(missing_ok=True)
                if jax.process_index() == 0:
                    tables.write()
                finetune.keep_base(workdir, inputs.base)
                finetune.keep_frozen(workdir, inputs.task.frozen)
                weights = values.get("unet", {}).get("weights", "")
                keep_vocabulary(workdir, inputs, source.run if source else weights)

            # Train. Known failures become one-line messages. A failure that may not occur at the
            # next start, such as a lost disk or expired credentials of a bucket, exits with code 1,
            # after which launchers start the command again.
            distributed.advise(how_to_go_on(workdir))
            stack.enter_context(cli.bad_input(NothingLearned, OutOfMemory, OtherData, restore.Damaged, usual=()))
            stack.enter_context(cli.bad_input(NotSaved, OSError, usual=(), code=1))
            if source:
                continuing.write_first_checkpoint(source, inputs, s.run, s.optimizer, mesh, workdir, values)
            limit = 60 * cpu_minutes.value
            state = loop.train(inputs, s.run, s.optimizer, mesh, workdir, values, trace, cpu_seconds=limit)
        if limit == math.inf or stop_signals.received():
            exit_if_stopped(state, s.run.steps)
        elif int(state.step) < s.run.steps:
            logging.info("step %d: --cpu_minutes=%g are spent", state.step, cpu_minutes.value)
        if times := jax.process_index() == 0 and goodput.summary(run_log.read_starts(workdir)):
            logging.info("where the time went: %s", times)
        logging.info("done: %s", workdir)

    cli.run(main)


def check_configs(config: Mapping[str, Any]) -> None:
    """Raise ValueError in all processes if their configs differ, except in the paths of files."""
    fields = settings_record.flat(systems.complete(config)).items()
    local = lambda name, value: (
        name.rpartition(".")[2] in _LOCAL or (name.startswith("evaluation.") and isinstance(value, str))
    )
    facts = {name: value for name, value in fields if not local(name, value)}
    distributed.check_equal(facts, "start all processes with the same config")


def check_data(digests: Mapping[str, Any]) -> None:
    """Raise ValueError in all processes if the names or sizes of their data differ.

    `digests` is the result of `fingerprints.digests` for the data of this process.
    """
    distributed.check_equal(digests, "give all processes the same data (data.path)")


def open_evaluation(s: Evaluation, data: Data, size: int, open_prompts: loop.OpenPrompts) -> loop.Scoring:
    """Return the scoring that a config's `evaluation` group `s` describes.

    `data` is the config's `data` group, and `size` the side of the drawn images in pixels. Raises
    ValueError or OSError if the prompts or the scorer cannot be opened.
    """
    # Imported here because it loads references, extractors and metrics.
    from diffusion_jax.train import scoring

    prompts.refuse_numbers(s.prompts, picture_fields.read(data.fields))
    return scoring.open_scoring(s, data.source, size, open_prompts)


def keep_vocabulary(workdir: pathlib.Path, inputs: loop.RunInputs, origin: str = "") -> None:
    """Write vocabulary.json, the words of the training captions, into the workdir of a new run.

    `origin` is the run, RUN or RUN@STEP, whose weights this run starts from or adapts: its words
    are written, too. Nothing is written if it has no vocabulary, if the system does not draw from
    prompts, or if the workdir has this file already. At most _CAPTIONS captions are read, evenly
    spread over the data, for at most _SECONDS seconds.
    """
    exists = (workdir / vocabulary.FILE).exists()
    base = vocabulary.read(finetune.at_step(origin)[0]) if origin else vocabulary.of(())
    if jax.process_index() or exists or base is None or not inputs.open_prompts:
        return
    pictures, started, captions = inputs.batches.pictures, time.monotonic(), []
    rows = np.unique(np.linspace(0, len(pictures) - 1, _CAPTIONS).astype(int))
    # Each chunk of rows is spread over the whole data, in case the time ends early.
    num_chunks = -(-len(rows) // _CHUNK)
    for first in range(num_chunks):
        texts = itertools.chain(*map(every, pictures.texts(rows[first::num_chunks])))
        captions += [text for text in texts if isinstance(text, str) and text]
        if time.monotonic() - started > _SECONDS:
            break
    if captions or origin:
        vocabulary.write(workdir, vocabulary.joined(base, vocabulary.of(captions)))


def _print_report(report: str, unread: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Print the report of a rehearsal, and warn about each config field that the run does not read.

    `unread` maps such fields to their values, and `overrides` holds the fields that the command
    line sets. Fields of _OPTIONAL are left out unless they are among these. Raises ValueError if an
    unread field is a path that the command line sets.
    """
    for field, value in unread.items():
        if field in overrides and field.rpartition(".")[2] in _PATHS:
            raise ValueError(
                f"this run does not read --config.{field}={value}: leave it out, or choose a "
                "sampler, data source or text encoder that reads it"
            )
    if jax.process_index() == 0:
        print(report, flush=True)
        for field, value in unread.items():
            if field in overrides or not field.startswith(_OPTIONAL):
                logging.warning("%s is %r, but has no effect: this run does not read it", field, value)


def how_to_go_on(workdir: pathlib.Path) -> str:
    """Return a sentence that tells the user how to continue a run that ended early."""
    return (
        "The same command, in each process, continues from the last checkpoint in "
        f"{workdir / runs.CHECKPOINTS}: {shlex.join(sys.orig_argv)}"
    )


def exit_if_stopped(state: TrainState, steps: int) -> None:
    """Exit with the code of the signal that ended the loop, if it ended before step `steps`."""
    if int(state.step) < steps:
        name = stop_signals.name()
        logging.info("stopped at step %d by %s; to continue, run the same command", int(state.step), name)
        sys.exit(stop_signals.exit_code())
