"""Run compiled programs with a log line on compilation, or only trace them in a rehearsal.

A rehearsal runs the code around its programs unchanged; the programs return zeros.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging

_rehearsals: list[bool] = []


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Inside this context, `announced` programs are traced, but neither compiled nor run."""
    _rehearsals.append(True)
    try:
        yield
    finally:
        _rehearsals.pop()


def rehearsing() -> bool:
    """Return whether programs are only traced."""
    return bool(_rehearsals)


def on_host(function: Callable[..., None], *arrays: jax.Array) -> None:
    """Call a host function whenever the traced program runs; in a rehearsal now, with zeros."""
    jax.debug.callback(function, *arrays)
    if rehearsing():
        function(*(np.zeros(x.shape, x.dtype) for x in arrays))


def watched(
    denoise: Callable[..., Any],
    preview: Callable[..., None],
    colours: Callable[[Any], Any] = lambda x0: x0,
) -> Callable[..., Any]:
    """Return a denoiser D(x, sigma) with the same results, which also sends them to the host.

    Args:
        denoise: The denoiser; its results do not change.
        preview: Called on the host with colours(x0) and the noise level. An error that it raises
            ends the program.
        colours: Turns x0 into RGB images, for example from latents.
    """

    def shown(x, sigma):
        x0 = denoise(x, sigma)
        on_host(preview, colours(x0), sigma[0])
        return x0

    return shown


def announced(program: Any, what: str = "") -> Callable[..., Any]:
    """Return a jitted function that logs its compilations under the name `what`.

    With "" the log lines have the level debug, for programs that compile quickly.
    """
    compiled = {}

    def call(*arguments: Any) -> Any:
        if rehearsing():
            shapes = jax.eval_shape(program, *arguments)
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        leaves, tree = jax.tree.flatten(arguments)
        key = tree, *((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)
        if key not in compiled:
            start, log = time.time(), logging.info if what else logging.debug
            log("compiling %s ...", what)
            compiled[key] = program.lower(*arguments).compile()
            log("compiled %s in %.1f s", what, time.time() - start)
        return compiled[key](*arguments)

    return call
