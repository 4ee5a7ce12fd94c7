"""Plain transformer for 64x64 emoji in one stage, to train for hours on two CPU cores.

The model has 9,132,224 parameters and takes 1.6 GFLOP per training image, about the same as
configs/emoji32.py at 32x32. The objective and the noise levels are from JiT (Li & He 2025, arXiv
2511.13720). Before training, prepare data/emoji as configs/emoji32.py describes.

python -m imagen_jax.train --config=configs/emoji64_transformer.py \
    --workdir=runs/emoji64_transformer
"""

from ml_collections import ConfigDict

from configs import base32_8m, emoji32


def get_config() -> ConfigDict:
    c = emoji32.with_emoji(base32_8m.get_config())
    c.steps = 4_000
    c.optimizer.schedule = "cosine"
    c.unet = ConfigDict(
        {
            "kind": "transformer",
            "image_size": 64,
            "patch": 8,
            "embed_dim": 192,
            "depth": 7,
            "bottleneck": 64,
            "head_dim": 64,
            "dtype": "float32",
        }
    )
    # As in JiT, the network predicts the image, and the loss is the error of the flow that follows
    # from this image. As sigma is lognormal, the times t = sigma / (1 + sigma) are logit-normal.
    c.diffusion.update(predicts="x0", p_mean=0.8, p_std=0.8, weight="flow")
    c.sampler.update(steps=24, sigma_max=80.0)
    return c
