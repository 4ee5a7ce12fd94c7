"""Stable Diffusion 1.5 at 512x512, which predicts eps (859,520,964 parameters).

Training starts from the weights of Stable Diffusion 1.2 (sd1_512_v1_2).

python -m sd_jax.train --config=configs/sd1_512_v1_5.py --workdir=runs/sd1_5 \
    --config.unet.weights=runs/sd1_2

NVIDIA NeMo trains this model on 256 GPUs with global batch size 8192 for 165,000 steps (1.352
billion samples).
"""

from ml_collections import ConfigDict

from configs import sd1_512_v1_2


def get_config() -> ConfigDict:
    c = sd1_512_v1_2.get_config()
    c.steps = 165_000

    c.unet.weights = "runs/sd1_2"
    return c
