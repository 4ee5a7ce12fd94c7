"""Stable Diffusion 1.x, trained from scratch at 256x256 to predict eps (859,520,964 parameters).

python -m sd_jax.train --config=configs/sd1_256_pretrain.py --workdir=runs/sd1_256 \
    --config.vae.weights=weights/sd-v1-5 --config.text.weights=weights/clip-vit-large-patch14

NVIDIA NeMo trains this model on 64 GPUs with global batch size 8192 for 82,500 steps (675.8 million
samples). The VAE and the text encoder CLIP ViT-L/14 are frozen. docs/data.md explains how to train
on stored moments and text embeddings.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.system = "sd_jax"
    c.seed = 666
    c.steps = 82_500
    c.batch_size = 8192

    # All other fields have the defaults in diffusion_jax/config/settings.py, sd_jax/settings.py,
    # sd_jax/unet.py and sd_jax/vae.py. Flags and variants of this config can change them too.
    c.unet = dict(
        weights="",  # Initial weights: a workdir or a checkpoint; "" for random weights.
        width=320,
        channel_mult=(1, 2, 4, 4),
        num_res_blocks=2,
        attention_levels=(0, 1, 2),
        num_heads=8,
        linear_projections=False,
        dtype="bfloat16",
    )
    c.vae = dict(weights="weights/sd-v1-5", dtype="bfloat16")  # A folder, a workdir or a file.
    c.text = dict(
        encoder="clip",
        weights="weights/clip-vit-large-patch14",  # A folder or a Hugging Face name.
        width=768,
        max_tokens=77,
        drop_prob=0.0,
    )
    c.conditioning = dict(drop_to="empty")  # Dropped texts become ""; NeMo uses "zeros".

    c.latents = dict(image_size=256, scale=0.18215)
    c.diffusion = dict(predicts="eps")
    c.sampler = dict(name="plms", steps=50, guidance=7.5)

    c.optimizer = dict(lr=8.192e-5, schedule="constant", warmup=10_000, weight_decay=0.0)
    c.mesh = dict(fsdp=-1)  # All devices.
    c.data = dict(source="webdataset", path="data/laion")
    c.evaluation = dict(every=0)  # Training images between evaluations; 0: never.

    c.keep_every = 10_000
    c.prompts = (
        "A photo of a Shiba Inu dog with a backpack riding a bike",
        "A red cube on top of a blue sphere.",
        "An oil painting of a lighthouse in a storm.",
        "Two cats asleep on a piano.",
    )
    return c
