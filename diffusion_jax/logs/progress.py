"""Log the progress of long jobs: a line every few seconds with the rate and the time left.

Also format lines for people: counts, durations and tables of labels.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from absl import logging

from diffusion_jax.devices import hardware

T = TypeVar("T")


def counted(count: int, noun: str) -> str:
    """Return a number with a noun in the singular or plural, such as "1 pass" or "2,000 passes"."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending if count != 1 else ''}"


class Meter:
    """Logger of lines such as "encoding: 30/1,000 captions | 1.5 captions/s | 0:10:47 left".

    A line is logged at most once per `every` seconds, and when the count reaches `total`. If
    `total` is None, the line shows the elapsed time instead of the time left. The count starts at
    `done`. The rate includes only items counted after that.
    """

    def __init__(self, noun: str, total: int | None, *, name: str = "", done: int = 0, every: float = 5.0):
        """Start the clock.

        `noun` is the plural of the counted items, such as "captions". `name` is the name of the
        job, with which each line starts.
        """
        self._noun, self._total, self._every = noun, total, every
        self._name = f"{name}: " if name else ""
        self._done = self._first = done
        self._start = self._last = time.monotonic()

    def add(self, count: int = 1) -> None:
        """Add to the count, and log a line if `every` seconds have passed."""
        self.reach(self._done + count)

    def reach(self, done: int) -> None:
        """Set the count, and log a line if `every` seconds have passed."""
        self._done = done
        now = time.monotonic()
        if self._done == self._total or now - self._last >= self._every:
            self._last = now
            self.log()

    def log(self) -> None:
        """Log the count, the rate and the time left, without waiting for the interval."""
        logging.info("%s%s", self._name, self._line(time.monotonic() - self._start))

    def _line(self, seconds: float) -> str:
        rate = (self._done - self._first) / seconds if seconds else math.inf
        speed = _speed(rate, self._noun)
        if self._total is None:
            return f"{self._done:,} {self._noun} | {speed} | {clock(seconds)} so far"
        left = (self._total - self._done) / rate if rate else math.inf
        return f"{self._done:,}/{self._total:,} {self._noun} | {speed} | {clock(left)} left"


def reported(
    items: Iterable[T],
    total: int | None,
    noun: str,
    *,
    name: str = "",
    size: Callable[[T], int] = lambda item: 1,
    every: float = 5.0,
) -> Iterator[T]:
    """Yield the items and log progress.

    The count of an item is size(item), by default 1. It is added when the caller asks for the next
    item. `total`, `noun`, `name` and `every` are those of Meter.
    """
    meter = Meter(noun, total, name=name, every=every)
    for item in items:
        yield item
        meter.add(size(item))
    if total is None:
        meter.log()


def step_line(
    step: int,
    steps: int,
    *,
    images_per_second: float,
    loss: float,
    seconds_left: float,
    memory: hardware.Memory | None = None,
    utilization: float | None = None,
) -> str:
    """Return a line such as "step 300/8,000 | 812 images/s | loss 0.1234 | 0:03:12 left | ...".

    It ends with the memory (peak use/limit) and the model FLOP utilization, if these are given.
    `utilization` is in [0, 1].
    """
    parts = [
        f"step {step:,}/{steps:,}",
        _speed(images_per_second, "images"),
        f"loss {loss:.4f}",
        f"{clock(seconds_left)} left",
    ]
    if memory:
        parts.append(f"{memory.peak / 2**30:.1f}/{memory.limit / 2**30:.1f} GiB")
    if utilization is not None:
        parts.append(f"MFU {100 * utilization:.1f} %")
    return " | ".join(parts)


def _speed(rate: float, noun: str) -> str:
    return f"{rate:,.{0 if rate >= 100 else 1 if rate >= 1 else 2}f} {noun}/s"


def clock(seconds: float) -> str:
    """Return seconds as hours:minutes:seconds, such as "0:03:12"."""
    if not math.isfinite(seconds):
        return "-:--:--"
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def block(rows: Iterable[tuple[str, object]]) -> str:
    """Return a string with one line per row: the name, padded to 14 characters, and the value."""
    return "\n".join(f"{name:<14} {text}" for name, text in rows)
