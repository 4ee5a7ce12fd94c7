"""sr256_400m for T5 v1.1-XXL, with text embeddings of width 4096: 429,350,660 parameters.

python -m imagen_jax.train --config=configs/sr256_400m_t5xxl.py --workdir=runs/sr256_400m_t5xxl

Global batch 2048, 1.25 million steps, 2.56 billion samples, as in sr256_400m. NeMo has no such
config, but the 429 million parameters in its documentation may refer to this model.
"""

from ml_collections import ConfigDict

from configs import sr256_400m


def get_config() -> ConfigDict:
    c = sr256_400m.get_config()
    c.unet.cond_dim = 1024
    c.text.width = 4096
    return c
