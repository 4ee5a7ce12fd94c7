"""base64_500m as a continuous-time DDPM: noise prediction, cosine log-SNR, 524,897,540 parameters.

python -m imagen_jax.train --config=configs/base64_500m_ddpm.py --workdir=runs/base64_500m_ddpm

NeMo's alternative to EDM, with its ancestral sampler of 250 steps. It needs thresholding, because
the first step divides by an alpha of 4e-8.
"""

from ml_collections import ConfigDict

from configs import base64_500m


def get_config() -> ConfigDict:
    c = base64_500m.get_config()
    c.diffusion.precond = "eps"
    c.diffusion.noise = "cosine"
    c.sampler.name = "ddpm"
    c.sampler.steps = 250
    return c
