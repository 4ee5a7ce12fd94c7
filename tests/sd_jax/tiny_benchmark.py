"""A tiny version of the benchmark: its config and all files that a run reads."""

import pathlib

import numpy as np

from configs import sd2_mlperf
from diffusion_jax.data import tars
from diffusion_jax.data.sources import moments
from diffusion_jax.metrics import stats_files
from diffusion_jax.metrics.features import Gaussian
from sd_jax.mlperf import coco
from tests.sd_jax import tiny

BATCH, INTERVAL, CAPTIONS = 8, 2, 10


def get_config(folder):
    """Return MLPerf's config with small networks, data and numbers."""
    c, small = sd2_mlperf.get_config(), tiny.config(f"{folder}/vae.safetensors")
    for group in ("unet", "vae", "text", "latents"):
        c[group] = small[group]
    c.unet.update(norm_groups=16, attention_levels=())
    c.latents.pixels, c.text.drop_prob = "unit", 0.0
    c.optimizer.update(lr=0.05, warmup=1)
    c.sampler.steps = 2
    c.data.update(path=f"{folder}/moments", threads=0)
    c.evaluation.update(
        every=BATCH * INTERVAL,
        num_prompts=CAPTIONS,
        prompts=f"{folder}/captions.tsv",
        reference=f"{folder}/reference.npz",
        inception="toy",
        clip="toy",
    )
    c.update(batch_size=BATCH, steps=2 * INTERVAL, log_every=1, prompts=("a",))
    return c


def write(folder: pathlib.Path, mean=108.0):
    """Write data, captions, the VAE, and statistics of grey images."""
    tiny.write_vae(folder / "vae.safetensors")
    write_moments(folder / "moments", (4, 4, 8))
    rows = [coco.Caption(i, i, "a" * (i + 1)) for i in range(CAPTIONS)]
    (folder / "captions.tsv").write_text(coco.to_tsv(rows))
    write_reference(folder, Gaussian(np.full(3, mean), 6 * np.eye(3), 30_000))
    return folder


def write_moments(folder: pathlib.Path, shape):
    """Write a tar of random moments [h, w, 2 Z] with captions."""
    rng = np.random.default_rng(0)
    draw = lambda: moments.write(rng.normal(size=shape).astype(np.float32))
    records = [{tars.KEY: f"{i:09}".encode(), "txt": f"caption {i}".encode(), "npy": draw()} for i in range(24)]
    folder.mkdir()
    tars.write(folder / "00000.tar", records)


def write_reference(folder: pathlib.Path, gaussian):
    """Write statistics of the toy Inception, whose features are the mean colour, 0 to 255."""
    stats_files.write(folder / "reference.npz", stats_files.Stats(gaussian, None, None))
