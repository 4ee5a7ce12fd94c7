"""sr256_400m with stacked attention and a clean low-res image: 568,675,844 parameters.

python -m imagen_jax.train --config=configs/sr256_450m.py --workdir=runs/sr256_450m

NeMo (sr256-450m-edm) ships it for one device, with batch 16 and 2.5 million steps; batch 2048, 1.25
million steps and 2.56 billion samples are those of sr256_400m. The 450 of its name is NeMo's.
"""

from ml_collections import ConfigDict

from configs import sr256_400m


def get_config() -> ConfigDict:
    c = sr256_400m.get_config()
    c.unet.attention = "stacked"
    c.unet.noise_aug = False
    return c
