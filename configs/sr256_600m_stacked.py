"""Imagen's 64 to 256 EfficientUNet (sr256_600m) with stacked attention (700,610,308 parameters).

python -m imagen_jax.train --config=configs/sr256_600m_stacked.py --workdir=runs/sr256_600m_stacked

NVIDIA NeMo calls this model sr256-600m-edm-noise, and NeMo's launcher calls it 600m_res_256. NeMo
trains it on 64 GPUs with global batch size 4096 for 1.25 million steps (5.12 billion samples).
"""

from ml_collections import ConfigDict

from configs import sr256_600m


def get_config() -> ConfigDict:
    c = sr256_600m.get_config()
    c.unet.attention = "stacked"
    return c
