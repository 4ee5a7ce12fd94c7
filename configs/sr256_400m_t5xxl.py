"""Imagen's 64 to 256 super-resolution model for the text encoder T5 v1.1-XXL (width 4096).

This is sr256_400m with wider text embeddings and 429,350,660 parameters.

python -m imagen_jax.train --config=configs/sr256_400m_t5xxl.py --workdir=runs/sr256_400m_t5xxl

As in sr256_400m, training takes 1.25 million steps with global batch size 2048 (2.56 billion
samples). NVIDIA NeMo has no config for T5-XXL, but its documentation states 429 million parameters
for sr256-400m, which may refer to this model.
"""

from ml_collections import ConfigDict

from configs import sr256_400m


def get_config() -> ConfigDict:
    c = sr256_400m.get_config()
    c.unet.cond_dim = 1024
    c.text.width = 4096
    return c
