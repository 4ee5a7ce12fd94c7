"""The training loop on the toy system, as a command."""

import pathlib
import sys

from absl import flags

from diffusion_jax import cli
from diffusion_jax.data import digits, pipeline
from diffusion_jax.machine import distributed, exits, sharding
from diffusion_jax.settings import Optimizer, Run
from diffusion_jax.train import command, loop
from tests.diffusion_jax import toy

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of this run.")
_STEPS = flags.DEFINE_integer("steps", None, "Steps in all.")
_TIMEOUT = flags.DEFINE_integer("step_timeout", 600, "Seconds for a step.")

OPTIMIZER = Optimizer(
    lr=1e-3, schedule="constant", warmup=3, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01, clip=1.0,
    accumulate=1, ema_decays=(0.9,), ema_warmup=False,
)  # fmt: skip


def main(argv):
    """Trains, and ends as the systems' commands do."""
    del argv
    cli.start()
    run = Run(
        seed=5, steps=_STEPS.value, batch_size=8, log_every=1, sample_every=0, save_every=2,
        keep_last=2, keep_every=0, step_timeout=_TIMEOUT.value, prompts=(),
    )  # fmt: skip
    mesh = sharding.make_mesh()
    where = pipeline.local_rows(sharding.batch_sharding(mesh), run.batch_size)
    captions = tuple(digits.heldout_prompts()[:1])
    examples = loop.Examples(toy.ENCODER.tokenize(captions), captions, 1.0)
    pictures = digits.Digits(toy.SIZE)
    with pipeline.make_batches(
        pictures, toy.ENCODER.tokenize, batch_size=run.batch_size, seed=run.seed,
        process_index=where[0], process_count=where[1],
    ) as batches:  # fmt: skip
        distributed.advise(lambda: command.how_to_go_on(pathlib.Path(_WORKDIR.value)))
        inputs = loop.Inputs(toy.task(), batches, examples)
        state = loop.train(inputs, run, OPTIMIZER, mesh, pathlib.Path(_WORKDIR.value), {})
    if int(state.step) < run.steps:
        sys.exit(exits.PREEMPTED)


if __name__ == "__main__":
    cli.run(main)
