"""Compile programs with a log line for each compilation, or only trace them in a rehearsal.

In a rehearsal, compiled programs return zeros. The code around them runs unchanged.
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
    """Return a context in which functions returned by `announced` only trace their programs.

    These programs are neither compiled nor run.
    """
    _rehearsals.append(True)
    try:
        yield
    finally:
        _rehearsals.pop()


def rehearsing() -> bool:
    """Return whether a rehearsal is active."""
    return bool(_rehearsals)


def on_host(function: Callable[..., None], *arrays: jax.Array) -> None:
    """Make the program that is being traced call a host function with `arrays` whenever it runs.

    In a rehearsal, the function is called with zeros during tracing, because the program never
    runs.
    """
    jax.debug.callback(function, *arrays)
    if rehearsing():
        function(*(np.zeros(x.shape, x.dtype) for x in arrays))


def watched(
    denoise: Callable[..., Any], preview: Callable[..., None], colours: Callable[[Any], Any] = lambda x0: x0
) -> Callable[..., Any]:
    """Return a denoiser D(x, sigma) that also sends its results to a function on the host.

    Args:
        denoise: The denoiser. Its results do not change.
        preview: Called on the host with colours(x0) and the noise level sigma, if all colours are
            finite. If it raises an error, the program ends.
        colours: Converts x0 to RGB images, for example from latents.
    """

    def show(images, sigma):
        if np.isfinite(images).all():
            preview(images, sigma)

    def shown(x, sigma):
        x0 = denoise(x, sigma)
        on_host(show, colours(x0), sigma[0])
        return x0

    return shown


def announced(program: Any, what: str = "") -> Callable[..., Any]:
    """Return a function that calls the jitted `program` and logs each of its compilations.

    `what` describes the program in the log. For programs that compile quickly, `what` is "" and the
    log level is debug. In a rehearsal, the program is only traced, and the function returns zeros.
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
