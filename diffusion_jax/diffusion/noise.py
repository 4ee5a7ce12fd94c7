"""Noise: the levels that training draws, their times, and the table NOISES that configs name.

A schedule maps t in [0, 1] to the log-SNR ln(alpha^2 / (1 - alpha^2)), and sigma = exp(-logSNR / 2)
is the noise level in x = x0 + sigma * eps. A discrete schedule is a table with one ln alpha per
step; its times t in [0, N - 1] may lie between steps. Everything is computed in float32.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from diffusion_jax.config import named
from diffusion_jax.diffusion import precond
from diffusion_jax.diffusion.precond import Sigma

Scalar = int | float | Float[Array, ""]
Sigmas = Float[Array, "levels"]
Time = Float[Array, "N"]
DrawSigma = Callable[[PRNGKeyArray, int], Sigma]
LogSNR = Callable[[Time], Float[Array, "N"]]
LogAlphas = Float[Array, "steps"]
Real = Annotated[int | float, "(-inf, inf)"]
Positive = Annotated[int | float, "(0, inf)"]


class Noise(NamedTuple):
    """The distribution of noise levels in training, and the time that the network sees for each.

    Sampling takes its noise levels from a grid (grids.py); `grid` and `end` are the defaults.
    """

    draw: DrawSigma
    """(key, batch size) to the noise level of each training image."""
    time: Callable[[Sigma], Sigma]
    """sigma to c_noise, for networks that predict eps, x0, v or flow. EDM's is ln(sigma) / 4."""
    level: Callable[[Time], Sigma] | None = None
    """Time to sigma, over [0, 1] or a table's [0, steps - 1]; None for a noise without times."""
    steps: int = 0
    """Number of steps of a discrete schedule; 0 for a continuous one."""
    grid: str = "karras"
    """Default sampling grid, a key of GRIDS; "" leaves it to the sampler."""
    end: str = "zero"
    """Default end of the grid, one of ENDS; "" leaves it to the sampler."""

    def bounds(self, sigma_min: Scalar, sigma_max: Scalar) -> tuple[Scalar, Scalar]:
        """Return the smallest and largest sampling level, clipped to a table's own range.

        0 stands for the end of the table, or for EDM's 0.002 and 80 without a table.
        """
        if not self.steps or self.level is None:
            return sigma_min or 0.002, sigma_max or 80.0
        low, high = self.level(jnp.array([0.0, self.steps - 1.0])).tolist()
        return max(low, sigma_min), min(high, sigma_max or high)


def make(d: Any) -> Noise:
    """Return the noise that a config's `diffusion` group names. Raises ValueError."""
    return named.bound("diffusion.noise", d.noise, NOISES, d)()


def quantiles(noise: Noise, n: int) -> Float[np.ndarray, "{n}"]:
    """Return the (i + 1/2) / n quantiles, i < n, of 2^16 fixed draws of training's noise levels."""
    draws = np.sort(np.asarray(noise.draw(jax.random.key(0), 2**16)))
    return draws[(np.arange(n) * 2 + 1) * len(draws) // (2 * n)]


# The entries of NOISES. Keyword-only parameters are the ones that a config can give.


def lognormal(*, p_mean: Real = -1.2, p_std: Positive = 1.2) -> Noise:
    """EDM: ln sigma ~ N(p_mean, p_std^2) in training (Table 1), Karras' levels in sampling."""
    return Noise(draw_lognormal(p_mean, p_std), precond.log_snr)


def logit_normal(*, mean: Real = 0.0, std: Positive = 1.0, shift: Positive = 1.0) -> Noise:
    """Rectified flow with ln(t / (1 - t)) ~ N(mean, std^2) (SD3, equation 19).

    The noise level is t / (1 - t), so it is lognormal.
    """
    return flow_noise(draw_lognormal(mean + math.log(shift), std), shift)


def uniform_flow(*, shift: Positive = 1.0) -> Noise:
    """Rectified flow with uniform times (Liu et al. 2023)."""

    def draw(key, batch):
        t = jax.random.uniform(key, (batch,), minval=2.0**-20, maxval=1 - 2.0**-20)
        return shift * t / (1 - t)

    return flow_noise(draw, shift)


def cosine() -> Noise:
    """Continuous DDPM with `cosine_log_snr`."""
    return continuous_noise(cosine_log_snr)


def linear() -> Noise:
    """Continuous DDPM with `linear_log_snr`."""
    return continuous_noise(linear_log_snr)


def ldm() -> Noise:
    """The thousand steps of latent diffusion and Stable Diffusion."""
    return discrete_noise(scaled_linear())


def ldm_zero_terminal_snr() -> Noise:
    """The thousand steps of LDM, rescaled so that the last one holds no signal."""
    return discrete_noise(zero_terminal_snr(scaled_linear()))


NOISES: dict[str, Callable[..., Noise] | str] = {
    "lognormal": lognormal,
    "logit_normal": logit_normal,
    "uniform_flow": uniform_flow,
    "cosine": cosine,
    "linear": linear,
    "scaled_linear": ldm,
    "zero_terminal_snr": ldm_zero_terminal_snr,
}
"""Values of diffusion.noise: functions of their own parameters, or "MODULE:FUNCTION"."""
NoiseName = Annotated[str, named.checked(NOISES)]


def continuous_noise(log_snr: LogSNR) -> Noise:
    """DDPM in continuous time: uniform times in training, evenly spaced ones in sampling."""
    level = lambda t: sigma_of(log_snr(t))
    return Noise(uniform_time(log_snr), precond.log_snr, level, grid="even", end="")


def discrete_noise(log_alphas: LogAlphas) -> Noise:
    """DDPM over a table's steps, as in LDM: sampling ends at the level of time 0, not at 0."""
    level, steps = lambda t: sigma_at(log_alphas, t), len(log_alphas)
    time = time_of(log_alphas)
    return Noise(uniform_steps(log_alphas), time, level, steps, grid="", end="sigma_min")


def flow_noise(draw: DrawSigma, shift: int | float) -> Noise:
    """Rectified flow: time t has the level shift * t / (1 - t), and t = 1 holds no signal.

    `shift` above 1 adds noise for larger images (SD3, equation 23).
    """
    least = 2.0**-20  # Keeps the level of t = 1 finite, as in `zero_terminal_snr`.
    level = lambda t: shift * t / jnp.maximum(1 - t, least)
    return Noise(draw, precond.log_snr, level, grid="even", end="zero")


def draw_lognormal(mean: int | float, std: int | float) -> DrawSigma:
    """Draw ln sigma ~ N(mean, std^2)."""

    def draw(key, batch):
        return jnp.exp(mean + std * jax.random.normal(key, (batch,)))

    return draw


def uniform_time(log_snr: LogSNR) -> DrawSigma:
    """Draw t ~ U[0, 1) and return the schedule's sigma at t (continuous DDPM)."""

    def draw(key, batch):
        return sigma_of(log_snr(jax.random.uniform(key, (batch,))))

    return draw


def uniform_steps(log_alphas: LogAlphas) -> DrawSigma:
    """Draw a step of the table uniformly and return its sigma (DDPM)."""

    def draw(key, batch):
        t = jax.random.randint(key, (batch,), 0, len(log_alphas))
        return jnp.sqrt(jnp.expm1(-2 * log_alphas))[t]

    return draw


def cosine_log_snr(t: Time) -> Float[Array, "N"]:
    """Cosine schedule (Nichol & Dhariwal 2021) in continuous time: 8.77 at t = 0, -33.9 at t = 1.

    The angle reaches pi / 2 at t = 1, where the rounding of pi in float32 alone decides the value:
    it only means that no signal is left.
    """
    angle = (t + 0.008) / 1.008 * jnp.pi / 2
    return -jnp.log(jnp.maximum(jnp.cos(angle) ** -2 - 1, 1e-5))


def linear_log_snr(t: Time) -> Float[Array, "N"]:
    """DDPM's linear betas in the continuous limit: 9.21 at t = 0, -10 at t = 1."""
    return -jnp.log(jnp.expm1(1e-4 + 10 * t**2))


def sigma_of(log_snr: Float[Array, "N"]) -> Float[Array, "N"]:
    """Inverse of `precond.log_snr`."""
    return jnp.exp(-log_snr / 2)


def scaled_linear(
    beta_first: float = 0.00085, beta_last: float = 0.012, steps: int = 1000
) -> Float[Array, "{steps}"]:
    """Stable Diffusion's table: ln alpha for betas with evenly spaced roots ("scaled linear").

    alpha^2 is the product of 1 - beta up to the step, computed in float64 outside of JAX.
    """
    first, last = math.sqrt(beta_first), math.sqrt(beta_last)
    log_alphas, total = [], 0.0
    for i in range(steps):
        total += math.log1p(-((first + (last - first) * i / (steps - 1)) ** 2)) / 2
        log_alphas.append(total)
    return jnp.asarray(log_alphas, jnp.float32)


def zero_terminal_snr(log_alphas: LogAlphas) -> LogAlphas:
    """Shift sqrt(alpha bar) to 0 at the table's last step (Lin et al. 2024, Algorithm 1).

    The last alpha is 2^-20 instead of 0: x0 + sigma * eps then keeps only the last digits of x0.
    """
    alphas = jnp.exp(log_alphas)
    shifted = (alphas - alphas[-1]) * alphas[0] / (alphas[0] - alphas[-1])
    return jnp.log(jnp.maximum(shifted, 2.0**-20))


def sigma_at(log_alphas: LogAlphas, t: Time) -> Float[Array, "N"]:
    """Return the noise level at time t; ln alpha is linear between steps, as in DPM-Solver."""
    log_alpha = jnp.interp(t, jnp.arange(len(log_alphas), dtype=jnp.float32), log_alphas)
    return jnp.sqrt(jnp.expm1(-2 * log_alpha))


def time_of(log_alphas: LogAlphas) -> Callable[[Sigma], Sigma]:
    """Return the inverse of `sigma_at`, clipped to the table: the `time` of preconditioners."""

    def time(sigma):
        # Interpolate over -ln alpha, which grows with time: jnp.interp needs increasing points.
        minus_log_alpha = jnp.log1p(sigma**2) / 2
        steps = jnp.arange(len(log_alphas), dtype=jnp.float32)
        return jnp.interp(minus_log_alpha, -log_alphas, steps)

    return time
