"""Imagen's 256 to 1024 super-resolution model: an EfficientUNet with 639,193,348 parameters.

python -m imagen_jax.train --config=configs/sr1024_600m.py --workdir=runs/sr1024_600m

The model trains on 256x256 crops of 1024x1024 images and samples whole images. This works because
the model attends only to the text. NVIDIA NeMo trains this model (as sr1024-600m) on 64 GPUs with
global batch size 4096 for 1.25 million steps (5.12 billion samples). NeMo's documentation states
427 million parameters and 1.23 billion samples. NeMo's launcher does not scale skip connections: to
use weights trained with it, set --config.unet.scale_skips=False.
"""

from ml_collections import ConfigDict

from configs import sr256_600m


def get_config() -> ConfigDict:
    c = sr256_600m.get_config()
    c.unet.attention = "cross"
    c.sampler.guidance = 7.5
    c.data.update(path="data/laion1024", resize=1024, min_size=1024)  # Centre crops.
    return c
