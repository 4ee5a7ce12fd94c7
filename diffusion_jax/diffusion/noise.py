"""Noise levels: how training draws them, and the grids of levels that samplers step down.

A schedule maps t in [0, 1] to log-SNR; sigma = exp(-log_snr / 2) is the noise level in
x = x0 + sigma * eps. A table has one log alpha a step of discrete diffusion, whose times t in
[0, N - 1] may lie between steps. All of it in float32.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from diffusion_jax.diffusion import precond
from diffusion_jax.diffusion.precond import Sigma

Scalar = int | float | Float[Array, ""]
Sigmas = Float[Array, "levels"]
Time = Float[Array, "N"]
LogSNR = Callable[[Time], Float[Array, "N"]]
LogAlphas = Float[Array, "steps"]
DrawSigma = Callable[[PRNGKeyArray, int], Sigma]


class Noise(NamedTuple):
    """The noise levels of a model: in training, as the network is told of them, in sampling."""

    draw: DrawSigma
    """(key, batch size) to the levels that a training step puts on its images."""
    time: Callable[[Sigma], Sigma]
    """c_noise of a network that predicts eps, x0 or v; that of EDM's is ln sigma / 4."""
    grid: Callable[[Any, bool, bool], Sigmas]
    """(a config's `sampler`, leading, to_zero) to the levels of its steps + 1, falling.

    The two last are `samplers.Method`'s: leading times of a table, the level 0 after a schedule.
    """


def edm_noise(mean: float, std: float) -> Noise:
    """Lognormal in training, Karras' levels from sampler.sigma_max to sigma_min in sampling."""

    def grid(s, leading, to_zero):
        del leading, to_zero  # No times, and always to 0.
        return karras_sigmas(s.steps, s.sigma_min, s.sigma_max, s.rho)

    return Noise(lognormal(mean, std), precond.log_snr, grid)


def continuous_noise(log_snr: LogSNR) -> Noise:
    """DDPM in continuous time: uniform times in training, even ones in sampling."""

    def grid(s, leading, to_zero):
        del leading  # Tables alone have times to lead with.
        sigmas = log_snr_sigmas(log_snr, s.steps)
        return ending_at_zero(sigmas) if to_zero else sigmas

    return Noise(uniform_time(log_snr), precond.log_snr, grid)


def discrete_noise(log_alphas: LogAlphas) -> Noise:
    """DDPM over a table's steps, as LDM has it: samples end at the level of time 0, not at 0."""

    def grid(s, leading, to_zero):
        del to_zero
        times = (leading_times if leading else even_times)(s.steps, len(log_alphas))
        return sigma_at(log_alphas, jnp.asarray(times))

    return Noise(uniform_steps(log_alphas), time_of(log_alphas), grid)


# By diffusion.noise of a config, whose `diffusion` group they are made of. A model of Stable
# Diffusion has no such field: it is of LDM's thousand steps, "scaled_linear".
NOISES: Mapping[str, Callable[[Any], Noise]] = {
    "lognormal": lambda d: edm_noise(d.p_mean, d.p_std),
    "cosine": lambda d: continuous_noise(cosine_log_snr),
    "linear": lambda d: continuous_noise(linear_log_snr),
    "scaled_linear": lambda d: discrete_noise(scaled_linear()),
}


def lognormal(mean: float, std: float) -> DrawSigma:
    """ln sigma ~ N(mean, std^2) (EDM, Table 1: P_mean = -1.2, P_std = 1.2)."""

    def draw(key, batch):
        return jnp.exp(mean + std * jax.random.normal(key, (batch,)))

    return draw


def uniform_time(log_snr: LogSNR) -> DrawSigma:
    """Draws t ~ U[0, 1) and takes the schedule's sigma there (continuous DDPM)."""

    def draw(key, batch):
        return sigma_of(log_snr(jax.random.uniform(key, (batch,))))

    return draw


def uniform_steps(log_alphas: LogAlphas) -> DrawSigma:
    """Draws one of the table's steps, each as likely (DDPM), and takes its sigma."""

    def draw(key, batch):
        t = jax.random.randint(key, (batch,), 0, len(log_alphas))
        return jnp.sqrt(jnp.expm1(-2 * log_alphas))[t]

    return draw


def cosine_log_snr(t: Time) -> Float[Array, "N"]:
    """Cosine schedule (Nichol & Dhariwal 2021) in continuous time: 8.77 at t = 0, -33.9 at 1.

    The angle reaches pi / 2 at t = 1, where float32's rounding of pi alone decides
    the value: there it says no more than that no signal is left.
    """
    angle = (t + 0.008) / 1.008 * jnp.pi / 2
    return -jnp.log(jnp.maximum(jnp.cos(angle) ** -2 - 1, 1e-5))


def linear_log_snr(t: Time) -> Float[Array, "N"]:
    """Limit of DDPM's linear betas in continuous time: 9.21 at t = 0, -10 at t = 1."""
    return -jnp.log(jnp.expm1(1e-4 + 10 * t**2))


def sigma_of(log_snr: Float[Array, "N"]) -> Float[Array, "N"]:
    """Inverse of `precond.log_snr`."""
    return jnp.exp(-log_snr / 2)


def scaled_linear(
    beta_first: float = 0.00085, beta_last: float = 0.012, steps: int = 1000
) -> Float[Array, "{steps}"]:
    """Stable Diffusion's table: ln alpha of betas whose roots are evenly spaced ("scaled linear").

    alpha^2 is the product of 1 - beta up to the step, computed in float64. Make the table once.
    """
    first, last = math.sqrt(beta_first), math.sqrt(beta_last)
    log_alphas, total = [], 0.0
    for i in range(steps):
        total += math.log1p(-((first + (last - first) * i / (steps - 1)) ** 2)) / 2
        log_alphas.append(total)
    return jnp.asarray(log_alphas, jnp.float32)


def sigma_at(log_alphas: LogAlphas, t: Time) -> Float[Array, "N"]:
    """The noise level at time t, with ln alpha linear between steps, as DPM-Solver has it."""
    log_alpha = jnp.interp(t, jnp.arange(len(log_alphas), dtype=jnp.float32), log_alphas)
    return jnp.sqrt(jnp.expm1(-2 * log_alpha))


def time_of(log_alphas: LogAlphas) -> Callable[[Sigma], Sigma]:
    """The inverse of `sigma_at`: a `time` for the preconditioners. Beyond the table its ends."""

    def time(sigma):
        # Both grow with time; of numbers that fall, jnp.interp would find nothing.
        minus_log_alpha = jnp.log1p(sigma**2) / 2
        steps = jnp.arange(len(log_alphas), dtype=jnp.float32)
        return jnp.interp(minus_log_alpha, -log_alphas, steps)

    return time


def karras_sigmas(
    n: int, sigma_min: Scalar = 0.002, sigma_max: Scalar = 80.0, rho: Scalar = 7.0
) -> Float[Array, "{n}+1"]:
    """Noise levels of EDM, equation 5, for n steps: n levels and the final 0."""
    top, bottom = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return jnp.append((top + jnp.linspace(0, 1, n) * (bottom - top)) ** rho, 0.0)


def log_snr_sigmas(log_snr: LogSNR, n: int) -> Float[Array, "{n}+1"]:
    """Levels of a log-SNR schedule at n + 1 even times from t = 1 to t = 0.

    They end where the schedule does, at sigma(0) of about 0.01, which is what `samplers.ddpm`
    expects; for the other samplers see `ending_at_zero`.
    """
    return sigma_of(log_snr(jnp.linspace(1, 0, n + 1)))


def ending_at_zero(sigmas: Sigmas) -> Sigmas:
    """The same levels with 0 in place of the last."""
    return sigmas.at[-1].set(0.0)


def leading_times(n: int, steps: int = 1000) -> Float[np.ndarray, "{n}+1"]:
    """Times of a table for DDIM and PLMS in exactly n steps, 1 <= n <= steps, and then 0.

    Where n divides `steps` up to half of it, LDM's own: 1, 1 + steps / n, ... from below, so that
    few steps start below the last time. Otherwise the same evenly spaced, between whole times;
    above steps / 2 they run from 1 to steps - 1. ValueError for another n.

    In numpy, like `even_times`: in JAX each length would compile a program.
    """
    if not 1 <= n <= steps:
        raise ValueError(f"{n} sampling steps: a table of {steps} times has 1 to {steps} of them")
    gap = steps / n if 2 * n <= steps else (steps - 2) / (n - 1)
    return np.append(1 + gap * np.arange(n - 1, -1, -1), 0.0).astype(np.float32)


def even_times(n: int, steps: int = 1000) -> Float[np.ndarray, "{n}+1"]:
    """Even times of a table from its last to 0, mostly between whole ones: DPM-Solver's."""
    return np.linspace(steps - 1, 0, n + 1, dtype=np.float32)
