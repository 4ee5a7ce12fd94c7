"""Stable Diffusion 1.1 at 512x512, from the 256x256 model: 859,520,964 parameters, predicts eps.

python -m sd_jax.train --config=configs/sd1_512_v1_1.py --workdir=runs/sd1_1 \
    --config.unet.weights=runs/sd1_256

NeMo: global batch 8192, 50,000 steps, 409.6 million samples of images with at least 1024 pixels per
side, 256 GPUs.
"""

from ml_collections import ConfigDict

from configs import sd1_256_pretrain


def get_config() -> ConfigDict:
    c = sd1_256_pretrain.get_config()
    c.steps = 50_000

    c.unet.weights = "runs/sd1_256"
    c.latents.image_size = 512
    c.data.min_size = 1024
    return c
