"""Super-resolution model for the quick start's digits, from 16x16 to 64x64.

The model has 2,482,529 parameters, and trains in minutes on a laptop's CPU.

python -m imagen_jax.train --config=configs/quickstart_sr.py --workdir=runs/quickstart_sr
python -m imagen_jax.sample --workdir=runs/quickstart --workdir=runs/quickstart_sr \
    --prompt="a red seven on gray paper" --num_images=8 --out=pictures
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    c = quickstart.get_config()
    c.steps = 300
    c.batch_size = 32

    c.unet.update(image_size=64, patch=8, embed_dim=96, low_res=True, noise_aug=True, cond_dim=32)
    c.diffusion.update(predicts="x0", p_mean=-1.2)
    # The first stage's pictures are noisy. Noise augmentation of this level teaches this model to
    # smooth them.
    c.super_resolution.update(factor=4, aug_sigma=0.2)
    c.sampler.update(steps=8, sigma_min=0.05, sigma_max=40.0, guidance=1.0)
    c.sample_every, c.save_every = 150, 150
    return c
