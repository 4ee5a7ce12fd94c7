"""Imagen's 64x64 base model with 2,171,162,116 parameters: base64_500m at twice the width.

python -m imagen_jax.train --config=configs/base64_2b.py --workdir=runs/base64_2b

NVIDIA NeMo trains this model on 64 GPUs with global batch size 2048 for 2.5 million steps (5.12
billion samples).
"""

from ml_collections import ConfigDict

from configs import base64_500m


def get_config() -> ConfigDict:
    c = base64_500m.get_config()
    c.steps = 2_500_000
    c.batch_size = 2048
    c.unet.embed_dim = 512
    c.unet.cond_dim = 2048
    return c
