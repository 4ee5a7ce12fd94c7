"""Quick start of latent diffusion: handwritten digits in named colours at 16x16, with a tiny VAE.

The UNet has 3,920,912 parameters, and trains in minutes on a laptop's CPU. At guidance scale 2,
about 98 % of pictures match their prompt if the prompt was in the training data, and 85 % if it was
not. The first command trains the VAE.

python -m sd_jax.train_vae --config=configs/sd_quickstart_vae.py --workdir=runs/sd_vae
python -m sd_jax.train --config=configs/sd_quickstart.py --workdir=runs/sd_quickstart
"""

from ml_collections import ConfigDict

from configs import sd1_256_pretrain


def get_config() -> ConfigDict:
    c = sd1_256_pretrain.get_config()
    c.seed = 0
    c.steps = 1_500
    c.batch_size = 64

    c.unet.update(
        width=128,
        channel_mult=(1,),
        num_res_blocks=1,
        attention_levels=(0,),
        num_heads=4,
        in_channels=16,
        out_channels=16,
        dtype="float32",
    )
    c.vae.update(
        weights="runs/sd_vae", width=32, channel_mult=(1, 2, 2), num_res_blocks=1, latent_channels=16, dtype="float32"
    )
    c.text.update(encoder="hashed", weights="", width=64, max_tokens=6, drop_prob=0.1)
    c.latents.update(image_size=16, scale=1.0)
    c.diffusion.update(predicts="v")
    c.sampler.update(name="ddim", eta=1.0, steps=20, guidance=2.0)
    c.optimizer.update(
        lr=2e-3, schedule="cosine", warmup=100, b2=0.99, weight_decay=0.01, ema_decays=(0.999,), ema_warmup=True
    )
    c.data.update(source="diffusion_jax.examples.digits", path="", threads=1)

    c.evaluation.guidance = (2.0,)
    c.log_every, c.sample_every = 50, 750
    c.save_every, c.keep_last, c.keep_every = 750, 2, 0
    c.prompts = (
        "a red seven on gray paper",
        "a blue three on white paper",
        "a yellow zero on black paper",
        "a white five on orange paper",
        "a purple nine on cyan paper",
        "a green two on white paper",
        "a yellow eight on gray paper",
        "a white four on black paper",
    )
    return c
