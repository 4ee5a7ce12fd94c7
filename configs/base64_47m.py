"""Text-to-image model for 64x64 pictures, to train for a few hours on one GPU.

The model has 47,125,005 parameters and takes 39 GFLOP per training image. It has not been trained
yet.

python -m imagen_jax.train --config=configs/base64_47m.py --workdir=runs/base64 \
    --config.data.path=PHOTOS --config.prompts="('a dog on a beach',)"
"""

from ml_collections import ConfigDict

from configs import base32_8m


def get_config() -> ConfigDict:
    c = base32_8m.get_config()
    c.steps = 100_000
    c.batch_size = 256

    c.unet.update(
        image_size=64,
        embed_dim=128,
        channel_mult=(1, 2, 3),
        num_res_blocks=2,
        attention_resolutions=(8,),
        head_dim=64,
        cond_dim=256,
        dtype="bfloat16",
    )
    # At twice the resolution, twice the sigma is needed to hide as much of a picture (Hoogeboom et
    # al. 2023).
    c.diffusion.update(p_mean=1.0, weight="p2(k=0.0625)")
    c.sampler.update(steps=24, sigma_max=80.0)
    c.optimizer.update(lr=5e-4, warmup=1_000, ema_decays=(0.999, 0.9999))
    c.data.threads = 8
    c.save_every, c.sample_every, c.keep_every = 1_000, 2_000, 0
    return c
