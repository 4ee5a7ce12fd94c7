"""Queue the drawing jobs of the web page. One thread draws them in order."""

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

from diffusion_jax.draw.model import Cancelled, Model, png
from diffusion_jax.web.uploads import Edit, Uploads

WAITING = 16
"""The largest number of waiting jobs. Further jobs are refused."""
ENDED = ("done", "cancelled", "failed")
"""The states of a job that does not change any more."""
PICTURES = 100
"""The largest number of pictures in a job."""
_BATCH_SIZE = 8  # Pictures with the same settings are drawn together.
_LOOK_EVERY = 0.15  # Seconds between previews of a drawing in progress.
_LOOK_SIZE = 256  # The longest side of a preview in pixels.
_MAX_BYTES = 2**29  # The total size of the pictures that stay in memory.
_MAX_JOBS = 200  # Jobs that stay listed, including ended ones.
_UNWATCHED = 10.0  # Seconds after which a job that no tab watches ends.


class Picture(NamedTuple):
    """All values that determine a picture: model, prompt, seed, settings and uploaded picture."""

    model: str
    prompt: str
    seed: int
    choices: tuple[tuple[str, Any], ...]
    """Flags of the command `sample`, as (name, value) pairs sorted by name."""
    edit: Edit = Edit()
    """The uploaded picture from which the drawing starts, if any."""


class Full(Exception):
    """The error that `Queue.add` raises if too many jobs are waiting."""


@dataclasses.dataclass
class DrawingJob:
    """Pictures that a browser tab requested, and the progress of drawing them."""

    pictures: Sequence[Picture]
    name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    """A random name that identifies the job in URLs."""
    state: str = "waiting"
    """One of "waiting", "drawing", "done", "cancelled" and "failed"."""
    looks: dict[int, str] = dataclasses.field(default_factory=dict)
    """Previews of the pictures that are being drawn: {index: PNG file in base64}."""
    level: float = 0.0
    """The noise level of the previews."""
    error: str = ""
    cancelled: bool = False
    watchers: int = 0
    streams: int = 0
    """The number of event streams that were opened for the job."""
    left: float = dataclasses.field(default_factory=time.monotonic)
    """The time (of time.monotonic) at which the last tab stopped watching."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count one more browser tab as watching the job while this context is open."""
        self.watchers += 1
        try:
            yield
        finally:
            self.watchers -= 1
            self.left = time.monotonic()

    @property
    def unwanted(self) -> bool:
        """Return whether the job was cancelled, or no tab has watched it for _UNWATCHED seconds."""
        alone = not self.watchers and time.monotonic() - self.left > _UNWATCHED
        return self.cancelled or alone

    @property
    def ended(self) -> bool:
        """Return whether the job is done, cancelled or failed."""
        return self.state in ENDED

    def end(self, state: str, error: str = "") -> None:
        """End the job. The state changes last: a tab that receives it has received the rest."""
        self.looks, self.error = {}, error
        self.state = state


class Queue:
    """A queue of drawing jobs. One thread draws them in order. Recent pictures stay in memory."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        """Start the thread that draws. `models` maps names to models."""
        self._models, self.uploads = models, Uploads()
        self._files: collections.OrderedDict[Picture, tuple[bytes, ...]] = collections.OrderedDict()
        self._bytes = 0
        self.jobs: dict[str, DrawingJob] = {}
        self._lock = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, pictures: Sequence[Picture]) -> DrawingJob:
        """Append a job that draws these pictures. Raises Full if too many jobs are waiting."""
        job = DrawingJob(pictures)
        with self._lock:
            if len(self._waiting()) >= WAITING:
                raise Full(f"{WAITING} drawing jobs are waiting already: try again when some are done")
            ended = [name for name, other in self.jobs.items() if other.ended]
            for name in ended[: max(0, len(self.jobs) + 1 - _MAX_JOBS)]:
                del self.jobs[name]
            self.jobs[job.name] = job
            self._lock.notify()
        return job

    def cancel(self, job: DrawingJob) -> None:
        """Cancel a job: at once if it is waiting, otherwise at its next network evaluation."""
        job.cancelled = True
        with self._lock:
            self._waiting()

    def ahead(self, job: DrawingJob) -> int:
        """Return the number of jobs that are drawn before `job`."""
        with self._lock:
            self._waiting()
            earlier = itertools.takewhile(lambda other: other is not job, self.jobs.values())
            return sum(not other.ended for other in earlier)

    def files(self, picture: Picture) -> tuple[bytes, ...] | None:
        """Return the PNG files of a picture, one per stage, or None if they are not in memory."""
        with self._lock:
            if picture in self._files:
                self._files.move_to_end(picture)
            return self._files.get(picture)

    def _waiting(self) -> list[DrawingJob]:
        """Cancel waiting jobs that are unwanted, and return the other waiting jobs in order."""
        waiting = [job for job in self.jobs.values() if job.state == "waiting"]
        for job in waiting:
            if job.unwanted:
                job.end("cancelled")
        return [job for job in waiting if not job.ended]

    def _work(self) -> None:
        while True:
            with self._lock:
                job = self._lock.wait_for(self._waiting)[0]
                job.state = "drawing"
            try:
                self._draw(job)
                job.end("done")
            except Cancelled:
                job.end("cancelled")
            except (ValueError, OSError) as error:
                job.end("failed", str(error))
            except Exception as error:  # The queue must survive whatever a device raises.
                logging.exception("a drawing failed")
                first = (str(error).splitlines() or [""])[0]
                job.end("failed", f"{type(error).__name__}: {first}")

    def _draw(self, job: DrawingJob) -> None:
        numbered = list(enumerate(job.pictures))
        for (name, choices, edit), group in itertools.groupby(
            numbered, lambda item: (item[1].model, item[1].choices, item[1].edit)
        ):
            rows = list(group)
            for start in range(0, len(rows), _BATCH_SIZE):
                batch = rows[start : start + _BATCH_SIZE]
                batch = [(n, picture) for n, picture in batch if self.files(picture) is None]
                if job.unwanted:
                    raise Cancelled
                if batch:
                    drawn = self._models[name].draw(
                        [picture.prompt for _, picture in batch],
                        seeds=[picture.seed for _, picture in batch],
                        progress=_Looks(job, [n for n, _ in batch]),
                        **{**dict(choices), **self.uploads.arguments(edit)},
                    )
                    for i, (_, picture) in enumerate(batch):
                        smaller = [png(images[i]) for images in drawn.smaller]
                        self._keep(picture, (*smaller, drawn.png(i)))
                job.looks = {}

    def _keep(self, picture: Picture, files: tuple[bytes, ...]) -> None:
        """Keep a picture's PNG files in memory.

        If all files together exceed _MAX_BYTES, drop the least recently used pictures.
        """
        with self._lock:
            before = self._files.pop(picture, ())
            self._files[picture] = files
            self._bytes += sum(map(len, files)) - sum(map(len, before))
            while self._bytes > _MAX_BYTES and len(self._files) > 1:
                self._bytes -= sum(map(len, self._files.popitem(last=False)[1]))


class _Looks:
    """Callback of Model.draw that updates a job's previews and stops an unwanted job.

    The callback gets images without their indices, so it counts batches to know which pictures the
    images belong to. A new batch begins if the size of the images changes, as between the stages of
    a cascade, or if the noise level returns to the first level seen with this size.
    """

    def __init__(self, job: DrawingJob, numbers: Sequence[int]) -> None:
        self._job, self._numbers, self._last = job, numbers, 0.0
        self._side, self._drawing, self._level = 0, 0, float("inf")
        self._tops: dict[int, float] = {}
        self._done = collections.Counter[int]()  # Number of images in earlier batches, by side.

    def __call__(self, images: np.ndarray, level: float) -> None:
        if self._job.unwanted:
            raise Cancelled
        side = images.shape[1]
        top = self._tops.setdefault(side, level)
        if side != self._side or self._level < level >= top:
            self._done[self._side] += self._drawing
            self._side, self._drawing = side, len(images)
        self._level = level
        if time.monotonic() - self._last < _LOOK_EVERY:
            return
        shown = zip(self._numbers[self._done[side] :], images, strict=False)
        looks = {n: base64.b64encode(png(_small(image))).decode() for n, image in shown}
        self._job.level, self._job.looks = level, looks
        self._last = time.monotonic()


def _small(image: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(image).reduce(-(-max(image.shape[:2]) // _LOOK_SIZE)))
