"""What training draws and measures at a step: sample pictures, scores and the held-out loss.

This comes after the checkpoint of the step, so that a picture that does not fit in the memory never
costs training. What an interrupted process left out follows when the run continues.
"""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from diffusion_jax import files, heldout
from diffusion_jax.config.settings import Run
from diffusion_jax.devices import distributed
from diffusion_jax.draw.program import Draw, even_batch_size, in_batches
from diffusion_jax.draw.seeds import MOST
from diffusion_jax.files import sheets
from diffusion_jax.logs.run_log import METRICS, MetricWriter, read_sound_metrics
from diffusion_jax.task import Params, Texts
from diffusion_jax.train.state import TrainState, averaged

MEASURING = "measuring.txt"
"""The file that names the step whose pictures and scores are being computed, and the number of
attempts."""
_ATTEMPTS = 2


class Examples(NamedTuple):
    """The prompts of the example pictures that training draws, always from the same seeds.

    `batch` holds the tokenized prompts, `captions` their texts, and `guidance` the guidance scale.
    """

    batch: Texts
    captions: tuple[str, ...]
    guidance: float
    most: int = 64
    """The largest number of pictures that are drawn at once."""

    @property
    def at_once(self) -> int:
        """The number of pictures per batch, so that all batches have almost the same size."""
        return even_batch_size(self.most, len(self.captions)) if self.captions else 0


class Scoring(NamedTuple):
    """The scores that training computes every `every` images and at the end of the run.

    `score` maps the drawing function and the parameters to scores, keyed by name.
    """

    every: int
    score: Callable[[Draw, Params], Mapping[str, float]]
    rehearse: Callable[[Draw, Params], None] = lambda draw, params: None
    """Draws one batch and computes the features that the scores need. A rehearsal calls this
    function, but only traces the programs that draw and that compute features."""
    before_save: bool = False
    """Whether the scores come before the checkpoint of their step, as quick ones may: then they are
    computed again if the run is interrupted between the two."""

    def is_due(self, step: int, batch_size: int) -> bool:
        """Return whether this step reached or passed a multiple of `every` images."""
        return step * batch_size // self.every > (step - 1) * batch_size // self.every


class Measurements(NamedTuple):
    """The pictures and scores of a run, with all that is needed to compute them."""

    run: Run
    examples: Examples
    evaluation: Scoring | None
    records: heldout.HeldOutRecords | None
    draw: Draw
    heldout_losses: Any
    """The function that heldout.make_scorer returns, or None without `records`."""
    workdir: pathlib.Path
    before: tuple[int, int]
    """The result of `attempt` when the run continued."""

    def due(self, step: int) -> list[str]:
        """Return which of "samples", "evaluation" and "heldout" follow a step's checkpoint."""
        run, records = self.run, self.records
        due = {
            "samples": is_due(step, run.sample_every, run.steps),
            "evaluation": self.is_scored(step, before_save=False),
            "heldout": records and is_due(step, records.every, run.steps),
        }
        return [name for name, value in due.items() if value]

    def is_scored(self, step: int, before_save: bool) -> bool:
        """Return whether scores are due at a step, before or after its checkpoint."""
        if self.evaluation is None or self.evaluation.before_save != before_save:
            return False
        return self.evaluation.is_due(step, self.run.batch_size) or step == self.run.steps

    def missing(self, step: int) -> list[str]:
        """Return what was due after the checkpoint of `step`, but was not computed then."""
        due = self.due(step) if 0 < step <= self.run.steps else []
        metrics = self.workdir / METRICS
        lines = read_sound_metrics(metrics) if due and metrics.exists() else []
        names = {name for line in lines if line["step"] == step for name in line}
        done = {name for kind in names for name in (kind.partition("/")[0], kind)}
        if due and self._sheet(step).exists():
            done.add("samples")
        missing = [name for name in due if not {name, f"out_of_memory/{name}"} & done]
        return distributed.gather_text(" ".join(missing))[0].split()

    def take(self, names: Sequence[str], step: int, state: TrainState, writer: MetricWriter) -> None:
        """Draw the samples, score pictures and measure the held-out loss, as far as `names` says.

        If the measurements of this step have ended the process _ATTEMPTS times, they are left out.
        """
        attempts = self.before[1] if self.before[0] == step else 0
        if attempts >= _ATTEMPTS:
            logging.error(
                "%s of step %d are left out: the process ended %d times while it drew or scored "
                "them, perhaps for lack of memory",
                " and ".join(names),
                step,
                attempts,
            )
            writer.write_scalars(step, {f"out_of_memory/{name}": 1 for name in names})
            return
        marker = self.workdir / MEASURING
        if jax.process_index() == 0:
            files.write_whole(marker, f"{step} {attempts + 1}")
        for name in names:
            with _left_out_if_too_large(name, step, writer):
                if name == "samples":
                    self._draw_examples(step, averaged(state), writer)
                elif name == "evaluation" and self.evaluation:
                    writer.write_scalars(step, self.evaluation.score(self.draw, averaged(state)))
                elif name == "heldout":
                    losses = heldout.of_all(self.heldout_losses, state.params, state.ema)
                    writer.write_scalars(step, losses)
        if jax.process_index() == 0:
            marker.unlink(missing_ok=True)

    def _draw_examples(self, step: int, params: Params, writer: MetricWriter) -> None:
        examples = self.examples
        seeds = [(self.run.seed + i) % (MOST + 1) for i in range(len(examples.captions))]
        guidance = np.full(len(seeds), examples.guidance, np.float32)
        parts = in_batches(self.draw, params, examples.batch, seeds, guidance, examples.at_once)
        images = np.concatenate(list(parts))
        if not np.isfinite(images).all():
            logging.warning("step %d: pictures are not finite; no sheet is saved", step)
            return
        sheet = sheets.contact_sheet(sheets.to_uint8(images), sheets.labels(examples.captions))
        if jax.process_index() == 0:
            path = self._sheet(step)
            path.parent.mkdir(exist_ok=True)
            sheets.write_png(path, sheet)
        writer.write_images(step, {"samples": sheet[None]})

    def _sheet(self, step: int) -> pathlib.Path:
        return self.workdir / "samples" / f"step_{step:08}.png"


def is_due(step: int, every: int, steps: int) -> bool:
    """Return whether an event is due: at multiples of `every` and at the end; never for 0."""
    return every > 0 and (step % every == 0 or step == steps)


def attempt(workdir: pathlib.Path) -> tuple[int, int]:
    """Return the step whose measurements ended the last process, and the number of attempts."""
    marker = workdir / MEASURING
    text = marker.read_text() if marker.exists() else "0 0"
    step, attempts = map(int, distributed.gather_text(text)[0].split())
    return step, attempts


@contextlib.contextmanager
def _left_out_if_too_large(name: str, step: int, writer: MetricWriter) -> Iterator[None]:
    """Log an error, and count it in the metrics, if a measurement does not fit in the memory."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        logging.error(
            "%s of step %d do not fit in the memory and are left out; training goes on. %s",
            name,
            step,
            (str(error).splitlines() or ["MemoryError"])[0][:200],
        )
        writer.write_scalars(step, {f"out_of_memory/{name}": 1})
