"""Profile some training steps for xprof, which shows the time spent on devices and host.

    python -m imagen_jax.train --config=... --workdir=RUN --profile_steps=100:105
    pip install xprof && xprof --logdir=RUN/profile

In the trace, operations are labelled with the network's modules, the loss and the update. The rows
of the host show each step and each wait for data.
"""

import contextlib
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
from absl import logging

from diffusion_jax.files import remote

FOLDER = "profile"


def parse(text: str) -> range:
    """Parse a range of steps: "100:105" is 100 to 104, "100" is one step, and "" is none.

    Raises ValueError for any other text.
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"([1-9]\d*)(?::(\d+))?", text)
    steps = range(int(match[1]), int(match[2] or int(match[1]) + 1)) if match else range(0)
    if not steps:
        raise ValueError(f"--profile_steps={text}: write FIRST:END, such as 100:105 for five steps")
    return steps


class Trace:
    """A profiler trace of the steps in a range, written to a folder.

    Call `close` even if training ends early.
    """

    def __init__(self, folder: pathlib.Path, steps: range) -> None:
        self._folder, self._steps, self._running = folder, steps, False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[list[Any]]:
        """Enclose one training step, and trace it if it is in the range.

        The caller appends the step's results to the yielded list. The trace ends as soon as the
        results of the last traced step are computed.
        """
        results: list[Any] = []
        if self._steps and number == self._steps.start:
            self._mirror = remote.Mirror(self._folder)
            jax.profiler.start_trace(self._mirror.local)
            self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield results
        if self._running and number + 1 == self._steps.stop:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """End the trace if it is still running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            self._mirror.close()
            logging.info("traced for xprof: %s", self._folder)


NO_TRACE = Trace(pathlib.Path(FOLDER), range(0))
