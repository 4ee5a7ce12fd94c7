"""How much an error counts at each noise level, as the names in objective.WEIGHTINGS have it."""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from diffusion_jax.diffusion.objective import LEARNED, Weighting

Amount = Annotated[int | float, "[0, inf)"]


def of_x0(weight: Callable[[Float[Array, "B"]], Float[Array, "B"]]) -> Weighting:
    """Weighs |D - x0|^2 by a function of the signal-to-noise ratio 1 / sigma^2.

    The loss of F is |D - x0|^2 / c_out^2, so that one weighting serves whatever F predicts.
    """
    return Weighting(lambda params, sigma, c_out, losses: weight(1 / sigma**2) * c_out**2 * losses)


def min_snr(*, min_snr: Amount = 5.0) -> Weighting:
    """Min-SNR-gamma (Hang et al. 2023, section 3.4): min(snr, gamma); 0: the losses of F as such.

    Over the loss of eps it is min(snr, gamma) / snr, over that of v min(snr, gamma) / (snr + 1).
    """
    if not min_snr:
        return Weighting(lambda params, sigma, c_out, losses: losses)
    return of_x0(lambda snr: jnp.minimum(snr, min_snr))


def p2(*, k: Amount = 1.0, gamma: Amount = 1.0) -> Weighting:
    """P2 (Choi et al. 2022, equation 8): 1 / (k + snr)^gamma over the loss of eps."""
    return of_x0(lambda snr: snr / (k + snr) ** gamma)


def edm(*, sigma_data: Annotated[int | float, "(0, inf)"] = 0.5) -> Weighting:
    """EDM's lambda(sigma) = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 (Table 1)."""
    return of_x0(lambda snr: 1 / sigma_data**2 + snr)


def uncertainty(*, channels: Annotated[int, "[1, 65536]"] = 128) -> Weighting:
    """EDM2's learned uncertainty (Karras et al. 2024): loss / e^u(sigma) + u(sigma).

    u is a linear function, trained along, of fixed random waves of ln(sigma) / 4: at its best ln of
    the loss expected at this level (Kendall et al. 2018), so that all levels come to weigh alike.
    It starts at 0, where this is the loss itself.
    """
    key_frequency, key_phase = jax.random.split(jax.random.key(0))

    def u(params, sigma):
        frequencies = jax.random.normal(key_frequency, (channels,))
        phases = jax.random.uniform(key_phase, (channels,))
        angles = 2 * jnp.pi * (jnp.log(sigma)[:, None] / 4 * frequencies + phases)
        return jnp.cos(angles) @ params[LEARNED]["kernel"] * (2 / channels) ** 0.5  # [B]

    def weigh(params, sigma, c_out, losses):
        log_variance = u(params, sigma)
        return losses / jnp.exp(log_variance) + log_variance

    return Weighting(weigh, lambda: {"kernel": jnp.zeros(channels)})
