"""The queue of the page: one thread draws, job after job, and says how far it is."""

import base64
import collections
import dataclasses
import itertools
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from diffusion_jax.draw.loaded import Cancelled, Loaded, png

WAITING = 16
"""Jobs that may wait, and pictures that one may have; more is refused."""
PICTURES = 100
_TOGETHER = 8  # Pictures of the same settings that are drawn at once.
_BETWEEN = 0.15  # Seconds from one look at what is drawn to the next.
_KEPT = 2_000  # Pictures whose files stay in memory.
_JOBS = 200


class Picture(NamedTuple):
    """All that makes a picture: its link."""

    model: str
    prompt: str
    seed: int
    choices: tuple[tuple[str, Any], ...]
    """Names and values of `sample`'s flags, in the order of their names."""


class Full(Exception):
    """The queue takes no more."""


@dataclasses.dataclass
class Job:
    """Pictures that one tab asked for, and how far they are."""

    pictures: Sequence[Picture]
    name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    state: str = "waiting"
    """"waiting", "drawing", "done", "cancelled" or "failed"."""
    drawn: int = 0
    looks: dict[int, str] = dataclasses.field(default_factory=dict)
    """What the pictures being drawn look like by now: PNG in base64."""
    level: float = 0.0
    error: str = ""
    version: int = 0
    cancelled: bool = False

    def change(self, **values: Any) -> None:
        """Sets fields, and lets those who watch know."""
        for name, value in values.items():
            setattr(self, name, value)
        self.version += 1

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ("done", "cancelled", "failed")


class Queue:
    """Jobs, first come first served, drawn by one thread; and the pictures drawn last."""

    def __init__(self, models: Mapping[str, Loaded]) -> None:
        """`models` by the names that pictures give; the thread runs as long as the process."""
        self._models = models
        self._waiting: queue.Queue[Job] = queue.Queue(WAITING)
        self._files: collections.OrderedDict[Picture, tuple[bytes, ...]] = collections.OrderedDict()
        self.jobs: collections.OrderedDict[str, Job] = collections.OrderedDict()
        self._lock = threading.Lock()
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, pictures: Sequence[Picture]) -> Job:
        """A job at the end of the queue; Full where there is no place."""
        job = Job(pictures)
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            raise Full(f"{WAITING} drawings wait already: try again when some are done") from None
        with self._lock:
            self.jobs[job.name] = job
            while len(self.jobs) > _JOBS:
                self.jobs.popitem(last=False)
        return job

    def cancel(self, job: Job) -> None:
        """Ends a job at its next evaluation, or before it begins."""
        job.cancelled = True
        if job.state == "waiting":
            job.change(state="cancelled")

    def ahead(self, job: Job) -> int:
        """How many are drawn before a job that waits."""
        with self._lock:
            earlier = itertools.takewhile(lambda other: other is not job, self.jobs.values())
            return sum(not other.ended for other in earlier)

    def files(self, picture: Picture) -> tuple[bytes, ...] | None:
        """The PNGs of a picture that was drawn, one a stage, if they are kept."""
        with self._lock:
            return self._files.get(picture)

    def _work(self) -> None:
        while True:
            job = self._waiting.get()
            if job.cancelled:
                continue
            job.change(state="drawing")
            try:
                self._draw(job)
                job.change(state="done", looks={})
            except Cancelled:
                job.change(state="cancelled", looks={})
            except ValueError as error:
                job.change(state="failed", error=str(error), looks={})
            except Exception as error:  # The queue must go on, whatever a device raises.
                logging.exception("a drawing failed")
                first = (str(error).splitlines() or [""])[0]
                job.change(state="failed", error=f"{type(error).__name__}: {first}", looks={})

    def _draw(self, job: Job) -> None:
        numbered = list(enumerate(job.pictures))
        for (name, choices), group in itertools.groupby(
            numbered, lambda item: (item[1].model, item[1].choices)
        ):
            rows = list(group)
            for start in range(0, len(rows), _TOGETHER):
                self._draw_rows(job, name, dict(choices), rows[start : start + _TOGETHER])

    def _draw_rows(
        self, job: Job, name: str, choices: dict[str, Any], rows: Sequence[tuple[int, Picture]]
    ) -> None:
        """Pictures of the same settings, those that are kept left out."""
        rows = [(n, picture) for n, picture in rows if self.files(picture) is None]
        if job.cancelled:
            raise Cancelled
        if rows:
            made = self._models[name].draw(
                [picture.prompt for _, picture in rows],
                seeds=[picture.seed for _, picture in rows],
                progress=_Looks(job, [n for n, _ in rows]),
                **choices,
            )
            with self._lock:
                sizes = zip(*made.smaller, made.images, strict=True)
                for (_, picture), images in zip(rows, sizes, strict=True):
                    self._files[picture] = tuple(map(png, images))
                while len(self._files) > _KEPT:
                    self._files.popitem(last=False)
        drawn = sum(self.files(picture) is not None for picture in job.pictures)
        job.change(drawn=drawn, looks={})


class _Looks:
    """Shows a job, not too often, what its pictures look like; raises where it is cancelled."""

    def __init__(self, job: Job, numbers: Sequence[int]) -> None:
        self._job, self._numbers, self._last = job, numbers, 0.0
        self._first, self._level = 0, float("inf")

    def __call__(self, images: np.ndarray, level: float) -> None:
        if self._job.cancelled:
            raise Cancelled
        if level > self._level and len(images) < len(self._numbers):  # The next batch.
            self._first += len(images)
        self._level = level
        if time.monotonic() - self._last < _BETWEEN:
            return
        self._last = time.monotonic()
        shown = zip(self._numbers[self._first :], images, strict=False)
        looks = {n: base64.b64encode(png(image)).decode() for n, image in shown}
        self._job.change(looks=looks, level=level)
