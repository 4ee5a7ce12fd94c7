"""Compiled programs: they say that they compile and for how long, or are only traced in rehearsals.

A rehearsal runs the code around its programs as it is. What the programs would give are zeros.
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
    """A context in which `announced` programs are traced, and neither compiled nor run."""
    _rehearsals.append(True)
    try:
        yield
    finally:
        _rehearsals.pop()


def rehearsing() -> bool:
    """Whether programs are traced alone."""
    return bool(_rehearsals)


def on_host(function: Callable[..., None], *arrays: jax.Array) -> None:
    """Calls a function with arrays whenever a program runs; in a rehearsal now, with zeros."""
    jax.debug.callback(function, *arrays)
    if rehearsing():
        function(*(np.zeros(x.shape, x.dtype) for x in arrays))


def watched(
    denoise: Callable[..., Any],
    preview: Callable[..., None],
    colours: Callable[[Any], Any] = lambda x0: x0,
) -> Callable[..., Any]:
    """The same D(x, sigma), which shows the host what it finds, in these colours, and its level.

    The bits are the same; an error that `preview` raises ends the program.
    """

    def shown(x, sigma):
        x0 = denoise(x, sigma)
        on_host(preview, colours(x0), sigma[0])
        return x0

    return shown


def announced(program: Any, what: str = "") -> Callable[..., Any]:
    """A jitted function, called as it is; `what` is its name for people, "" for a short one's."""
    compiled = {}

    def call(*arguments: Any) -> Any:
        if rehearsing():
            shapes = jax.eval_shape(program, *arguments)
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        leaves, tree = jax.tree.flatten(arguments)
        key = tree, *((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)
        if key not in compiled:
            start, say = time.time(), logging.info if what else logging.debug
            say("compiling %s ...", what)
            compiled[key] = program.lower(*arguments).compile()
            say("compiled %s in %.1f s", what, time.time() - start)
        return compiled[key](*arguments)

    return call
