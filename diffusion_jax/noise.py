"""How sigma is drawn in training, and the log-SNR schedules of continuous time.

A schedule maps t in [0, 1] to log-SNR; sigma = exp(-log_snr / 2) is the noise
level in x = x0 + sigma * eps. All of it in float32.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from diffusion_jax.precond import Sigma

Time = Float[Array, "N"]
LogSNR = Callable[[Time], Float[Array, "N"]]
DrawSigma = Callable[[PRNGKeyArray, int], Sigma]


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
