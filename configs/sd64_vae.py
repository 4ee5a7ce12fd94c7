"""Small autoencoder for sd64_11m: it encodes 64x64 pictures as 16x16 latents.

The model has 961,739 parameters, and trains on two CPU cores.

python -m sd_jax.train_vae --config=configs/sd64_vae.py --workdir=runs/sd64_vae \
    --config.data.path=PHOTOS
"""

from ml_collections import ConfigDict

from configs import sd64_11m, sd_quickstart_vae


def get_config() -> ConfigDict:
    c = sd_quickstart_vae.get_config()
    c.vae = sd64_11m.get_config().vae
    c.vae.weights = ""
    c.reconstruction.image_size = 64
    c.data = sd64_11m.get_config().data
    return c
