"""Draws 32x32 pictures as base32_8m does, half as wide again: for one GPU and small pictures.

18,700,813 parameters, 3.8 GFLOP of training an image; no GPU has trained it yet.

python -m imagen_jax.train --config=configs/base32_19m.py --workdir=runs/base32 \
    --config.data.path=PHOTOS --config.prompts="('a dog on a beach',)"
"""

from ml_collections import ConfigDict

from configs import base32_8m


def get_config() -> ConfigDict:
    c = base32_8m.get_config()
    c.batch_size = 256
    c.unet.update(embed_dim=96, cond_dim=192, dtype="bfloat16")
    c.optimizer.lr = 7e-4
    c.data.threads = 8
    return c
