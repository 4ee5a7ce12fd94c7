"""Stable Diffusion 2.0-base at 512x512, which predicts eps (865,910,724 parameters).

Training starts from the weights of sd2_256_pretrain.

python -m sd_jax.train --config=configs/sd2_512_base.py --workdir=runs/sd2_base \
    --config.unet.weights=runs/sd2_256

NVIDIA NeMo trains this model on 256 GPUs with global batch size 8192 for 220,000 steps (1.802
billion samples). The images have at least 512 pixels per side, and 10 % of the texts are dropped.
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
