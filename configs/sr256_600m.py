"""Imagen's 64 to 256 super-resolution model: an EfficientUNet with 646,023,428 parameters.

python -m imagen_jax.train --config=configs/sr256_600m.py --workdir=runs/sr256_600m

NVIDIA NeMo trains this model (as sr256-600m) on 64 GPUs with global batch size 4096 for 1.25
million steps (5.12 billion samples). NeMo's documentation states 1.23 billion samples (300,000
steps).
"""

from ml_collections import ConfigDict

from configs import sr256_400m


def get_config() -> ConfigDict:
    c = sr256_400m.get_config()
    c.batch_size = 4096
    c.unet = ConfigDict(
        dict(
            kind="efficient",
            image_size=256,
            embed_dim=128,
            channel_mult=(1, 2, 4, 8, 8),
            num_res_blocks=(2, 4, 8, 8, 8),
            attention_levels=(3, 4),
            attention="fused",
            noise_aug=True,
            dtype="bfloat16",
        )
    )
    return c
