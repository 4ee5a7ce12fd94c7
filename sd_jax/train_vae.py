"""Train Stable Diffusion's autoencoder on reconstruction and KL loss, without a discriminator.

    python -m sd_jax.train_vae --config=configs/sd_quickstart_vae.py --workdir=runs/sd_vae

To train on the latents, give the workdir to sd_jax.train as --config.vae.weights. The metric
`latent_std` is the standard deviation of the latents. Set --config.latents.scale of sd_jax.train to
1 / latent_std. Reconstructions of the first pictures are written to samples/. Config, data,
checkpoints and signals work as in sd_jax.train.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from diffusion_jax import systems
from diffusion_jax.data import sources
from diffusion_jax.data.pipeline import training_batches
from diffusion_jax.devices import sharding
from diffusion_jax.diffusion.precond import DISTANCES
from diffusion_jax.draw.program import default_batch_size
from diffusion_jax.task import Task, to_range
from diffusion_jax.train import loop
from diffusion_jax.train.train_command import command
from sd_jax import vae as vae_module
from sd_jax.sampling import posterior_sample
from sd_jax.settings import AutoencoderSettings
from sd_jax.vae import Moments
from sd_jax.weights.opened import read_vae as read_vae_weights

_SHOWN = 8  # Number of pictures to reconstruct during training.


def read_settings(config: Mapping[str, Any]) -> AutoencoderSettings:
    """Return the checked settings of a config. Raises ValueError for invalid values."""
    return systems.read(config, "sd_jax.vae")


def make_task(s: AutoencoderSettings) -> Task:
    """Return a Task: the initialisation and loss of an autoencoder, and reconstruction of images.

    Instead of drawing, the Task's `sample` encodes the images batch["image"], float [B, H, W, 3] in
    [-1, 1], and decodes the mean of the posterior.
    """
    size = s.reconstruction.image_size
    distance = DISTANCES.bound("reconstruction.distance", s.reconstruction.distance)

    def init(key):
        images = jnp.zeros((1, size, size, 3))
        side = size // vae_module.factor(s.vae)
        return s.vae.init(key, images, jnp.zeros((1, side, side, s.vae.latent_channels)))

    def loss(params, frozen, batch, keys):
        images = to_range(batch["image"])
        moments: Any = s.vae.apply(params, images, method="encode")
        z = posterior_sample(keys, moments)
        decoded: Any = s.vae.apply(params, z, method="decode")
        error = distance(decoded - images).mean()
        kl = divergence(moments).mean() / images[0].size
        metrics = {"reconstruction": error, "kl": kl, "latent_std": z.std()}
        return error + s.reconstruction.kl * kl, metrics

    def sample(params, frozen, batch, keys, guidance):
        moments: Any = s.vae.apply(params, batch["image"], method="encode")
        mean, _ = vae_module.mean_and_std(moments)
        images: Any = s.vae.apply(params, mean, method="decode")
        return images

    return Task(init, loss, sample, (), sharding.RULES)


def divergence(moments: Moments) -> Float[Array, "B"]:
    """Return KL(posterior || N(0, 1)) in nats for each image, given the posterior's moments."""
    mean, std = vae_module.mean_and_std(moments)
    return (mean**2 + std**2 - 1 - 2 * jnp.log(std)).sum((1, 2, 3)) / 2


def prepare(s: AutoencoderSettings, mesh: sharding.Mesh) -> loop.RunInputs:
    """Open everything that training an autoencoder needs: the data and the model.

    Raises:
        ValueError, OSError: The data are missing or do not fit the settings.
    """
    side = s.reconstruction.image_size
    pictures = sources.open_pictures(s.data, side)
    batches = training_batches(pictures, lambda texts: {}, s.run, s.data, mesh)

    # The first pictures, to be reconstructed during training.
    images, texts = pictures.read(np.arange(min(_SHOWN, len(pictures))))
    captions = tuple(text if isinstance(text, str) else "" for text in texts)
    examples = loop.Examples({"image": np.asarray(to_range(images))}, captions, 1.0, default_batch_size(side, side))

    start = (lambda: read_vae_weights(s.vae_weights, s.vae)) if s.vae_weights else None
    return loop.RunInputs(make_task(s), batches, examples, start=start)


if __name__ == "__main__":
    command(read_settings, prepare)
