"""Text-to-image model for 64x64 emoji, to train within minutes on one H100.

The model has 11,840,141 parameters and takes 9.8 GFLOP per training image. It has not been trained
yet. Before training, prepare data/emoji as configs/emoji32.py describes.

python -m imagen_jax.train --config=configs/emoji64.py --workdir=runs/emoji64
"""

from ml_collections import ConfigDict

from configs import base32_8m, emoji32


def get_config() -> ConfigDict:
    c = emoji32.with_emoji(base32_8m.get_config())
    c.steps = 12_000
    c.batch_size = 256

    c.unet.update(image_size=64, num_res_blocks=2, attention_resolutions=(8,), dtype="bfloat16")
    # At twice the resolution, twice the sigma is needed to hide as much of a picture (Hoogeboom et
    # al. 2023).
    c.diffusion.update(p_mean=1.0, weight="p2(k=0.0625)")
    c.sampler.update(steps=24, sigma_max=80.0)
    c.optimizer.schedule = "cosine"
    c.data.threads = 8
    c.save_every, c.sample_every, c.keep_every = 2_000, 2_000, 0
    return c
