"""sr256_400m for text embeddings 4096 wide, those of T5 v1.1-XXL: 429,350,660 parameters.

python -m imagen_jax.train --config=configs/sr256_400m_t5xxl.py --workdir=runs/sr256_400m_t5xxl

Batch 2048, 1.25 million steps, 2.56 billion samples, as sr256_400m. NeMo ships no such file; its
documentation's 429 million parameters are perhaps those of this one.
"""

from ml_collections import ConfigDict

from configs import sr256_400m


def get_config() -> ConfigDict:
    c = sr256_400m.get_config()
    c.unet.cond_dim = 1024
    c.text.width = 4096
    return c
