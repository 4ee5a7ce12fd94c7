"""sr256_400m with stacked attention and a clean low-res image: 568,675,844 parameters.

python -m imagen_jax.train --config=configs/sr256_450m.py --workdir=runs/sr256_450m

NeMo's config (sr256-450m-edm, hence the name) is for one device, with batch size 16 and 2.5 million
steps. The global batch of 2048, 1.25 million steps and 2.56 billion samples are from sr256_400m.
"""

from ml_collections import ConfigDict

from configs import sr256_400m


def get_config() -> ConfigDict:
    c = sr256_400m.get_config()
    c.unet.attention = "stacked"
    c.unet.noise_aug = False
    return c
