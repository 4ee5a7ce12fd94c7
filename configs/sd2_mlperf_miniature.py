"""The MLPerf benchmark in miniature, for a laptop: coloured digits at 16x16.

The UNet has 3,920,912 parameters. The pictures and captions are the quick start's, and the networks
that score have random weights, so FID and CLIP score have no meaning outside this run.
docs/mlperf.md lists the commands that prepare the data.

python -m sd_jax.mlperf --config=configs/sd2_mlperf_miniature.py --workdir=runs/miniature
"""

from ml_collections import ConfigDict

from configs import sd2_mlperf, sd_quickstart


def get_config() -> ConfigDict:
    c, small = sd2_mlperf.get_config("64"), sd_quickstart.get_config()
    between = 100  # Steps between evaluations.
    c.steps = 10 * between

    for group in ("unet", "vae", "text", "latents"):
        c[group] = small[group]
    c.unet.norm_groups = 16
    c.sampler.guidance = 2.0
    c.optimizer.update(lr=4e-4, warmup=100)
    c.data.update(path="miniature/moments", threads=1)

    c.evaluation.update(
        every=between * c.batch_size,
        guidance=(2.0,),
        prompts="miniature/captions.tsv",
        num_prompts=290,
        reference="miniature/reference.npz",
        inception="miniature/inception.safetensors",
        clip="miniature/clip",
    )
    c.log_every, c.sample_every, c.save_every, c.keep_every = 50, between, between, between
    c.prompts = small.prompts
    return c
