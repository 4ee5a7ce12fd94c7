"""Scores a trained Stable Diffusion model over guidance scales.

    python -m sd_jax.evaluate --workdir=runs/sd2_512 \\
        --prompts=captions_val2014.json --num_prompts=30000 --reference=val2014_512.npz \\
        --inception=pt_inception-2015-12-05.pth --clip=weights/CLIP-ViT-H-14-laion2B-s32B-b79K

draws the prompts at each scale and scores them by FID and CLIP score, as a curve over the scales;
a model of the coloured digits is scored by their judge, without any of these files. --checkpoint
and --ema take lists, and become further points. The same seeds draw at every point. Features are
kept batch by batch: started again, a sweep goes on where it was.

WORKDIR/evaluation/NAME gets sweep.csv, fid_scores.csv and clip_scores.csv, curve.png and .pdf, a
sheet of pictures for each scale, and scores/, a card with each score; the scores also go to the
metrics, and all of it into one page, WORKDIR/report.html (beside MLPerf's reference runs:
python -m diffusion_jax.report WORKDIR --rcp).
"""

import pathlib

import jax
import numpy as np
from absl import flags

from diffusion_jax import drawing, evaluation
from sd_jax import sampling, trained
from sd_jax.trained import Choice, Model

SCALES = (1.5, 2, 3, 4, 5, 6, 7, 8)
_PIXELS = 2**22  # Of all images that a device draws at once, unless said otherwise.


def open_system(
    workdir: str, choice: evaluation.Choice, vae_weights: str | None = None
) -> evaluation.System:
    """The model of a run; ValueError or FileNotFoundError if there is none, or it cannot draw."""
    chosen = Choice(
        ema=choice.ema, checkpoint=choice.checkpoint, steps=choice.steps, vae_weights=vae_weights
    )
    model = trained.load_model(workdir, chosen)
    size = model.settings.output_size
    most = jax.device_count() * max(1, _PIXELS // size**2)
    return evaluation.System(
        pathlib.Path(workdir),
        model.settings.data.source,
        size,
        lambda total: min(most, total),
        lambda ema, step: _point(trained.with_weights(model, ema, step)),
    )


def _point(model: Model) -> evaluation.Point:
    s = model.settings

    def draw(prompts, seeds, scale, size):
        texts = sampling.prompts(model.encoder, list(prompts), s.sampler.negative_prompt)
        scales = np.full(len(seeds), scale, np.float32)
        batches = drawing.in_batches(model.draw, model.params, texts, seeds, scales, size)
        return np.concatenate(list(batches))

    card = {
        "sampler": s.sampler.name,
        "steps": str(s.sampler.steps),
        "precision": str(s.unet.dtype),
        "models": [
            {"workdir": model.workdir, "training_seed": s.run.seed, "eta": s.sampler.eta,
             "negative_prompt": s.sampler.negative_prompt, "vae": s.vae_weights}
        ],
    }  # fmt: skip
    return evaluation.Point(model.step, model.ema, [model.params], draw, card)


if __name__ == "__main__":
    workdir = flags.DEFINE_string("workdir", None, "The folder of a training run.", required=True)
    vae_weights = flags.DEFINE_string(
        "vae_weights", None, "The VAE: a file, a diffusers directory or a workdir; else the run's."
    )
    evaluation.command(lambda choice: open_system(workdir.value, choice, vae_weights.value), SCALES)
