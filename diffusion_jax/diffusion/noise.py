"""Noise levels: how training draws them, and which times they have."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from diffusion_jax.config import named
from diffusion_jax.diffusion.precond import Sigma

Scalar = int | float | Float[Array, ""]
Sigmas = Float[Array, "levels"]
Time = Float[Array, "N"]
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
        """The least and the largest level within these and, of a table, within its own.

        0 stands for a table's own, and for EDM's, 0.002 and 80, where there is none.
        """
        if not self.steps or self.level is None:
            return sigma_min or 0.002, sigma_max or 80.0
        low, high = self.level(jnp.array([0.0, self.steps - 1.0])).tolist()
        return max(low, sigma_min), min(high, sigma_max or high)


_SCHEDULES = "diffusion_jax.diffusion.schedules"
# By diffusion.noise of a config; their own parameters follow `*` (see named).
NOISES: Mapping[str, Callable[..., Noise] | str] = {
    "lognormal": f"{_SCHEDULES}:edm",
    "logit_normal": f"{_SCHEDULES}:logit_normal",
    "uniform_flow": f"{_SCHEDULES}:uniform_flow",
    "cosine": f"{_SCHEDULES}:cosine",
    "linear": f"{_SCHEDULES}:linear",
    "scaled_linear": f"{_SCHEDULES}:ldm",
    "zero_terminal_snr": f"{_SCHEDULES}:ldm_zero_terminal_snr",
}


def make(d: Any) -> Noise:
    """The noise that a config's `diffusion` group d names; ValueError for one there is not."""
    return named.bound("diffusion.noise", d.noise, NOISES, d)()


def quantiles(noise: Noise, n: int) -> Float[np.ndarray, "{n}"]:
    """The levels below which (i + 1/2) / n of training's lie, i < n: those of 2^16 fixed draws."""
    draws = np.sort(np.asarray(noise.draw(jax.random.key(0), 2**16)))
    return draws[(np.arange(n) * 2 + 1) * len(draws) // (2 * n)]
