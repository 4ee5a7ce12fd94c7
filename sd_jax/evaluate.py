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

from diffusion_jax.evaluate.evaluate_command import command
from diffusion_jax.web import frozen
from sd_jax.drawing import KIND

if __name__ == "__main__":
    command(KIND, frozen.write)
