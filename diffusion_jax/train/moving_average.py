"""Moving averages of the weights (EMA), which a training step updates.

An exponential average has a decay (`optimizer.ema_decays`). A power-function average has a width
relative to the length of the training (`optimizer.ema_widths`; weights/power_averages.py).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from diffusion_jax.task import Params

DecayAt = Callable[[float, Int[Array, ""]], Float[Array, ""] | float]


def ema_name(decay: float) -> str:
    """Return the key in TrainState.ema of the average with this decay: 0.9999 -> "0.9999"."""
    return str(float(decay))


def check_decays(ema_decays: Sequence[float]) -> None:
    """Raise ValueError unless every EMA decay is in [0, 1)."""
    for decay in ema_decays:
        if not 0 <= decay < 1:
            raise ValueError(
                f"optimizer.ema_decays holds {decay}: each decay must be at least 0 and below 1, such as 0.9999"
            )


def constant_decay(decay: float, step: Int[Array, ""]) -> float:
    """Return `decay` at every step, as NeMo does."""
    del step
    return decay


def warmup_decay(decay: float, step: Int[Array, "*N"]) -> Float[Array, "*N"]:
    """Return min(decay, (1 + step) / (10 + step)), so that short runs forget their initial weights.

    With a constant decay d, the initial weights make up d^n of the average after n steps. At 0.9999
    this is 74 % after 3,000 steps. With this schedule, the average spans about the last tenth of
    all steps so far, until `decay` is reached.
    """
    return jnp.minimum(decay, (1.0 + step) / (10.0 + step))


def update_exponential(ema: Params, params: Params, decay: Float[Array, ""] | float) -> Params:
    """Return decay * ema + (1 - decay) * params."""
    # Not decay * e + (1 - decay) * p: in float32, the factors of a constant decay do not add up to
    # 1, so the average would shrink, by 0.017 % at a decay of 0.9999.
    return jax.tree.map(lambda e, p: e + (1 - decay) * (p - e), ema, params)


def update_power_function(ema: Params, params: Params, gamma: float, step: Int[Array, ""]) -> Params:
    """Return beta ema + (1 - beta) params with beta = (1 - 1 / t)^(gamma + 1) and t = step + 1.

    1 - beta is small and is computed directly. Subtracting float32(beta) from 1 would lose digits.
    """
    share = -jnp.expm1((gamma + 1) * jnp.log1p(-1.0 / (step + 1)))
    return jax.tree.map(lambda e, p: e + share * (p - e), ema, params)
