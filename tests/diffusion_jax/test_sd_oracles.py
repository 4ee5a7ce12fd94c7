"""Stable Diffusion's samplers against saved numbers of LDM, MLPerf, NeMo and diffusers.

`sd_samplers.npz` holds whole trajectories' ends, recorded with the closed-form network `toy` in
place of a UNet, as a predictor of eps and of v. Everything here goes through D(x, sigma).
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.diffusion import grids, multistep, noise, onestep, precond, samplers
from tests.diffusion_jax.toy import classifier_free

CASES = dict(np.load(pathlib.Path(__file__).parents[1] / "fixtures" / "sd_samplers.npz"))
INFO = json.loads(CASES["info"].item())
TABLE = noise.ldm_log_alphas()
PRECONDS = {"eps": precond.epsilon, "v": precond.velocity}


def images(z):
    """Transpose [..., C, H, W] to [..., H, W, C]."""
    return jnp.moveaxis(jnp.asarray(z), -3, -1)


def toy(x, t, text):
    f = 0.8 * jnp.sin(x) + 0.3 * x * jnp.cos(3 * t / 1000)[:, None, None, None]
    return f + text[:, None, None, None]


def denoiser(predicts, scale):
    text, null = (jnp.asarray(CASES[name]).mean((1, 2)) for name in ("c", "uc"))
    scalings = PRECONDS[predicts](noise.time_of(TABLE))
    if scale == 1:
        return precond.denoiser(lambda x, t: toy(x, t, text), scalings)
    both = jnp.stack([text, null], axis=1).reshape(-1)
    return classifier_free(precond.denoiser(lambda x, t: toy(x, t, both), scalings), scale)


def run(predicts, scale, times, sampler, draws=lambda i: 0.0):
    """Sample like LDM: start with N(0, 1) at the first time, and return alpha * x at the last."""
    sigmas = noise.sigma_at(TABLE, jnp.asarray(times, jnp.float32))
    x = images(CASES["xT"]) * jnp.sqrt(1 + sigmas[0] ** 2)
    sample = jax.jit(lambda x: sampler(denoiser(predicts, scale), x, sigmas, draws))
    return samplers.to_variance_preserving(sample(x), sigmas[-1])


def close(actual, name):
    expected = images(CASES[name])
    # The error is 2.6e-6 of the largest value after 500 steps, and 1.2e-6 after up to 50.
    np.testing.assert_allclose(actual, expected, atol=5e-6 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("name", [name for name in INFO if "_ddim_" in name])
def test_ddim_matches_the_references(name):
    predicts, scale, eta, times = INFO[name]
    draws = (lambda i: images(CASES["eta1_noise"])[i]) if eta else lambda i: 0.0
    sampler = functools.partial(onestep.ddim, eta=eta)
    close(run(predicts, scale, [*times, 0], sampler, draws), name)


@pytest.mark.parametrize("name", [name for name in INFO if "_plms_" in name])
def test_plms_matches_the_references(name):
    """For v models, the reference computes eps from v; LDM's code uses v as eps."""
    predicts, scale, _, times = INFO[name]
    assert times[1] == times[2]  # PLMS repeats its first step.
    close(run(predicts, scale, [times[0], *times[2:], 0], multistep.plms), name)


@pytest.mark.parametrize("name", [name for name in INFO if "_dpm_" in name])
def test_dpmpp_2m_at_fractional_times_matches_the_references(name):
    predicts, scale, _, times = INFO[name]
    sampler = functools.partial(multistep.dpmpp_2m, steps=len(times))
    ours = grids.even_times(len(times))
    np.testing.assert_allclose(ours[:-1], times, rtol=1e-6)
    close(run(predicts, scale, ours, sampler), name)


def test_plms_and_ddim_match_diffusers_pndm_and_ddim():
    times = grids.leading_times(50)
    close(run("eps", 2.5, times, multistep.plms), "diffusers_pndm_eps_50_cfg")
    close(run("eps", 2.5, times, onestep.ddim), "diffusers_ddim_eps_50_cfg")
    close(run("v", 2.5, times, onestep.ddim), "diffusers_ddim_v_50_cfg")


def test_the_noise_table_matches_the_references():
    abar = np.exp(2 * np.float64(TABLE))
    # abar ends at 0.0047, whose logarithm, -5.4, float32 holds within 2.4e-7.
    np.testing.assert_allclose(abar, CASES["alphas_cumprod"], rtol=3e-7)
