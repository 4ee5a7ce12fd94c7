"""The queue of the page: one thread draws, job after job, and says how far it is."""

import base64
import collections
import contextlib
import dataclasses
import itertools
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from PIL import Image

from diffusion_jax.draw.loaded import Cancelled, Loaded, png

WAITING = 16
"""Jobs that may wait, and pictures that one may have; more is refused."""
PICTURES = 100
_TOGETHER = 8  # Pictures of the same settings that are drawn at once.
_BETWEEN = 0.15  # Seconds from one look at what is drawn to the next.
_LOOK = 256  # Pixels of a side of such a look, at most.
_KEPT = 2**29  # Bytes of pictures that stay in memory.
_JOBS = 200
_ALONE = 10.0  # Seconds after which a job ends that nobody watches.


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
    watchers: int = 0
    left: float = dataclasses.field(default_factory=time.monotonic)
    """When the last watcher left."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Somebody watches it as long as this is open."""
        self.watchers += 1
        try:
            yield
        finally:
            self.watchers -= 1
            self.left = time.monotonic()

    @property
    def unwanted(self) -> bool:
        """Whether it was cancelled, or all who watched it are gone for some time."""
        alone = not self.watchers and time.monotonic() - self.left > _ALONE
        return self.cancelled or alone

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
        self._files: collections.OrderedDict[Picture, tuple[bytes, ...]] = collections.OrderedDict()
        self._bytes = 0
        self.jobs: dict[str, Job] = {}
        self._lock = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, pictures: Sequence[Picture]) -> Job:
        """A job at the end of the queue; Full where there is no place."""
        job = Job(pictures)
        with self._lock:
            if len(self._waiting()) >= WAITING:
                raise Full(f"{WAITING} drawings wait already: try again when some are done")
            ended = [name for name, other in self.jobs.items() if other.ended]
            for name in ended[: max(0, len(self.jobs) + 1 - _JOBS)]:
                del self.jobs[name]
            self.jobs[job.name] = job
            self._lock.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Ends a job at its next evaluation, or before it begins."""
        job.cancelled = True
        with self._lock:
            self._waiting()

    def ahead(self, job: Job) -> int:
        """How many are drawn before a job that waits."""
        with self._lock:
            self._waiting()
            earlier = itertools.takewhile(lambda other: other is not job, self.jobs.values())
            return sum(not other.ended for other in earlier)

    def files(self, picture: Picture) -> tuple[bytes, ...] | None:
        """The PNGs of a picture that was drawn, one a stage, if they are kept."""
        with self._lock:
            if picture in self._files:
                self._files.move_to_end(picture)
            return self._files.get(picture)

    def _waiting(self) -> list[Job]:
        """Those that wait, without those that nobody wants any more, which end here."""
        waiting = [job for job in self.jobs.values() if job.state == "waiting"]
        for job in waiting:
            if job.unwanted:
                job.change(state="cancelled")
        return [job for job in waiting if not job.ended]

    def _next(self) -> Job:
        """The first that waits, once there is one."""
        with self._lock:
            job = self._lock.wait_for(self._waiting)[0]
            job.change(state="drawing")
            return job

    def _work(self) -> None:
        while True:
            job = self._next()
            try:
                self._draw(job)
                job.change(state="done", looks={})
            except Cancelled:
                job.change(state="cancelled", looks={})
            except (ValueError, OSError) as error:
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
        if job.unwanted:
            raise Cancelled
        if rows:
            made = self._models[name].draw(
                [picture.prompt for _, picture in rows],
                seeds=[picture.seed for _, picture in rows],
                progress=_Looks(job, [n for n, _ in rows]),
                **choices,
            )
            sizes = zip(*made.smaller, made.images, strict=True)
            for (_, picture), images in zip(rows, sizes, strict=True):
                self._keep(picture, tuple(map(png, images)))
        drawn = sum(self.files(picture) is not None for picture in job.pictures)
        job.change(drawn=drawn, looks={})

    def _keep(self, picture: Picture, files: tuple[bytes, ...]) -> None:
        """Keeps a picture, in place of those that were asked for the longest time ago."""
        with self._lock:
            before = self._files.pop(picture, ())
            self._files[picture] = files
            self._bytes += sum(map(len, files)) - sum(map(len, before))
            while self._bytes > _KEPT and len(self._files) > 1:
                self._bytes -= sum(map(len, self._files.popitem(last=False)[1]))


class _Looks:
    """Shows a job, not too often, what its pictures look like; raises where nobody wants it.

    A batch begins where the side of its images changes, as from stage to stage of a cascade, or
    where the level is again that of the first batch of this side.
    """

    def __init__(self, job: Job, numbers: Sequence[int]) -> None:
        self._job, self._numbers, self._last = job, numbers, 0.0
        self._side, self._drawing, self._level = 0, 0, float("inf")
        self._tops: dict[int, float] = {}
        self._done = collections.Counter[int]()  # Images of the batches before this, by side.

    def __call__(self, images: np.ndarray, level: float) -> None:
        if self._job.unwanted:
            raise Cancelled
        side = images.shape[1]
        top = self._tops.setdefault(side, level)
        if side != self._side or self._level < level >= top:
            self._done[self._side] += self._drawing
            self._side, self._drawing = side, len(images)
        self._level = level
        if time.monotonic() - self._last < _BETWEEN:
            return
        shown = zip(self._numbers[self._done[side] :], images, strict=False)
        looks = {n: base64.b64encode(png(_small(image))).decode() for n, image in shown}
        self._job.change(looks=looks, level=level)
        self._last = time.monotonic()


def _small(image: np.ndarray) -> np.ndarray:
    """An image of a look's size, of means over its pixels."""
    return np.asarray(Image.fromarray(image).reduce(-(-max(image.shape[:2]) // _LOOK)))
