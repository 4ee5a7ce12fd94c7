"""Stable Diffusion 2.0-base at 512x512: 865,910,724 parameters, predicts eps.

python -m sd_jax.train --config=configs/sd2_512_base.py --workdir=runs/sd2_base \
    --config.unet.weights=runs/sd2_256

NeMo: global batch 8192, 220,000 steps, 1.802 billion samples of images with at least 512 pixels per
side, 10 % of them without text, 256 GPUs.
"""

from ml_collections import ConfigDict

from configs import sd2_256_pretrain


def get_config() -> ConfigDict:
    c = sd2_256_pretrain.get_config()
    c.steps = 220_000

    c.unet.weights = "runs/sd2_256"
    c.latents.image_size = 512
    c.text.drop_prob = 0.1
    c.optimizer.warmup = 0
    c.data.min_size = 512
    return c
