"""Text-to-image model for 32x32 pictures, to train on one GPU: base32_8m at 1.5 times the width.

The model has 18,700,813 parameters and takes 3.8 GFLOP per training image. It has not been trained
yet.

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
