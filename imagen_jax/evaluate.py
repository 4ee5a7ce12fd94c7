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

from diffusion_jax.evaluate.evaluate_command import command
from diffusion_jax.web import frozen
from imagen_jax.cascade import KIND

if __name__ == "__main__":
    command(KIND, frozen.write)
