"""Stable Diffusion 2.0, trained from scratch at 256x256 to predict eps (865,910,724 parameters).

python -m sd_jax.train --config=configs/sd2_256_pretrain.py --workdir=runs/sd2_256 \
    --config.vae.weights=weights/sd-v2-base --config.text.weights=weights/open-clip-vit-h-14

NVIDIA NeMo trains this model on 64 GPUs with global batch size 8192 for 140,000 steps (1.147
billion samples). The UNet attends to the second-to-last layer of OpenCLIP's text encoder ViT-H/14.
"""

from ml_collections import ConfigDict

from configs import sd1_256_pretrain


def get_config() -> ConfigDict:
    c = sd1_256_pretrain.get_config()
    c.steps = 140_000

    c.unet.update(num_heads=0, head_dim=64, linear_projections=True)
    c.vae.weights = "weights/sd-v2-base"
    c.text.update(encoder="clip_penultimate", weights="weights/open-clip-vit-h-14", width=1024)
    return c
