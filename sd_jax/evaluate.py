"""Score Stable Diffusion models by FID and CLIP score over a range of guidance scales.

    python -m sd_jax.evaluate --workdir=runs/sd2_512 \\
        --prompts=captions_val2014.json --num_prompts=30000 --reference=val2014_512.npz \\
        --inception=pt_inception-2015-12-05-6726825d.pth \\
        --clip=weights/CLIP-ViT-H-14-laion2B-s32B-b79K

This command draws an image for each prompt at each guidance scale, and plots the scores of these
images as a curve over guidance. A model of the built-in coloured digits is scored by a built-in
judge, which recognises digits and colours and needs none of these files. --checkpoint, --ema and
all sampler settings take lists. Each combination of values is one point of the sweep:
--sampler=ddim,dpmpp_2m --steps=10,20,50 --eta=0,1. All points draw with the same seeds. Features
are saved after each batch, so the same command continues an interrupted sweep.

Several models, trained with this library or elsewhere, can share one plot with a curve for each:

    python -m sd_jax.evaluate --workdir=runs/sd1_256 --model=weights/sd-v1-5 \\
        --model=weights/sd-v2-0-base --size=256 --out=runs/comparison ...

Each model draws images of its own size, and --size resizes the images before they are scored. By
default, a run uses the sampler of its config, and a diffusers directory uses its scheduler.
--sampler, --steps and --grid override these settings for all models.

The results are written to WORKDIR/evaluation/NAME. WORKDIR is --out or, by default, the workdir of
the first run. The files are sweep.csv, fid_scores.csv and clip_scores.csv, curve.png and curve.pdf,
a sheet of images for each guidance scale, and scores/ with the settings of each score. The scores
are also written to the run's metrics, and WORKDIR/report.html shows everything on one page. The
command python -m diffusion_jax.report WORKDIR --rcp adds MLPerf's reference runs to that page.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from diffusion_jax.draw import option_flags, options
from diffusion_jax.draw.options import Values
from diffusion_jax.draw.stage import Stage
from diffusion_jax.evaluate import evaluate_command as evaluation
from diffusion_jax.evaluate.evaluate_command import Subject
from diffusion_jax.web import frozen
from sd_jax import drawing
from sd_jax.drawing import StableDiffusion
from sd_jax.weights.trained import read_run

GUIDANCE = (1.5, 2, 3, 4, 5, 6, 7, 8)


def open_run(
    workdir: str, points: Sequence[Values] = ({},), weights: Sequence[Values] = ({},)
) -> Subject:
    """Open the model of a training run for evaluation.

    Args:
        workdir: The workdir of the run.
        points: The option values of each point of the sweep, keyed as in drawing.OPTIONS.
        weights: The weights to evaluate, each as the values of the options "ema" and "checkpoint".

    Raises:
        FileNotFoundError: There is no such run.
        ValueError: An option value is invalid for this run, or the images are not square.
    """
    chosen = evaluation.with_weights([[values] for values in points], [weights])
    values = options.read(drawing.OPTIONS, chosen[0][0])
    s = read_run(workdir, options.fields(drawing.OPTIONS, values))
    described = {"training_seed": s.run.seed, "vae": s.vae_weights}
    return _subject(drawing.load(workdir, **values), described, s.data.source, chosen)


def open_model(path: str, points: Sequence[Values] = ({},), ema: str = "ema") -> Subject:
    """Open a diffusers directory or a checkpoint file for evaluation.

    Args:
        path: The directory or file.
        points: The option values of each point of the sweep, keyed as in drawing.OPTIONS.
        ema: "ema" for averaged weights if the file has them, or "raw".

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: The model lacks a part, its images are not square, or an option value is invalid
            for this model.
    """
    chosen = evaluation.with_weights([[values] for values in points], [[{"ema": ema}]])
    return _subject(drawing.load(path, **chosen[0][0]), {}, "", chosen)


def _subject(
    model: StableDiffusion,
    described: Mapping[str, Any],
    source: str,
    points: Sequence[Sequence[Values]],
) -> Subject:
    described = {**described, **drawing.describe_additions(model.file, model.values[0])}

    def describe(stage: Stage) -> dict[str, Any]:
        s = stage.settings.sampler
        card = {"workdir": stage.workdir, "eta": s.eta, "negative_prompt": s.negative_prompt}
        return {**described, **card, **drawing.describe_grid(s), **drawing.describe_guidance(stage)}

    return evaluation.of_model(model, points, describe, source)


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_multi_string(
        "workdir", [], "The workdir of a training run; may be repeated."
    )
    _MODEL = flags.DEFINE_multi_string(
        "model", [], "A diffusers directory or a checkpoint file; may be repeated."
    )
    _OPTIONS = option_flags.define_axes(
        drawing.OPTIONS, without=(*evaluation.AXES, "height", "width")
    )

    def open_subjects(weights: Sequence[Sequence[Values]]) -> list[Subject]:
        """Open the models that --workdir and --model name, each with all points of the sweep."""
        if not (_WORKDIR.value or _MODEL.value):
            raise ValueError(
                "there is no model to score: give --workdir=FOLDER (a training run) or --model=PATH"
            )
        if not _WORKDIR.value and not flags.FLAGS.out:
            raise ValueError(
                "a --model has no workdir for the results: name a folder with --out=FOLDER"
            )
        if len(weights) > 1:
            raise ValueError(
                "--ema or --checkpoint is repeated, as for a cascade with several stages: give "
                "each flag once, with commas between values"
            )
        points = [values for (values,) in option_flags.points(drawing.OPTIONS, _OPTIONS, 1)]
        of_runs = points
        if _MODEL.value:  # The models use these options.
            kept = drawing.OPTIONS.keys() - drawing.FILE_OPTIONS.keys()
            of_runs = [{k: v for k, v in point.items() if k in kept} for point in points]
        ema = "raw" if all(one["ema"] == "raw" for one in weights[0]) else "ema"
        return [
            *(open_run(workdir, of_runs, weights[0]) for workdir in _WORKDIR.value),
            *(open_model(path, points, ema=ema) for path in _MODEL.value),
        ]

    evaluation.command(open_subjects, GUIDANCE, frozen.write)
