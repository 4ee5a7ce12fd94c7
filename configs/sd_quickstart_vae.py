"""Tiny autoencoder for sd_quickstart: it encodes 16x16 digits as 4x4 latents.

The model has 976,563 parameters, and trains in minutes on a CPU. After training, the mean absolute
error of pixels in [-1, 1] is 0.06.

python -m sd_jax.train_vae --config=configs/sd_quickstart_vae.py --workdir=runs/sd_vae
"""

from ml_collections import ConfigDict

from configs import sd_quickstart


def get_config() -> ConfigDict:
    quickstart = sd_quickstart.get_config()
    c = ConfigDict()
    c.system = "sd_jax.vae"
    c.seed = 0
    c.steps = 600
    c.batch_size = 32

    c.vae = quickstart.vae
    c.vae.weights = ""  # Initial weights; "" for random weights.
    c.reconstruction = dict(image_size=16, distance="l1", kl=1e-2)

    c.optimizer = quickstart.optimizer
    c.optimizer.update(lr=2e-3, warmup=50, ema_decays=(0.99,))
    c.mesh = quickstart.mesh
    c.data = quickstart.data

    c.log_every, c.sample_every = 50, 600
    c.save_every, c.keep_last, c.keep_every = 600, 2, 0
    return c
