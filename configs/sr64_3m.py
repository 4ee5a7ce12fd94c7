"""Super-resolution from 32x32 to 64x64, the stage after base32_8m, for two CPU cores.

3,286,321 parameters, 1.5 GFLOP per training image.

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
        patch=4,  # No seams, because the small picture determines the colours.
        attention_resolutions=(),
        low_res=True,
        noise_aug=True,
    )
    c.diffusion.update(p_mean=-1.2, p_std=1.2)
    # The first stage's pictures have errors; with this noise level, the model corrects them.
    c.super_resolution.update(factor=2, aug_sigma=0.1)
    c.sampler.update(steps=8, guidance=1.0)
    c.sample_every, c.keep_every = 500, 0
    return c
