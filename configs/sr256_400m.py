"""Imagen's 64 to 256 super-resolution model: a UNet with 408,350,468 parameters, as in NeMo.

python -m imagen_jax.train --config=configs/sr256_400m.py --workdir=runs/sr256_400m

NVIDIA NeMo trains this model (as sr256-400m) on 128 GPUs with global batch size 2048 for 1.25
million steps (2.56 billion samples). NeMo's documentation states 429 million parameters and 1.23
billion samples; docs/lab/nemo.md lists both.
"""

from ml_collections import ConfigDict

from configs import base64_500m


def get_config() -> ConfigDict:
    c = base64_500m.get_config()
    c.batch_size = 2048
    c.unet.update(
        image_size=256,
        embed_dim=128,
        channel_mult=(1, 2, 4, 6, 6),
        attention_resolutions=(32, 16),
        low_res=True,
        noise_aug=True,
    )
    with c.unet.ignore_type():  # The base model has an int here, this model a tuple.
        c.unet.num_res_blocks = (2, 2, 3, 4, 3)
    c.super_resolution.factor = 4
    c.sampler.update(steps=20, guidance=8.0)
    c.data.update(path="data/laion256", min_size=256)
    return c
