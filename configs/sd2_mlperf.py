"""Stable Diffusion v2 of the MLPerf benchmark at 512x512, which predicts v.

python -m sd_jax.mlperf --config=configs/sd2_mlperf.py:1024 --workdir=runs/mlperf/0

The number after the colon is the global batch size. MLPerf uses 512 (the default), 1024 and 2048.
The model has 865,910,724 parameters. As in MLPerf, training reads the published moments, which
the VAE computed from pixels in [0, 1]. It drops no texts, and uses neither EMA nor gradient
clipping. The run ends when the FID is at most 90 and the CLIP score is at least 0.15. At batch size
512, this takes 2.6 million images on average.
"""

from ml_collections import ConfigDict

from configs import sd2_512_base


def get_config(batch: str = "512") -> ConfigDict:
    c = sd2_512_base.get_config()
    c.batch_size = int(batch)
    c.steps = 20 * 512_000 // c.batch_size
    between = -(-512_000 // c.batch_size)  # Steps between checkpoints.

    c.unet.update(weights="", norm_groups=16)
    c.vae.weights = "weights/512-base-ema.ckpt"
    c.text.drop_prob = 0.0
    c.latents.pixels = "unit"
    c.diffusion.predicts = "v"
    c.sampler.update(name="ddim", steps=50, guidance=8.0)
    c.optimizer.update(
        lr=1.25e-7 * c.batch_size, schedule="ldm", warmup=1_000, weight_decay=0.01, clip=float("inf"), ema_decays=()
    )
    c.data.update(source="moments", path="data/laion-400m/moments", min_size=0)

    c.evaluation.update(
        every=between * c.batch_size,
        guidance=(8.0,),
        prompts="data/coco/val2014_30k.tsv",
        num_prompts=30_000,
        reference="data/coco/val2014_30k_stats.npz",
        inception="weights/pt_inception-2015-12-05-6726825d.pth",
        inception_mode="pytorch",
        clip="weights/open-clip-vit-h-14",
    )
    c.sample_every, c.save_every, c.keep_every = between, between, between
    return c
