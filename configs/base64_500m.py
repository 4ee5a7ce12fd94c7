"""Imagen's 64x64 base model with 524,897,540 parameters, trained with EDM as in NVIDIA NeMo.

python -m imagen_jax.train --config=configs/base64_500m.py --workdir=runs/base64_500m

NeMo trains this model on 32 GPUs with global batch size 4096 for 1.25 million steps (5.12 billion
samples). T5-11b (width 1024, 128 tokens) encodes the texts before training, and the embeddings are
stored with the images: see docs/data.md. Training does not need the text encoder. Sampling and
evaluation read its weights from --text_weights=FOLDER.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.system = "imagen_jax"
    c.seed = 1234
    c.steps = 1_250_000
    c.batch_size = 4096

    # All other fields have the defaults in diffusion_jax/config/settings.py, imagen_jax/settings.py
    # and imagen_jax/unet.py. Flags and variants of this config can change them too.
    c.unet = dict(
        image_size=64,
        embed_dim=256,
        channel_mult=(1, 2, 3, 4),
        num_res_blocks=3,
        attention_resolutions=(8, 16, 32),
        attention="fused",
        head_dim=64,
        cond_dim=512,
        dtype="bfloat16",
    )
    c.text = dict(encoder="t5", width=1024, max_tokens=128, drop_prob=0.1)

    c.diffusion = dict(predicts="edm", noise="lognormal", p_mean=-1.2, p_std=1.2)
    c.super_resolution = dict(factor=1)
    c.sampler = dict(name="heun", steps=30, guidance=7.5, threshold="dynamic")

    c.optimizer = dict(lr=1e-4, schedule="constant", warmup=10_000, weight_decay=0.01)
    c.mesh = dict(fsdp=-1)  # All devices.
    c.data = dict(source="webdataset", path="data/laion64", text="npy")  # "txt" reads captions.
    c.evaluation = dict(every=0)  # Training images between evaluations; 0: never.

    c.sample_every, c.keep_every = 10_000, 100_000
    # Prompts would need the text encoder. Without prompts, samples use the first pictures' texts.
    return c
