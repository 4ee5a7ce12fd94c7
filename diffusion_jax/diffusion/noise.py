"""Noise distributions of training, and noise schedules. The table NOISES names them for configs.

A schedule maps t in [0, 1] to the log-SNR ln(alpha^2 / (1 - alpha^2)), and sigma = exp(-logSNR / 2)
is the noise level in x = x0 + sigma * eps. A discrete schedule of N steps is a table that holds
ln alpha for each step. Its times t in [0, N - 1] may lie between steps. Noise levels are float32.
"""

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from diffusion_jax.config.named import Table
from diffusion_jax.config.ranges import Interval
from diffusion_jax.diffusion import precond
from diffusion_jax.diffusion.precond import Sigma

Scalar = int | float | Float[Array, ""]
Sigmas = Float[Array, "levels"]
Time = Float[Array, "N"]
DrawSigma = Callable[[PRNGKeyArray, int], Sigma]
LogSNR = Callable[[Time], Float[Array, "N"]]
LogAlphas = Float[Array, "steps"]
Real = Annotated[int | float, Interval("(-inf, inf)")]
Positive = Annotated[int | float, Interval("(0, inf)")]


class Noise(NamedTuple):
    """The distribution of noise levels in training, and the time that the network sees for each.

    Sampling takes its noise levels from a grid instead (grids.py).
    """

    draw: DrawSigma
    """Maps (key, batch size) to the noise level of each training image."""
    time: Callable[[Sigma], Sigma]
    """Maps sigma to c_noise, the network's time input. Networks with the preconditioner `edm` get
    ln(sigma) / 4 instead."""
    level: Callable[[Time], Sigma] | None = None
    """Maps times to sigma. Times are in [0, 1], or in [0, steps - 1] on a discrete schedule. None
    if the noise has no times, as in EDM."""
    steps: int = 0
    """Number of steps of a discrete schedule; 0 for a continuous one."""

    @property
    def least(self) -> Scalar:
        """The noise level at time 0, or 0 if the noise has no times."""
        return 0.0 if self.level is None else self.level(jnp.zeros(1))[0]

    def bounds(self, sigma_min: Scalar, sigma_max: Scalar) -> tuple[Scalar, Scalar]:
        """Return the smallest and the largest noise level for sampling.

        On a discrete schedule, these are sigma_min and sigma_max, limited to the range of the
        schedule's table. There, a sigma_min of 0 selects the lower end of the range, and a
        sigma_max of 0 the upper end. Otherwise, both are returned unchanged, except that 0 is
        replaced by EDM's value: 0.002 for sigma_min, 80 for sigma_max.
        """
        if not self.steps or self.level is None:
            return sigma_min or 0.002, sigma_max or 80.0
        low, high = self.level(jnp.array([0.0, self.steps - 1.0])).tolist()
        return max(low, sigma_min), min(high, sigma_max or high)


def quantiles(noise: Noise, n: int) -> Float[np.ndarray, "{n}"]:
    """Compute the n quantiles (i + 1/2) / n, for i < n, of the noise levels in training.

    The quantiles are estimated from 2^16 draws with a fixed key.
    """
    draws = np.sort(np.asarray(noise.draw(jax.random.key(0), 2**16)))
    return draws[(np.arange(n) * 2 + 1) * len(draws) // (2 * n)]


# The entries of NOISES. Configs can set their keyword-only parameters.


def lognormal(*, p_mean: Real = -1.2, p_std: Positive = 1.2) -> Noise:
    """Build EDM's noise: ln sigma ~ N(p_mean, p_std^2) in training (Karras et al. 2022)."""
    return Noise(draw_lognormal(p_mean, p_std), precond.log_snr)


def logit_normal(*, mean: Real = 0.0, std: Positive = 1.0, shift: Positive = 1.0) -> Noise:
    """Build the noise of rectified flow with logit-normal times (SD3, equation 19).

    ln(t / (1 - t)) ~ N(mean, std^2), so the noise level shift * t / (1 - t) is lognormal.
    """
    return flow_noise(draw_lognormal(mean + math.log(shift), std), shift)


def uniform_flow(*, shift: Positive = 1.0) -> Noise:
    """Build the noise of rectified flow with uniform times (Liu et al. 2023).

    The noise level at time t is shift * t / (1 - t).
    """

    def draw(key, batch):
        t = jax.random.uniform(key, (batch,), minval=2.0**-20, maxval=1 - 2.0**-20)
        return shift * t / (1 - t)

    return flow_noise(draw, shift)


def cosine() -> Noise:
    """Build the noise of DDPM in continuous time, with the cosine schedule."""
    return continuous_noise(cosine_log_snr)


def linear() -> Noise:
    """Build the noise of DDPM in continuous time, with the linear schedule."""
    return continuous_noise(linear_log_snr)


def scaled_linear() -> Noise:
    """Build the discrete schedule of latent diffusion and Stable Diffusion, with 1000 steps."""
    return discrete_noise(ldm_log_alphas())


def zero_terminal_snr() -> Noise:
    """Build LDM's schedule of 1000 steps, rescaled so that x has no signal at the last step."""
    return discrete_noise(with_zero_terminal_snr(ldm_log_alphas()))


NOISES = Table(
    lognormal=lognormal,
    logit_normal=logit_normal,
    uniform_flow=uniform_flow,
    cosine=cosine,
    linear=linear,
    scaled_linear=scaled_linear,
    zero_terminal_snr=zero_terminal_snr,
)
"""The functions that diffusion.noise can name in configs. An entry "MODULE:FUNCTION" is imported on
use."""
NoiseName = Annotated[str, NOISES]


def continuous_noise(log_snr: LogSNR) -> Noise:
    """Build the noise of DDPM in continuous time, from a schedule that maps time to the log-SNR.

    Training draws times uniformly.
    """
    level = lambda t: sigma_of(log_snr(t))
    return Noise(uniform_time(log_snr), precond.log_snr, level)


def discrete_noise(log_alphas: LogAlphas) -> Noise:
    """Build the noise of DDPM on a discrete schedule, from a table of ln alpha, as in LDM.

    Training draws the steps of the table uniformly.
    """
    level, steps = lambda t: sigma_at(log_alphas, t), len(log_alphas)
    return Noise(uniform_steps(log_alphas), time_of(log_alphas), level, steps)


def flow_noise(draw: DrawSigma, shift: int | float) -> Noise:
    """Build the noise of rectified flow: the noise level at time t is shift * t / (1 - t).

    `draw` draws the levels in training. At t = 1, x has no signal. A `shift` above 1 raises the
    noise levels, which suits larger images (SD3, equation 23).
    """
    least = 2.0**-20  # Keeps the level at t = 1 finite, as in `with_zero_terminal_snr`.
    level = lambda t: shift * t / jnp.maximum(1 - t, least)
    return Noise(draw, precond.log_snr, level)


def draw_lognormal(mean: int | float, std: int | float) -> DrawSigma:
    """Return a function that draws noise levels with ln sigma ~ N(mean, std^2)."""

    def draw(key, batch):
        return jnp.exp(mean + std * jax.random.normal(key, (batch,)))

    return draw


def uniform_time(log_snr: LogSNR) -> DrawSigma:
    """Return a function that draws times t ~ U[0, 1) and returns sigma at these times (DDPM)."""

    def draw(key, batch):
        return sigma_of(log_snr(jax.random.uniform(key, (batch,))))

    return draw


def uniform_steps(log_alphas: LogAlphas) -> DrawSigma:
    """Return a function that draws steps of a table uniformly and returns their sigma (DDPM)."""

    def draw(key, batch):
        t = jax.random.randint(key, (batch,), 0, len(log_alphas))
        return jnp.sqrt(jnp.expm1(-2 * log_alphas))[t]

    return draw


def cosine_log_snr(t: Time) -> Float[Array, "N"]:
    """Compute the log-SNR of the cosine schedule (Nichol & Dhariwal 2021) in continuous time.

    It falls from 8.77 at t = 0 to -33.9 at t = 1. In exact arithmetic the value at t = 1 is
    -infinity: -33.9 results from rounding pi / 2 to float32.
    """
    angle = (t + 0.008) / 1.008 * jnp.pi / 2
    return -jnp.log(jnp.maximum(jnp.cos(angle) ** -2 - 1, 1e-5))


def linear_log_snr(t: Time) -> Float[Array, "N"]:
    """Compute the log-SNR of DDPM's linear betas in continuous time: 9.21 at t = 0, -10 at 1."""
    return -jnp.log(jnp.expm1(1e-4 + 10 * t**2))


def sigma_of(log_snr: Float[Array, "N"]) -> Float[Array, "N"]:
    """Convert the log-SNR to sigma = exp(-log_snr / 2)."""
    return jnp.exp(-log_snr / 2)


def ldm_log_alphas(beta_first: float = 0.00085, beta_last: float = 0.012, steps: int = 1000) -> Float[Array, "{steps}"]:
    """Compute Stable Diffusion's table of ln alpha ("scaled linear").

    The square roots of the betas are evenly spaced, and the betas go from beta_first to beta_last.
    alpha^2 at a step is the product of 1 - beta over all steps up to this one. The logarithms are
    summed in float64.
    """
    first, last = math.sqrt(beta_first), math.sqrt(beta_last)
    log_alphas, total = [], 0.0
    for i in range(steps):
        total += math.log1p(-((first + (last - first) * i / (steps - 1)) ** 2)) / 2
        log_alphas.append(total)
    return jnp.asarray(log_alphas, jnp.float32)


def with_zero_terminal_snr(log_alphas: LogAlphas) -> LogAlphas:
    """Shift and scale a table of ln alpha so that x has no signal at the last step.

    This is Algorithm 1 of Lin et al. 2024, except that the last alpha is 2^-20 instead of 0, which
    keeps sigma finite. At the last step, the float32 value of x0 + sigma * eps keeps hardly any
    digits of x0.
    """
    alphas = jnp.exp(log_alphas)
    shifted = (alphas - alphas[-1]) * alphas[0] / (alphas[0] - alphas[-1])
    return jnp.log(jnp.maximum(shifted, 2.0**-20))


def sigma_at(log_alphas: LogAlphas, t: Time) -> Float[Array, "N"]:
    """Compute sigma at times t of a table of ln alpha.

    Between steps, ln alpha is interpolated linearly (DPM-Solver).
    """
    log_alpha = jnp.interp(t, jnp.arange(len(log_alphas), dtype=jnp.float32), log_alphas)
    return jnp.sqrt(jnp.expm1(-2 * log_alpha))


def time_of(log_alphas: LogAlphas) -> Callable[[Sigma], Sigma]:
    """Return a function from sigma to time for a table of ln alpha, the inverse of `sigma_at`.

    A level outside of the table gets the time of the table's nearest end. Preconditioners pass the
    time to the network as c_noise.
    """

    def time(sigma):
        # Interpolate over -ln alpha, which grows with time: jnp.interp needs increasing points.
        minus_log_alpha = jnp.log1p(sigma**2) / 2
        steps = jnp.arange(len(log_alphas), dtype=jnp.float32)
        return jnp.interp(minus_log_alpha, -log_alphas, steps)

    return time
