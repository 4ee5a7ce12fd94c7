"""The tiny autoencoder of sd_quickstart: 16x16 digits to 4x4 latents, in about a minute on a CPU.

python -m sd_jax.train_vae --config=configs/sd_quickstart_vae.py --workdir=runs/sd_vae
"""

from ml_collections import ConfigDict

from configs import sd_quickstart


def get_config() -> ConfigDict:
    quickstart = sd_quickstart.get_config()
    c = ConfigDict()
    c.seed = 0
    c.steps = 400
    c.batch_size = 32

    c.vae = quickstart.vae
    c.vae.weights = ""  # What training starts from; "" for random numbers.
    c.reconstruction = dict(image_size=16, distance="l1", kl=1e-3)

    c.optimizer = quickstart.optimizer
    c.optimizer.update(lr=1e-3, ema_decays=(0.99,))
    c.mesh = quickstart.mesh
    c.data = quickstart.data

    c.log_every, c.sample_every = 50, 400
    c.save_every, c.keep_last, c.keep_every = 400, 2, 0
    c.prompts = ()
    return c
