"""Scores a trained Stable Diffusion model over guidance scales.

    python -m sd_jax.evaluate --workdir=runs/sd2_512 \\
        --prompts=captions_val2014.json --num_prompts=30000 --reference=val2014_512.npz \\
        --inception=pt_inception-2015-12-05-6726825d.pth \\
        --clip=weights/CLIP-ViT-H-14-laion2B-s32B-b79K

draws the prompts at each scale and scores them by FID and CLIP score, as a curve over the scales;
a model of the coloured digits is scored by their judge, without any of these files. --checkpoint
and --ema take lists, and become further points. The same seeds draw at every point. Features are
kept batch by batch: started again, a sweep goes on where it was.

WORKDIR/evaluation/NAME gets sweep.csv, fid_scores.csv and clip_scores.csv, curve.png and .pdf, a
sheet of pictures for each scale, and scores/, a card with each score; the scores also go to the
metrics, and all of it into one page, WORKDIR/report.html (beside MLPerf's reference runs:
python -m diffusion_jax.report WORKDIR --rcp).
"""

from collections.abc import Sequence

import numpy as np
from absl import flags

from diffusion_jax.draw.model import Choice, Model
from diffusion_jax.draw.program import Images
from diffusion_jax.evaluate import command as evaluation
from sd_jax import drawing
from sd_jax.weights.trained import read_run

SCALES = (1.5, 2, 3, 4, 5, 6, 7, 8)


def open_subject(
    workdir: str, choice: Choice, vae_weights: str | None = None
) -> evaluation.Subject:
    """The model of a run; ValueError or FileNotFoundError if there is none, or it cannot draw."""
    chosen = drawing.Choice(**vars(choice), vae_weights=vae_weights)
    s, model = read_run(workdir, chosen), drawing.load(workdir, chosen)
    described = {"workdir": model.workdir, "training_seed": s.run.seed, "eta": s.sampler.eta}
    described |= {"negative_prompt": s.sampler.negative_prompt, "vae": s.vae_weights}
    sizes = s.output_size, s.output_size
    return evaluation.of_models([model], _draw, lambda _: described, s.data.source, sizes)


def _draw(
    models: Sequence[Model], prompts: Sequence[str], seeds: Sequence[int], guidance: float
) -> Images:
    (only,), at_once = models, len(seeds)
    batches = drawing.draw_batches(only, prompts, seeds, guidance=guidance, batch_size=at_once)
    return np.concatenate(list(batches))


if __name__ == "__main__":
    workdir = flags.DEFINE_string("workdir", None, "The folder of a training run.", required=True)
    vae_weights = flags.DEFINE_string(
        "vae_weights", None, "The VAE: a file, a diffusers directory or a workdir; else the run's."
    )
    evaluation.command(
        lambda choice: open_subject(workdir.value, choice, vae_weights.value), SCALES
    )
