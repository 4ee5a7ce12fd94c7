"""The training command, whole, for every system: flags -> checks -> loop."""

import contextlib
import pathlib
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import app, flags, logging
from jax.sharding import Mesh
from ml_collections import config_flags

from diffusion_jax import cli, finetune, runs
from diffusion_jax.config.unread import watched
from diffusion_jax.machine import distributed, exits, files, sharding
from diffusion_jax.train import loop, optimizer
from diffusion_jax.train.checkpoint import NotSaved
from diffusion_jax.train.not_finite import NothingLearned
from diffusion_jax.train.out_of_memory import OutOfMemory
from diffusion_jax.train.rehearse import rehearse
from diffusion_jax.train.state import TrainState
from diffusion_jax.train.trace import FOLDER, Trace, parse
from diffusion_jax.weights import restore

_WATCHED = ("diffusion", "super_resolution", "sampler", "data", "text")
"""Groups whose readers are chosen by name."""
_PATHS = ("path", "weights", "store")
"""Fields that name files."""
flags.disclaim_key_flags()  # They belong to the command that calls `command`: --help shows them.


def command(
    read: Callable[[Mapping[str, Any]], Any], prepare: Callable[[Any, Mesh], loop.Inputs]
) -> None:
    """Runs `python -m SYSTEM.train --config=FILE --workdir=FOLDER`; the caller's is its --help.

    `read` makes settings of a config, `run`, `optimizer` and `mesh` among them. What it and
    `prepare` raise of ValueError and OSError is one message and exit code 2; SIGTERM saves and
    exits with 143.
    """
    config = cli.define_config()
    workdir = flags.DEFINE_string(
        "workdir", None, "The folder of this run; made if need be.", required=True
    )
    alone = flags.DEFINE_bool("rehearse", False, "Say what the run would be, and end.")
    device_memory = flags.DEFINE_float(
        "device_memory", None, "Bytes that a device will have, with --rehearse; else as these have."
    )
    flags.mark_flag_as_required("config")
    profiled = flags.DEFINE_string(
        "profile_steps", "", "Steps to trace for xprof into the workdir's `profile`: 100:105."
    )

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unknown arguments {argv[1:]}", 2)
        cli.start()
        folder = files.path(workdir.value)
        with contextlib.ExitStack() as held:
            with cli.bad_input():
                if not workdir.value:
                    raise ValueError("--workdir is empty: name the folder of this run")
                trace = Trace(folder / FOLDER, parse(profiled.value))
                s, unread = watched(read(config.value.to_dict()), _WATCHED)
                mesh = sharding.make_mesh(*s.mesh)
                passes = optimizer.for_mesh(s.optimizer, s.run.batch_size, mesh)
                inputs = prepare(s, mesh)
                held.enter_context(inputs.batches)
                runs.claim(folder, config.value.to_dict(), write=False)
                finetune.check_base(folder, inputs.base)
                limit = device_memory.value
                told = rehearse(inputs, s.run, passes, mesh, folder, alone.value, limit)
                _say(told, unread(), config_flags.get_override_values(flags.FLAGS["config"]))
                if alone.value:
                    return
                held.enter_context(runs.writing(folder))
                runs.claim(folder, config.value.to_dict())
                finetune.keep_base(folder, inputs.base)
            distributed.advise(lambda: how_to_go_on(folder))
            held.enter_context(
                cli.bad_input(NothingLearned, OutOfMemory, restore.Damaged, usual=())
            )
            # With a code at which launchers start it again: room or data may be there by then.
            held.enter_context(cli.bad_input(NotSaved, FileNotFoundError, usual=(), code=1))
            state = loop.train(inputs, s.run, passes, mesh, folder, config.value.to_dict(), trace)
        exit_if_stopped(state, s.run.steps)
        logging.info("done: %s", folder)

    cli.run(main)


def _say(told: str, unread: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """The block of a rehearsal, and a warning of each field that it did not need.

    ValueError for one that is a path and was given by flag.
    """
    for field in unread:
        if field in given and field.rpartition(".")[2] in _PATHS:
            raise ValueError(
                f"--config.{field}={unread[field]}: nothing here reads it; leave it out, or choose "
                "what does"
            )
    if jax.process_index() == 0:
        print(told, flush=True)
        for field, value in unread.items():
            logging.warning("%s is %r, which nothing here reads", field, value)


def how_to_go_on(workdir: pathlib.Path) -> str:
    """What to do when a run has ended before its time, for a message."""
    there = restore.steps(workdir / runs.CHECKPOINTS)
    last = f"The last checkpoint is of step {there[-1]}" if there else "There is no checkpoint yet"
    return f"{last}; the same command, in each process, continues: {shlex.join(sys.orig_argv)}"


def exit_if_stopped(state: TrainState, steps: int) -> None:
    """Exits with 143 if the loop ended before `steps`, as it does at SIGTERM."""
    if int(state.step) < steps:
        logging.info("stopped by SIGTERM at step %d; the same command continues", int(state.step))
        sys.exit(exits.PREEMPTED)
