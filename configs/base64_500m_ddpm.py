"""Imagen's 64x64 base model as a continuous-time DDPM, with 524,897,540 parameters.

python -m imagen_jax.train --config=configs/base64_500m_ddpm.py --workdir=runs/base64_500m_ddpm

This is base64_500m with NeMo's alternative to EDM: noise prediction, a cosine log-SNR schedule, and
an ancestral sampler with 250 steps. The sampler needs thresholding, because its first step divides
by an alpha of 4e-8.
"""

from ml_collections import ConfigDict

from configs import base64_500m


def get_config() -> ConfigDict:
    c = base64_500m.get_config()
    c.diffusion.predicts = "eps"
    c.diffusion.noise = "cosine"
    c.sampler.name = "ddpm"
    c.sampler.steps = 250
    return c
