"""Super-resolution model from 64x64 to 256x256, to train on one GPU.

The model has 17,747,313 parameters and takes 59 GFLOP per training image. It enlarges the pictures
of base64_47m. It has not been trained yet.

python -m imagen_jax.train --config=configs/sr256_18m.py --workdir=runs/sr256 \
    --config.data.path=PHOTOS
"""

from ml_collections import ConfigDict

from configs import sr64_3m


def get_config() -> ConfigDict:
    c = sr64_3m.get_config()
    c.batch_size = 64
    c.unet.update(
        image_size=256,
        embed_dim=96,
        channel_mult=(1, 2, 3),
        cond_dim=256,
        dtype="bfloat16",
        residual=False,
        noise_aug=True,
    )
    # The first stage's pictures have errors. Noise augmentation of this level teaches this model to
    # correct them.
    c.super_resolution.update(factor=4, aug_sigma=0.1)
    c.diffusion.update(p_mean=0.0, weight="none")
    c.optimizer.lr = 5e-4
    c.data.threads = 16
    return c
