"""Stable Diffusion 1.1 at 512x512, which predicts eps (859,520,964 parameters).

Training starts from the weights of sd1_256_pretrain.

python -m sd_jax.train --config=configs/sd1_512_v1_1.py --workdir=runs/sd1_1 \
    --config.unet.weights=runs/sd1_256

NVIDIA NeMo trains this model on 256 GPUs with global batch size 8192 for 50,000 steps (409.6
million samples). The images have at least 1024 pixels per side.
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
