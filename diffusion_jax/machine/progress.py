"""How far a long job is: a line now and then with its rate and the time left."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from absl import logging

from diffusion_jax.machine import log

T = TypeVar("T")


def reported(items: Iterable[T], total: int, noun: str, every: float = 10.0) -> Iterator[T]:
    """The items, with a line after each `every` seconds and at the end; `noun` is their plural."""
    start = last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= every or done == total:
            last = now
            logging.info("%s", line(done, total, noun, now - start))


def line(done: int, total: int, noun: str, seconds: float) -> str:
    """For example "30 of 100 shards | 1.5 a second | 0:00:47 left"."""
    rate = done / seconds if seconds else float("inf")
    left = (total - done) / rate if rate else float("inf")
    return f"{done:,} of {total:,} {noun} | {rate:,.1f} a second | {log.clock(left)} left"
