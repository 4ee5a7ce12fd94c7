"""Schedules and distributions of noise levels: what the names in noise.NOISES stand for.

A schedule maps t in [0, 1] to log-SNR; sigma = exp(-log_snr / 2) is the noise level in
x = x0 + sigma * eps. A table has one log alpha a step of discrete diffusion, whose times t in
[0, N - 1] may lie between steps. All of it in float32.
"""

import math
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from diffusion_jax.diffusion import precond
from diffusion_jax.diffusion.noise import DrawSigma, Noise, Time
from diffusion_jax.diffusion.precond import Sigma

LogSNR = Callable[[Time], Float[Array, "N"]]
LogAlphas = Float[Array, "steps"]
Real = Annotated[int | float, "(-inf, inf)"]
Positive = Annotated[int | float, "(0, inf)"]


def edm(*, p_mean: Real = -1.2, p_std: Positive = 1.2) -> Noise:
    """`edm_noise`, as configs name it."""
    return edm_noise(p_mean, p_std)


def cosine() -> Noise:
    """`cosine_log_snr` in continuous time."""
    return continuous_noise(cosine_log_snr)


def linear() -> Noise:
    """`linear_log_snr` in continuous time."""
    return continuous_noise(linear_log_snr)


def ldm() -> Noise:
    """LDM's thousand steps."""
    return discrete_noise(scaled_linear())


def ldm_zero_terminal_snr() -> Noise:
    """LDM's thousand steps, without any signal in the last."""
    return discrete_noise(zero_terminal_snr(scaled_linear()))


def edm_noise(mean: int | float, std: int | float) -> Noise:
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


def flow_noise(draw: DrawSigma, shift: int | float) -> Noise:
    """Times t of rectified flow, whose level is shift * t / (1 - t); no signal is left at t = 1.

    `shift` is that of SD3 (equation 23) for larger images.
    """
    least = 2.0**-20  # As of `zero_terminal_snr`.
    level = lambda t: shift * t / jnp.maximum(1 - t, least)
    return Noise(draw, precond.log_snr, level, grid="even", end="zero")


def logit_normal(*, mean: Real = 0.0, std: Positive = 1.0, shift: Positive = 1.0) -> Noise:
    """Rectified flow's times with ln(t / (1 - t)) ~ N(mean, std^2) (SD3, equation 19).

    The level is t / (1 - t), so these are lognormal levels.
    """
    return flow_noise(lognormal(mean + math.log(shift), std), shift)


def uniform_flow(*, shift: Positive = 1.0) -> Noise:
    """Rectified flow's times, all as likely (Liu et al. 2023)."""

    def draw(key, batch):
        t = jax.random.uniform(key, (batch,), minval=2.0**-20, maxval=1 - 2.0**-20)
        return shift * t / (1 - t)

    return flow_noise(draw, shift)


def lognormal(mean: int | float, std: int | float) -> DrawSigma:
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
