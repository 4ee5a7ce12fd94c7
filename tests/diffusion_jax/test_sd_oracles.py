"""Stable Diffusion's samplers: numbers of LDM, MLPerf, NeMo and diffusers, reproduced.

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
    """[..., C, H, W] to [..., H, W, C]."""
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
    """As LDM starts and ends: from N(0, 1) at the first time, to alpha * x at the last."""
    sigmas = noise.sigma_at(TABLE, jnp.asarray(times, jnp.float32))
    x = images(CASES["xT"]) * jnp.sqrt(1 + sigmas[0] ** 2)
    sample = jax.jit(lambda x: sampler(denoiser(predicts, scale), x, sigmas, draws))
    return samplers.in_own_coordinates(sample(x), sigmas[-1])


def close(actual, name):
    expected = images(CASES[name])
    # Measured: 2.6e-6 of the largest value after 500 steps, 1.2e-6 after up to 50.
    np.testing.assert_allclose(actual, expected, atol=5e-6 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("name", [name for name in INFO if "_ddim_" in name])
def test_ddim(name):
    predicts, scale, eta, times = INFO[name]
    draws = (lambda i: images(CASES["eta1_noise"])[i]) if eta else lambda i: 0.0
    sampler = functools.partial(onestep.ddim, eta=eta)
    close(run(predicts, scale, [*times, 0], sampler, draws), name)


@pytest.mark.parametrize("name", [name for name in INFO if "_plms_" in name])
def test_plms(name):
    """Of v models a reference that takes eps from v; LDM's own code takes v for eps."""
    predicts, scale, _, times = INFO[name]
    assert times[1] == times[2]  # The first step is taken twice.
    close(run(predicts, scale, [times[0], *times[2:], 0], multistep.plms), name)


@pytest.mark.parametrize("name", [name for name in INFO if "_dpm_" in name])
def test_dpmpp_2m_at_times_between_steps(name):
    predicts, scale, _, times = INFO[name]
    sampler = functools.partial(multistep.dpmpp_2m, steps=len(times))
    ours = grids.even_times(len(times))
    np.testing.assert_allclose(ours[:-1], times, rtol=1e-6)
    close(run(predicts, scale, ours, sampler), name)


def test_diffusers_pndm_is_plms_and_its_ddim_ours():
    times = grids.leading_times(50)
    close(run("eps", 2.5, times, multistep.plms), "diffusers_pndm_eps_50_cfg")
    close(run("eps", 2.5, times, onestep.ddim), "diffusers_ddim_eps_50_cfg")
    close(run("v", 2.5, times, onestep.ddim), "diffusers_ddim_v_50_cfg")


def test_the_table_is_the_references():
    abar = np.exp(2 * np.float64(TABLE))
    # abar ends at 0.0047: float32 has its logarithm, -5.4, within 2.4e-7.
    np.testing.assert_allclose(abar, CASES["alphas_cumprod"], rtol=3e-7)
