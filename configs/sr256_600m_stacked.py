"""sr256_600m with stacked attention: 700,610,308 parameters.

python -m imagen_jax.train --config=configs/sr256_600m_stacked.py --workdir=runs/sr256_600m_stacked

NeMo's launcher calls this model 600m_res_256, and NeMo itself sr256-600m-edm-noise: global batch
4096, 1.25 million steps, 5.12 billion samples, 64 GPUs.
"""

from ml_collections import ConfigDict

from configs import sr256_600m


def get_config() -> ConfigDict:
    c = sr256_600m.get_config()
    c.unet.attention = "stacked"
    return c
