"""Samplers against k-diffusion and diffusers, step for step.

`authors_samplers.npz` was written by k-diffusion 0.1.1 and diffusers 0.42 with closed-form networks
in place of a UNet. It holds the initial noise, the results, and the noise of each step.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.diffusion import multistep, noise, onestep, precond, samplers, stochastic

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures"
SAVED = {k: jnp.asarray(v) for k, v in np.load(FIXTURES / "authors_samplers.npz").items()}
X = SAVED["x"]
EPS = precond.epsilon(noise.time_of(noise.ldm_log_alphas()))


def denoise(x, sigma):
    s = sigma[:, None, None, None]
    return (0.25 * x + s**2 * jnp.sin(x / jnp.sqrt(1 + s**2))) / (0.25 + s**2)


def unet(z, t):
    return 0.8 * jnp.sin(z) + 0.3 * z * jnp.cos(3 * t / 1000)[:, None, None, None]


def close(actual, expected):
    """Compare float32 with float64, up to the rounding errors of some hundred operations."""
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(actual / scale, expected / scale, atol=2e-5)


@pytest.mark.parametrize("steps", [5, 12])
@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("name", ["dpmpp_2m_sde", "dpmpp_3m_sde"])
def test_sde_solvers_match_k_diffusion(name, strength, steps, monkeypatch):
    """The increments of the Brownian path are the draws that k-diffusion used."""
    sigmas, increments = SAVED[f"sigmas/{steps}"], SAVED[f"increments/{steps}"]
    lengths = jnp.sqrt(jnp.log2(sigmas[:-2] / sigmas[1:-1]))[:, None, None, None, None]
    path = jnp.cumsum(-increments[:-1] * lengths, 0)
    path = jnp.concatenate([jnp.zeros_like(path[:1]), path])  # The path W at each level above 0.
    place = lambda sigma: jnp.argmin(jnp.abs(sigmas[:-1] - sigma))
    monkeypatch.setattr(stochastic, "brownian", lambda noise: lambda sigma: path[place(sigma)])
    sampler = getattr(stochastic, name)
    run = jax.jit(lambda x: sampler(denoise, x, sigmas, lambda i: X, strength=strength))
    close(run(X * sigmas[0]), SAVED[f"{name}/{strength}/{steps}"])


@pytest.mark.parametrize("steps", [5, 12])
def test_euler_ancestral_matches_k_diffusion(steps):
    sigmas, draws = SAVED[f"sigmas/{steps}"], SAVED[f"increments/{steps}"]
    run = jax.jit(lambda x: onestep.euler_ancestral(denoise, x, sigmas, draws.__getitem__))
    close(run(X * sigmas[0]), SAVED[f"euler_ancestral/1.0/{steps}"])


@pytest.mark.parametrize("steps", [6, 20])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_deis_matches_diffusers(order, steps):
    sigmas, times = SAVED[f"deis_sigmas/{steps}"], SAVED[f"deis_times/{steps}"]
    time_of = lambda sigma: times[jnp.argmin(jnp.abs(sigmas[:-1] - sigma[0]))][None].repeat(len(sigma))
    d = precond.denoiser(unet, precond.epsilon(time_of))
    start = X * jnp.sqrt(1 + sigmas[0] ** 2)
    run = jax.jit(lambda x: multistep.deis(d, x, sigmas, lambda i: X, order=order, steps=steps))
    close(samplers.to_variance_preserving(run(start), sigmas[-1]), SAVED[f"deis/{order}/{steps}"])


def test_euler_with_flow_prediction_matches_diffusers():
    t = SAVED["flow_times"]
    sigmas = t / jnp.maximum(1 - t, 2.0**-20)
    d = precond.denoiser(lambda z, time: jnp.tanh(z) + 0.1, precond.flow(precond.log_snr))
    x = onestep.euler(d, X * (1 + sigmas[0]), sigmas, lambda i: X)
    close(x, SAVED["flow"])
