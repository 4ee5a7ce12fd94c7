"""Score trained Imagen models over a range of guidance scales.

    python -m imagen_jax.evaluate --workdir=runs/quickstart

For a model of the built-in coloured digits, this command draws digits, and a built-in judge
recognises the digit, the colour of the ink and the colour of the paper in each picture. A picture
is right if all three match the prompt. Prompts that were not in the training data are counted
separately. Other models are scored by FID and CLIP score, as a curve over the guidance scales:

    python -m imagen_jax.evaluate --workdir=runs/base64 --workdir=runs/sr256 \\
        --prompts=captions_val2014.json --num_prompts=30000 --reference=coco_256.npz \\
        --inception=pt_inception-2015-12-05-6726825d.pth --clip=openai/clip-vit-large-patch14 \\
        --text_weights=weights/t5-11b-encoder

--text_weights names the text encoder's weights if the config does not, for example because the
model was trained on stored embeddings.

A sweep scores several points, that is, combinations of settings. For a single model, --checkpoint,
--ema and all sampler settings (--sampler, --steps, --eta ...) take lists: --steps=10,20,30 gives
three points. For a cascade, repeat --checkpoint and --ema once per stage, as in --ema=0.999,0.9999
--ema=0.9999,raw; all combinations are scored. In the sampler settings of a cascade, commas separate
the stages (one value for all stages, or one per stage), and each repetition of a flag adds a point:
--steps=30,20 --steps=10,10. All points draw with the same seeds. Features are saved after each
batch, so the same command continues an interrupted sweep.

The results are written to WORKDIR/evaluation/NAME: sweep.csv, fid_scores.csv and clip_scores.csv,
curve.png and curve.pdf, a sheet of pictures for each guidance scale, and scores/ with the settings
of each score. The scores are also written to the run's metrics, and WORKDIR/report.html shows
everything on one page.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags

from diffusion_jax.draw import option_flags
from diffusion_jax.draw.options import Values
from diffusion_jax.draw.stage import Stage
from diffusion_jax.evaluate import evaluate_command as evaluation
from diffusion_jax.evaluate.evaluate_command import Subject
from diffusion_jax.web import frozen
from imagen_jax import cascade

GUIDANCE = (1, 1.5, 2, 3, 4, 5, 6)


def open_subject(
    workdirs: Sequence[str],
    points: Sequence[Sequence[Values]] = (),
    weights: Sequence[Sequence[Values]] = (),
) -> Subject:
    """Open a single model or a cascade for evaluation.

    Args:
        workdirs: The workdir of each stage; one workdir for a single model.
        points: For each combination of sampler settings to score, a list with the option values of
            every stage, keyed as in cascade.OPTIONS. By default, there is one combination, with the
            values of the configs.
        weights: For each stage, a list of the weights to evaluate, each as the values of the
            options "ema" and "checkpoint". Stages beyond the end of this sequence use the newest
            checkpoint, and its average with the largest decay.

    Raises:
        FileNotFoundError: If a workdir holds no run.
        ValueError: If a value is invalid, `weights` has more entries than there are stages, the
            first stage is a super-resolution model, a stage does not draw images of the size that
            the next stage enlarges, or the images are not square.
    """
    points = evaluation.with_weights(points or [[{}] * len(workdirs)], weights)
    model = cascade.open_stages(workdirs, points[0])
    model.check([], [])
    return evaluation.of_model(model, points, _describe, model.stages[-1].settings.data.source)


def _describe(stage: Stage) -> dict[str, Any]:
    described = cascade.describe(stage)
    del described["sampler"]["guidance"]  # The metadata of a score hold the point's own guidance.
    return described


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_multi_string(
        "workdir", None, "The workdir of a training run; repeat it for a cascade.", required=True
    )
    _OPTIONS = option_flags.define_axes(cascade.OPTIONS, without=evaluation.AXES)

    def open_subjects(weights: Sequence[Sequence[Values]]) -> list[Subject]:
        """Open the model or cascade that the flags name, as the only Subject."""
        points = option_flags.points(cascade.OPTIONS, _OPTIONS, len(_WORKDIR.value))
        return [open_subject(_WORKDIR.value, points, weights)]

    evaluation.command(open_subjects, GUIDANCE, frozen.write)
