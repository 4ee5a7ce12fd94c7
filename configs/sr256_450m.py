"""Imagen's 64 to 256 super-resolution model with stacked attention (568,675,844 parameters).

This is sr256_400m with stacked attention, and without noise augmentation of the low-resolution
image.

python -m imagen_jax.train --config=configs/sr256_450m.py --workdir=runs/sr256_450m

The name is from NVIDIA NeMo's config sr256-450m-edm. That config is for one device, with batch size
16 and 2.5 million steps. This config keeps the values of sr256_400m: global batch size 2048 and
1.25 million steps (2.56 billion samples).
"""

from ml_collections import ConfigDict

from configs import sr256_400m


def get_config() -> ConfigDict:
    c = sr256_400m.get_config()
    c.unet.attention = "stacked"
    c.unet.noise_aug = False
    return c
