"""Say in words whether a model learned more than its training pictures, and show its drawings.

    python -m diffusion_jax.verdict --workdir=runs/mine [--judge=judges/mine] [--out=verdict.png]

The command compares the loss on pictures that were held out of training (config.data.heldout) with
the loss on as many training pictures: a model that memorises is better on the latter. It draws the
config's prompts, and writes a sheet of the drawn pictures that are nearest to training pictures,
each above the training picture whose pixels are nearest. With a judge (diffusion_jax.metrics
train_judge), it also says how many of the drawn pictures fit their captions, and how often the
judge is right about real pictures. For a cascade, repeat --workdir: the losses of all stages are
compared, and the pictures of the last one.
"""

import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from jaxtyping import Float, UInt8

from diffusion_jax import cli, files, heldout
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.data.pipeline import Apart
from diffusion_jax.data.split import Subset
from diffusion_jax.draw.program import in_batches, make_draw
from diffusion_jax.evaluate import copies
from diffusion_jax.files import sheets
from diffusion_jax.heldout import OpenedRun
from diffusion_jax.logs import progress
from diffusion_jax.metrics.judges import judge as judges
from diffusion_jax.task import Params, Texts, to_range

_DRAWN = 32  # The number of drawn pictures.
_SHOWN = 16  # The number of drawn pictures on a sheet of copies.Training.
_SIDE = 16  # Pictures are compared at this side in pixels.
_COMPARED = 10_000  # The largest number of training pictures among which the nearest is sought.
_MEMORISES, _BEGINS = 1.5, 1.1  # Ratios of the held-out loss to the training loss.
_COPIES = 0.5  # Ratio of the distances of drawn and of held-out pictures to training pictures.


class _Pixels:
    """Stands in for a Scorer in copies.Training: its features are the pixels of small pictures."""

    prompts, picture_features = ("",), ("pixels",)

    def features(self, images: Any, captions: Any) -> dict[str, Float[np.ndarray, "B D"]]:
        shape = (len(images), _SIDE, _SIDE, 3)
        small = jax.image.resize(np.asarray(images, np.float32) / 255, shape, "linear")
        return {"pixels": np.asarray(small).reshape(len(images), -1)}


def verdict(workdirs: Sequence[pathlib.Path], judge: str, sheet: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yield (subject, sentence) pairs about a run or a cascade, and write `sheet`, a PNG file.

    `workdirs` are the runs of the stages, and `judge` is a folder of metrics train_judge, or "".
    Raises ValueError or FileNotFoundError if a run, its data or the judge cannot be read.
    """
    trained = judges.load(judge) if judge else None
    stages = [heldout.open_run(workdir) for workdir in workdirs]
    for (before, a), (after, b) in itertools.pairwise(zip(workdirs, stages, strict=True)):
        size, small = _picture_shape(a), b.inputs.examples.batch.get("low_res")
        if small is None or small.shape[1:] != size:
            raise ValueError(
                f"{after} does not enlarge pictures of {size[1]}x{size[0]}, which {before} draws: "
                "name the stages of a cascade from the smallest to the largest"
            )
    for workdir, opened in zip(workdirs, stages, strict=True):
        number = progress.counted(len(opened.inputs.batches.pictures), "training picture")
        yield "model", f"{workdir} at step {opened.step:,}, with its average weights; {number}"
        yield "loss", _compared_losses(opened, opened.params("ema"))
    images, captions = _drawn(stages)
    if trained:
        fits = judges.reader(trained, captions)(images, captions)[1].sum()
        yield "captions", f"{fits:.0f} of {len(images)} drawn pictures fit theirs, says {judge}"
        real = trained.card["scores"]["real"]
        share, low, high = (100 * real[f"r1_judge{end}"] for end in ("", "_low", "_high"))
        right = f"{share:.3g} ({low:.3g} to {high:.3g}) %"
        yield "judge", f"right about {right} of the real pictures that it was not trained on"
    batches, enlarged = stages[-1].inputs.batches, "low_res" in stages[0].inputs.examples.batch
    if enlarged or _picture_shape(stages[-1]) != images.shape[1:]:
        # Enlarged training pictures, or a model whose training pictures have masks or are moments.
        sheets.write_png(sheet, sheets.contact_sheet(images, captions))
        yield "sheet", f"{sheet}: drawn pictures"
        return
    unseen = batches.apart and _spread(batches.apart.pictures)
    scorer: Any = _Pixels()
    training = copies.Training(_spread(batches.pictures), scorer, unseen or batches.pictures)
    nearest = training.nearest("pixels", scorer.features(images, captions)["pixels"])
    redrawn = lambda rows: images[np.asarray(rows)]
    sheets.write_png(sheet, training.sheet(nearest, redrawn, captions))
    nearest_ones = f"the {min(_SHOWN, len(images))} of {len(images)} drawn pictures that are nearest"
    yield "sheet", f"{sheet}: {nearest_ones} to training pictures, each above its nearest"
    distance = np.median(nearest.distances)
    shown = f"drawn pictures are {distance:.3g} from the nearest training picture"
    if unseen:
        others = np.median(training.unseen["pixels"].distances)
        shown += f", and held-out pictures {others:.3g}"
        shown += ": it copies" if distance < _COPIES * others else ""
    yield "distance", f"{shown} (medians)"


def _picture_shape(opened: OpenedRun) -> tuple[int, ...]:
    images, _ = opened.inputs.batches.pictures.read(np.arange(1))
    return images.shape[1:]


def _compared_losses(opened: OpenedRun, params: Params) -> str:
    batches, measure = opened.inputs.batches, opened.inputs.task.measure
    if not batches.apart:
        return "unknown, because no pictures were held out of training (data.heldout)"
    held = heldout.open_records(opened.settings, batches, measure)
    if held is None:
        return "unknown, because this kind of model has no held-out loss"
    keys, batch = Apart(batches.pictures, *batches.apart[1:]).read(len(held.numbers))
    seen = held._replace(batch=batch, numbers=keys.astype(np.uint32))
    new, old = (opened.scorer(records)(params)["loss"] for records in (held, seen))
    does = "does not memorise"
    if new > _BEGINS * old:
        does = "memorises" if new > _MEMORISES * old else "begins to memorise"
    return (
        f"{new:.3g} on {progress.counted(len(held.numbers), 'held-out picture')}, against "
        f"{old:.3g} on {progress.counted(len(keys), 'training picture')}: it {does} them"
    )


def _drawn(stages: Sequence[OpenedRun]) -> tuple[UInt8[np.ndarray, "N H W 3"], list[str]]:
    """Draw the config's prompts with several seeds. Return the pictures and their captions."""
    examples = stages[0].inputs.examples
    rows = np.arange(_DRAWN) % len(examples.captions)
    captions = [examples.captions[i] for i in rows]
    images = _draw(stages[0], jax.tree.map(lambda x: np.asarray(x)[rows], examples.batch))
    for opened in stages[1:]:
        texts = dict(opened.inputs.open_prompts(captions)(captions))
        images = _draw(opened, {**texts, "low_res": np.asarray(to_range(images))})
    return images, captions


def _draw(opened: OpenedRun, texts: Texts) -> UInt8[np.ndarray, "N H W 3"]:
    examples = opened.inputs.examples
    draw = make_draw(opened.inputs.task.sample, opened.frozen, opened.mesh)
    guidance = np.full(_DRAWN, examples.guidance, np.float32)
    most = min(_DRAWN, examples.most)
    parts = in_batches(draw, opened.params("ema"), texts, range(_DRAWN), guidance, most)
    return sheets.to_uint8(np.concatenate(list(parts)))


def _spread(pictures: Pictures) -> Subset:
    count = min(len(pictures), _COMPARED)
    return Subset(pictures, np.linspace(0, len(pictures) - 1, count).astype(np.int64))


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_multi_string(
        "workdir", None, "The workdir of a run; repeat it for a cascade.", required=True
    )
    _JUDGE = flags.DEFINE_string(
        "judge",
        "",
        "A folder that diffusion_jax.metrics train_judge wrote: also count the drawn pictures that fit their captions.",
    )
    _OUT = flags.DEFINE_string("out", None, "The sheet to write; default: WORKDIR/verdict.png.")

    def main() -> None:
        """Print the verdict."""
        cli.start(alone=True)
        with cli.bad_input():
            workdirs = [files.path(workdir) for workdir in _WORKDIR.value]
            out = files.path(_OUT.value) if _OUT.value else workdirs[-1] / "verdict.png"
            print(progress.block(verdict(workdirs, _JUDGE.value, out)))

    cli.run(main)
