"""Compare samplers with few steps by speed and accuracy, for a run on the coloured digits.

    python -m benchmarks.few_steps --run=runs/quickstart --steps=2,3,4,6,8,12

For each sampler and number of steps, the command draws one picture for each prompt in the training
data. The table shows the milliseconds per picture (CPU time on a CPU, wall time elsewhere). It also
shows the share of pictures in which a classifier recognises the right digit, ink colour and paper
colour. All other settings are those of the run.
"""

import time
from typing import Any

import jax
from absl import app, flags

from benchmarks import measure
from diffusion_jax import cli
from diffusion_jax.config import named
from diffusion_jax.diffusion.samplers import SAMPLERS
from diffusion_jax.examples.digits import judge as judges
from diffusion_jax.examples.digits import pictures as digits
from imagen_jax import cascade

_RUN = flags.DEFINE_string("run", None, "Workdir of a run on the digits.", required=True)
_STEPS = flags.DEFINE_list("steps", ["2", "3", "4", "6", "8", "12"], "Numbers of steps to compare.")
_NAMES = flags.DEFINE_list("samplers", list(SAMPLERS), "Samplers to compare.")
_GRID = flags.DEFINE_string("grid", None, "Name of the grid of noise levels; default: the run's.")


def main(argv: list[str]) -> None:
    """Draw with each sampler and number of steps, score the pictures, and print the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: write flags as --NAME=VALUE", 2)
    cli.start(alone=True)
    with cli.bad_input():
        for name in _NAMES.value:
            named.one_of("--samplers", name, SAMPLERS)
        steps = [int(number) for number in _STEPS.value]
    judge, prompts = judges.fit_judge(), digits.seen_prompts()
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    measure.say("| sampler | steps | ms per picture | correct pictures |\n|---|---|---|---|")
    for name in _NAMES.value:
        for number in steps:
            sampler: dict[str, Any] = {"sampler": name, "steps": number, "grid": _GRID.value}
            choice = cascade.choose(**sampler)
            with cli.bad_input():
                model = cascade.load_model(_RUN.value, *choice)
            draw = lambda model=model: cascade.draw([model], prompts, range(len(prompts)))[-1]
            draw()
            start = clock()
            images = draw()
            seconds = (clock() - start) / len(prompts)
            right = judges.compare(judge(images), prompts).min(axis=1).mean()
            measure.say(f"| {name} | {number} | {1e3 * seconds:.2f} | {100 * right:.1f} % |")


if __name__ == "__main__":
    cli.run(main)
