"""Super-resolution model from 32x32 to 64x64, to train on two CPU cores.

The model has 3,286,321 parameters and takes 1.5 GFLOP per training image. It enlarges the pictures
of base32_8m.

python -m imagen_jax.train --config=configs/sr64_3m.py --workdir=runs/sr64 \
    --config.data.path=PHOTOS
"""

from ml_collections import ConfigDict

from configs import base32_8m


def get_config() -> ConfigDict:
    c = base32_8m.get_config()
    c.steps = 20_000
    c.batch_size = 32

    c.unet.update(
        image_size=64,
        embed_dim=64,
        channel_mult=(1, 2),
        patch=4,  # Seams are not visible, because the small picture determines the colours.
        attention_resolutions=(),
        low_res=True,
        noise_aug=True,
    )
    # The small picture already determines the coarse content, so the loss is not weighted.
    c.diffusion.update(p_mean=0.0, p_std=1.2, weight="none")
    # The first stage's pictures have errors. Noise augmentation of this level teaches this model to
    # correct them.
    c.super_resolution.update(factor=2, aug_sigma=0.1)
    c.sampler.update(steps=8, guidance=1.0)
    c.sample_every, c.keep_every = 500, 0
    return c
