"""A command that trains the toy system, and kills itself in the requested phase."""

import os
import signal
import sys

import jax
from absl import flags

from diffusion_jax import cli, exits, files
from diffusion_jax.config.settings import Optimizer, Run
from diffusion_jax.data import pipeline
from diffusion_jax.devices import distributed, sharding
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.train import checkpoint, loop, step_report, train_command
from tests.diffusion_jax import toy

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of this run.")
_STEPS = flags.DEFINE_integer("steps", None, "Steps in all.")
_TIMEOUT = flags.DEFINE_integer("step_timeout", 600, "Seconds for a step.")
_KILL = flags.DEFINE_enum("kill", "", ["", "start", "compile", "step", "save", "evaluation"], "Where it kills itself.")
_KILLED = flags.DEFINE_integer("killed", 0, "The number of the process that does.")

OPTIMIZER = Optimizer(
    lr=1e-3, warmup=3, b2=0.99, ema_decays=(0.9,), ema_warmup=False, ema_widths=(0.1,), snapshot_every=2
)


def main():
    """Train, and end like the systems' commands."""
    cli.start()
    doomed = _KILL.value if jax.process_index() == _KILLED.value else ""
    if doomed:
        _KILLS[doomed]()
    run = Run(steps=_STEPS.value, batch_size=8, seed=5, log_every=1, sample_every=0, save_every=2)
    run = run._replace(keep_last=2, step_timeout=_TIMEOUT.value)
    mesh = sharding.make_mesh()
    where = pipeline.local_rows(sharding.batch_sharding(mesh), run.batch_size)
    captions = tuple(digits.heldout_prompts()[:1])
    examples = loop.Examples(toy.ENCODER.tokenize(captions), captions, 1.0)
    with toy.batches(run, process_index=where[0], process_count=where[1]) as batches:
        distributed.advise(train_command.how_to_go_on(files.path(_WORKDIR.value)))
        scoring = loop.Scoring(5 * run.batch_size, lambda draw, params: _die() or {})
        evaluation = scoring if doomed == "evaluation" else None
        inputs = loop.RunInputs(toy.task(), batches, examples, evaluation)
        state = loop.train(inputs, run, OPTIMIZER, mesh, files.path(_WORKDIR.value), {})
    if int(state.step) < run.steps:
        sys.exit(exits.PREEMPTED)


def _die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def _at_step():
    add, added = step_report.StepReport.add, []

    def dying(self, *arguments):
        add(self, *arguments)
        added.append(1)
        if len(added) == 2:
            _die()

    step_report.StepReport.add = dying


def _in_saving():
    save = checkpoint.Checkpointer.save

    def dying(self, *arguments, **options):
        save(self, *arguments, **options)
        _die()

    checkpoint.Checkpointer.save = dying


_KILLS = {
    "start": _die,
    "compile": lambda: setattr(loop, "make_step", _die),
    "step": _at_step,
    "save": _in_saving,
    "evaluation": lambda: None,
}

if __name__ == "__main__":
    cli.run(main)
