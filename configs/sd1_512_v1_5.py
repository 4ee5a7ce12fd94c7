"""Stable Diffusion 1.5 at 512x512, from 1.2: 859,520,964 parameters, predicts eps.

python -m sd_jax.train --config=configs/sd1_512_v1_5.py --workdir=runs/sd1_5 \
    --config.unet.weights=runs/sd1_2

NeMo: global batch 8192, 165,000 steps, 1.352 billion samples, 256 GPUs.
"""

from ml_collections import ConfigDict

from configs import sd1_512_v1_2


def get_config() -> ConfigDict:
    c = sd1_512_v1_2.get_config()
    c.steps = 165_000

    c.unet.weights = "runs/sd1_2"
    return c
