"""Compare every shipped config with its source: NeMo's launcher, MLPerf's files and rules."""

import functools
import importlib
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import sd2_mlperf, sd64_11m, sd64_vae, sd_quickstart, sd_quickstart_vae
from diffusion_jax.config.settings import Optimizer
from diffusion_jax.train import loop, optimizer
from sd_jax import train_vae
from sd_jax.settings import Diffusion, read_settings
from sd_jax.weights import names

ROOT = pathlib.Path(__file__).parents[2]
V1, V2, VAE = 859_520_964, 865_910_724, 83_653_863
# parameters, pixels, steps, warm-up, text dropout, minimal side, millions of samples, weights
NEMO = {
    "sd1_256_pretrain": (V1, 256, 82_500, 10_000, 0.0, 0, 675.8, ""),
    "sd1_512_v1_1": (V1, 512, 50_000, 10_000, 0.0, 1024, 409.6, "runs/sd1_256"),
    "sd1_512_v1_2": (V1, 512, 150_000, 0, 0.1, 512, 1228.8, "runs/sd1_1"),
    "sd1_512_v1_5": (V1, 512, 165_000, 0, 0.1, 512, 1351.7, "runs/sd1_2"),
    "sd2_256_pretrain": (V2, 256, 140_000, 10_000, 0.0, 0, 1146.9, ""),
    "sd2_512_base": (V2, 512, 220_000, 0, 0.1, 512, 1802.2, "runs/sd2_256"),
}
OWN = [(sd_quickstart, sd_quickstart_vae), (sd64_11m, sd64_vae)]


def shipped(name):
    """Return (module, settings) of a file in configs/."""
    module = importlib.import_module(f"configs.{name}")
    return module, read_settings(module.get_config().to_dict())


@functools.cache
def count(abstract, *network):
    """Count parameters from shapes only, without computing them."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract(*network)))


def test_every_stable_diffusion_config_has_a_test_in_this_file():
    config_names = {path.stem for path in (ROOT / "configs").glob("sd*.py")}
    own = {module.__name__.split(".")[1] for pair in OWN for module in pair}
    assert config_names == {*NEMO, "sd2_mlperf", "sd2_mlperf_miniature", *own}


@pytest.mark.parametrize("name", NEMO)
def test_nemo_configs_match_the_nemo_launcher(name):
    module, s = shipped(name)
    parameters, pixels, steps, warmup, drop, least, samples, start = NEMO[name]
    assert count(names.abstract_unet, s.unet, s.text.width) == parameters
    assert count(names.abstract_vae, s.vae) == VAE
    assert f"{parameters:,}" in module.__doc__
    assert (s.latents.image_size, s.run.steps, s.data.min_size) == (pixels, steps, least)
    assert (s.run.seed, s.run.batch_size, s.unet_weights) == (666, 8192, start)
    assert round(s.run.batch_size * s.run.steps / 1e6, 1) == samples
    assert s.optimizer._replace(warmup=0) == Optimizer(
        lr=8.192e-5, schedule="constant", warmup=0, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, ema_decays=(0.9999,)
    )
    assert s.optimizer.warmup == warmup and s.text.drop_prob == drop
    assert (s.latents.scale, s.latents.pixels) == (0.18215, "symmetric")
    assert s.diffusion == Diffusion("eps", noise="scaled_linear")
    assert (s.sampler.name, s.sampler.steps, s.sampler.guidance) == ("plms", 50, 7.5)
    two = name.startswith("sd2")
    assert s.text.encoder == ("clip_penultimate" if two else "clip")
    assert (s.text.width, s.text.max_tokens) == (1024 if two else 768, 77)
    assert (s.unet.num_heads, s.unet.norm_groups) == (0 if two else 8, 32)
    assert s.unet.linear_projections == two and s.unet.head_dim == 64
    assert (s.unet.dtype, s.vae.dtype, s.run.save_every) == (jnp.bfloat16, jnp.bfloat16, 1000)


# MLPerf's five files, and two batch sizes with reference convergence points.
@pytest.mark.parametrize(
    ("batch", "lr", "every"),
    [
        (64, 8.0e-6, 8000),
        (512, 6.4e-5, 1000),
        (1024, 1.28e-4, 500),
        (2048, 2.56e-4, 250),
        (256, 3.2e-5, 2000),
        (384, 4.8e-5, 1334),
    ],
)
def test_the_mlperf_config_matches_mlperfs_files(batch, lr, every):
    s = read_settings(sd2_mlperf.get_config(str(batch)).to_dict())
    assert count(names.abstract_unet, s.unet, s.text.width) == V2
    assert f"{V2:,}" in sd2_mlperf.__doc__
    assert s.run.batch_size == batch and math.isclose(s.optimizer.lr, lr)
    assert s.optimizer._replace(lr=0.0) == Optimizer(
        lr=0.0,
        schedule="ldm",
        warmup=1000,
        b1=0.9,
        b2=0.999,
        eps=1e-8,
        weight_decay=0.01,
        clip=float("inf"),
        ema_decays=(),
    )
    # Every 512,000 images, rounded up to a whole step.
    assert s.evaluation.every == every * batch
    due = loop.Scoring(s.evaluation.every, lambda draw, params: {})
    assert [step for step in range(1, 2 * every + 2) if due.is_due(step, batch)] == [every, 2 * every]
    assert (s.run.save_every, s.run.keep_every) == (every, every)
    assert (s.unet.norm_groups, s.diffusion.predicts) == (16, "v")
    assert (s.latents.image_size, s.latents.pixels) == (512, "unit")
    assert (s.text.drop_prob, s.data.source, s.unet_weights) == (0.0, "moments", "")
    assert (s.sampler.name, s.sampler.steps, s.sampler.eta, s.sampler.guidance) == ("ddim", 50, 0.0, 8.0)
    assert (s.evaluation.guidance, s.evaluation.num_prompts) == ((8.0,), 30_000)


def test_the_default_batch_size_is_the_smallest_of_mlperf():
    assert sd2_mlperf.get_config().batch_size == 512


def test_ldm_warmup_matches_its_formula():
    rate = optimizer.warmup_ldm(6.4e-5, 1000)
    steps = np.array([0, 1, 500, 999, 1000, 5000])
    factor = np.where(steps < 1000, (1 - 1e-6) / 1000 * steps + 1e-6, 1.0)
    np.testing.assert_allclose([rate(n) for n in steps], 6.4e-5 * factor, rtol=1e-6)
    assert rate(0) > 0 and optimizer.warmup_ldm(1.0, 0)(0) == 1


@pytest.mark.parametrize(("unet", "vae"), OWN)
def test_the_configs_of_a_unet_and_its_autoencoder_agree(unet, vae):
    s = read_settings(unet.get_config().to_dict())
    own = train_vae.read_settings(vae.get_config().to_dict())
    for parameters in (count(names.abstract_unet, s.unet, s.text.width), count(names.abstract_vae, s.vae)):
        assert f"{parameters:,}" in unet.__doc__ + vae.__doc__
    assert own.vae == s.vae and own.vae_weights == ""
    assert own.reconstruction.image_size == s.latents.image_size
    assert own.data == s.data
