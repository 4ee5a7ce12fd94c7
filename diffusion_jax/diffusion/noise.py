"""Noise levels: how training draws them, and which times they have.

A schedule maps t in [0, 1] to log-SNR; sigma = exp(-log_snr / 2) is the noise level in
x = x0 + sigma * eps. A table has one log alpha a step of discrete diffusion, whose times t in
[0, N - 1] may lie between steps. All of it in float32.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
    """The noise levels of a model: in training, and as the network is told of them.

    Those of sampling are the sampler's grid (see grids); a noise says where that lies by default.
    """

    draw: DrawSigma
    """(key, batch size) to the levels that a training step puts on its images."""
    time: Callable[[Sigma], Sigma]
    """c_noise of a network that predicts eps, x0 or v; that of EDM's is ln sigma / 4."""
    level: Callable[[Time], Sigma] | None = None
    """The level at a time, from 0 to 1 or over a table's steps; None of a noise without times."""
    steps: int = 0
    """The steps of a table, whose times go from 0 to steps - 1; 0: times go from 0 to 1."""
    grid: str = "karras"
    """The grid of sampling, a key of GRIDS, by default; "" leaves it to the sampler."""
    end: str = "zero"
    """The end of that grid, one of ENDS; "" leaves it to the sampler."""

    def bounds(self, sigma_min: Scalar, sigma_max: Scalar) -> tuple[Scalar, Scalar]:
        """The least and the largest level within these and, of a table, within its own; 0: its."""
        if not self.steps or self.level is None:
            return sigma_min, sigma_max
        low, high = self.level(jnp.array([0.0, self.steps - 1.0])).tolist()
        return max(low, sigma_min), min(high, sigma_max or high)


def edm_noise(mean: float, std: float) -> Noise:
    """Lognormal in training; in sampling Karras' levels from sampler.sigma_max to sigma_min."""
    return Noise(lognormal(mean, std), precond.log_snr)


def continuous_noise(log_snr: LogSNR) -> Noise:
    """DDPM in continuous time: uniform times in training, even ones in sampling."""
    level = lambda t: sigma_of(log_snr(t))
    return Noise(uniform_time(log_snr), precond.log_snr, level, grid="even", end="")


def discrete_noise(log_alphas: LogAlphas) -> Noise:
    """DDPM over a table's steps, as LDM has it: samples end at the level of time 0, not at 0."""
    level, steps = lambda t: sigma_at(log_alphas, t), len(log_alphas)
    time = time_of(log_alphas)
    return Noise(uniform_steps(log_alphas), time, level, steps, grid="", end="sigma_min")


# By diffusion.noise of a config, whose `diffusion` group they are made of. Models of Stable
# Diffusion are of tables: LDM's thousand steps, or these without any signal in the last.
NOISES: Mapping[str, Callable[[Any], Noise]] = {
    "lognormal": lambda d: edm_noise(d.p_mean, d.p_std),
    "cosine": lambda d: continuous_noise(cosine_log_snr),
    "linear": lambda d: continuous_noise(linear_log_snr),
    "scaled_linear": lambda d: discrete_noise(scaled_linear()),
    "zero_terminal_snr": lambda d: discrete_noise(zero_terminal_snr(scaled_linear())),
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


def zero_terminal_snr(log_alphas: LogAlphas) -> LogAlphas:
    """The table with sqrt(alpha bar) shifted to 0 at its last step (Lin et al. 2024, Algorithm 1).

    There it is 2^-20 in place of 0: x0 + sigma * eps then loses x0 to float32's last digits.
    """
    alphas = jnp.exp(log_alphas)
    shifted = (alphas - alphas[-1]) * alphas[0] / (alphas[0] - alphas[-1])
    return jnp.log(jnp.maximum(shifted, 2.0**-20))


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
