"""Work that several processes share through one folder: each piece is a file of its own.

Nobody waits for anybody: a worker does its own part first and then what nobody has done yet, so
that those that die, restart, come late or leave change nothing but the time.
"""

import pathlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import jax
from absl import flags

flags.disclaim_key_flags()  # They belong to the command that calls `define_flags`.
_T = TypeVar("_T")
_R = TypeVar("_R")


class Share(NamedTuple):
    """One of several workers, counted from 0."""

    worker: int = 0
    workers: int = 1

    def turns(self, count: int) -> Iterator[int]:
        """0 ... count - 1: this worker's own part in order, then the rest at random.

        The rest is for those who have died; at random, so that the others seldom do the same.
        """
        own = range(count * self.worker // self.workers, count * (self.worker + 1) // self.workers)
        rest = [i for i in range(count) if i not in own]
        random.Random(self.worker).shuffle(rest)
        yield from own
        yield from rest

    def missing(self, paths: Sequence[pathlib.Path]) -> Iterator[int]:
        """The numbers of the files that are not there when it is their turn."""
        return (i for i in self.turns(len(paths)) if not paths[i].exists())


def define_flags() -> None:
    """The flags of a command whose work is shared, and --dry_run or --rehearse."""
    flags.DEFINE_integer("worker", None, "The number of this process.", lower_bound=0)
    flags.DEFINE_integer("workers", None, "How many processes do this.", lower_bound=1)
    flags.DEFINE_bool("dry_run", False, "Say what would be done, and write nothing.")
    flags.DEFINE_alias("rehearse", "dry_run")


def share(worker: int | None, workers: int | None) -> Share:
    """A process's share; None stands for what jax.distributed says. ValueError if it has none."""
    workers = workers or jax.process_count()
    worker = jax.process_index() if worker is None else worker
    if worker >= workers:
        raise ValueError(f"--worker={worker} of --workers={workers}: they are counted from 0")
    return Share(worker, workers)


def ahead(function: Callable[[_T], _R], items: Iterator[_T]) -> Iterator[tuple[_T, _R]]:
    """(item, function(item)) of each, the next being computed while one is used."""
    waiting = None
    with ThreadPoolExecutor(1) as executor:
        for item in items:
            coming = item, executor.submit(function, item)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = coming
        if waiting is not None:
            yield waiting[0], waiting[1].result()
