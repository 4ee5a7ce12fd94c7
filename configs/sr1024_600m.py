"""Imagen's 256 -> 1024 super-resolution model, an EfficientUNet of 639,193,348 parameters.

python -m imagen_jax.train --config=configs/sr1024_600m.py --workdir=runs/sr1024_600m

It learns from 256x256 crops of 1024x1024 images, and draws whole ones, since it attends to the text
alone. NeMo (sr1024-600m): global batch 4096, 1.25 million steps, 5.12 billion samples, 64 GPUs; its
documentation says 427 million parameters and 1.23 billion samples. Its launcher leaves the scaling
of skips out: for such weights --config.unet.scale_skips=False.
"""

from ml_collections import ConfigDict

from configs import sr256_600m


def get_config() -> ConfigDict:
    c = sr256_600m.get_config()
    c.unet.attention = "cross"
    c.sampler.guidance = 7.5
    c.data.update(path="data/laion1024", resize=1024, min_size=1024)  # Crops at the centre.
    return c
