"""Latent diffusion model for 64x64 pictures, to train for a few hours on two CPU cores.

The UNet has 11,160,200 parameters and works on 16x16 latents. Training takes 3.0 GFLOP per image,
including the VAE. The first command trains the VAE.

python -m sd_jax.train_vae --config=configs/sd64_vae.py --workdir=runs/sd64_vae \
    --config.data.path=PHOTOS
python -m sd_jax.train --config=configs/sd64_11m.py --workdir=runs/sd64 --config.data.path=PHOTOS \
    --config.prompts="('a dog on a beach',)"
"""

from ml_collections import ConfigDict

from configs import sd_quickstart


def get_config() -> ConfigDict:
    c = sd_quickstart.get_config()
    c.unet.update(
        width=64, channel_mult=(1, 2, 3), num_res_blocks=1, attention_levels=(1, 2), in_channels=8, out_channels=8
    )
    c.vae.update(weights="runs/sd64_vae", latent_channels=8)
    c.text.update(width=256, max_tokens=16)
    c.latents.image_size = 64
    c.data.update(source="folder", path="data/photos", text="txt")
    c.prompts = ("a photo",)
    return c
