"""A tiny Stable Diffusion model: config, VAE and weights that compile in seconds."""

import jax
import jax.numpy as jnp
import numpy as np

from configs import sd1_256_pretrain
from sd_jax.settings import read_settings
from sd_jax.vae import VAE
from sd_jax.weights import checkpoints, names
from tests.sd_jax.cases import vae_weights

SIZE = 8
_SHORT = (
    "--config.steps=3",
    "--config.batch_size=8",
    "--config.log_every=1",
    "--config.sample_every=0",
    "--config.optimizer.warmup=2",
    "--config.vae.channel_mult=(1,)",
    "--config.vae.num_res_blocks=1",
)
VAE_FLAGS = ("--config=configs/sd_quickstart_vae.py", *_SHORT)
"""Of train_vae; FLAGS are train's, which takes its workdir as config.vae.weights."""
FLAGS = (
    "--config=configs/sd_quickstart.py",
    *_SHORT,
    "--config.unet.width=32",
    "--config.unet.attention_levels=()",
    "--config.text.width=32",
    "--config.sampler.steps=2",
)
VAE_FIELDS = {"width": 32, "channel_mult": (1, 2), "num_res_blocks": 1}


def config(vae="vae.safetensors", **changes):
    """A config with 8x8 digits, 4x4 latents and hashed words. a__b=c sets config.a.b to c."""
    c = sd1_256_pretrain.get_config()
    c.unet.update(
        width=32, channel_mult=(1,), num_res_blocks=1, attention_levels=(), num_heads=0, head_dim=16, dtype="float32"
    )
    c.vae.update(weights=str(vae), dtype="float32", **VAE_FIELDS)
    c.text.update(encoder="hashed", width=24, max_tokens=6, drop_prob=0.5, weights="")
    c.latents.update(image_size=SIZE, scale=0.5)
    c.sampler.update(name="ddim", steps=4, guidance=3.0)
    c.optimizer.update(warmup=3, lr=1e-3)
    c.data.update(source="diffusion_jax.examples.digits", path="", threads=1)
    c.update(steps=2, batch_size=8, sample_every=0, save_every=2, log_every=1)
    for name, value in changes.items():
        group, _, field = name.rpartition("__")
        (c[group] if group else c)[field] = value
    return c


def settings(vae="vae.safetensors", **changes):
    """Return the checked settings of the config."""
    return read_settings(config(vae, **changes).to_dict())


def vae_params():
    """Return random parameters. Their moments and images are of order 1."""
    vae = VAE(**VAE_FIELDS)
    return names.vae_from_torch(vae_weights(vae), vae)


def write_vae(path):
    """Write a file with LDM's names, which read_vae reads."""
    vae = VAE(**VAE_FIELDS)
    checkpoints.save_file(checkpoints.Checkpoint(None, checkpoints.VAEPart(vae, vae_params()), []), path)
    return path


def random_params(task):
    """Return random parameters of a task's network. Its initial zeros would hide bugs."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.2, jnp.float32)
    return jax.tree.map(draw, shapes)
