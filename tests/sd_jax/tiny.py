"""A tiny Stable Diffusion model: config, VAE and weights that compile in seconds."""

from configs import sd1_256_pretrain
from sd_jax.settings import read_settings
from sd_jax.vae import VAE
from sd_jax.weights import checkpoints, names
from tests.changes import change
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
    return change(c, changes)


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
