"""Stable Diffusion 1.2 at 512x512, which predicts eps (859,520,964 parameters).

Training starts from the weights of Stable Diffusion 1.1 (sd1_512_v1_1).

python -m sd_jax.train --config=configs/sd1_512_v1_2.py --workdir=runs/sd1_2 \
    --config.unet.weights=runs/sd1_1

NVIDIA NeMo trains this model on 256 GPUs with global batch size 8192 for 150,000 steps (1.229
billion samples). The images have at least 512 pixels per side, and 10 % of the texts are dropped.
"""

from ml_collections import ConfigDict

from configs import sd1_512_v1_1


def get_config() -> ConfigDict:
    c = sd1_512_v1_1.get_config()
    c.steps = 150_000

    c.unet.weights = "runs/sd1_1"
    c.text.drop_prob = 0.1
    c.optimizer.warmup = 0
    c.data.min_size = 512
    return c
