"""Grids: the falling noise levels that samplers step down, whatever a model was trained on.

A grid of n steps has n levels that steps start from, and the end: the level 0, or the least one.
Grids by times take a model's levels at n of its times; those by levels lie between two of them.
The names leading, trailing and linspace are those of Lin et al. 2024, Table 2, and of diffusers,
whose rounding they have over a table of discrete times.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from diffusion_jax.config import named
from diffusion_jax.diffusion.noise import Noise, Sigmas
from diffusion_jax.diffusion.precond import Sigma

Times = Float[np.ndarray, "n"] | Float[Array, "n"]
ENDS = ("zero", "sigma_min")


class Grid(NamedTuple):
    """The levels of n steps, and what the network is told of them."""

    sigmas: Float[Array, "n+1"]
    time: Callable[[Sigma], Sigma]
    """c_noise of a network that predicts eps, x0 or v."""


class Places(NamedTuple):
    """How a sampler wants its steps to lie: see samplers.Method."""

    closed: bool = False
    whole: bool = True


def make_grid(noise: Noise, s: Any, name: str, end: str, places: Places) -> Grid:
    """The grid of this name in GRIDS and this end in ENDS, for a config's `sampler` s.

    Reads s.steps, sigma_min, sigma_max, rho and offset. ValueError if the noise has no such grid.
    """
    check(noise, name)
    sigmas, times = named.bound("sampler.grid", name, GRIDS)(noise, s, places, end)
    if len(sigmas) == s.steps:
        sigmas = jnp.append(sigmas, 0.0 if noise.level is None else noise.level(jnp.zeros(1))[0])
    sigmas = sigmas.at[-1].set(0.0) if end == "zero" else sigmas
    return Grid(sigmas, noise.time if times is None else told(sigmas[:-1], times))


def check(noise: Noise, name: str) -> None:
    """ValueError for a grid by times of a noise that has none."""
    if name in BY_TIMES and noise.level is None:
        raise ValueError(
            f"sampler.grid is {name!r}, by times, and this diffusion.noise has none: choose from "
            f"{', '.join(grid for grid in GRIDS if grid not in BY_TIMES)}"
        )


def told(sigmas: Sigmas, times: Times) -> Callable[[Sigma], Sigma]:
    """The times of a grid's levels, and between them what lies between in ln sigma."""
    levels, at = jnp.log(sigmas[::-1]), jnp.asarray(times, jnp.float32)[::-1]
    return lambda sigma: jnp.interp(jnp.log(sigma), levels, at)


_SPACINGS = "diffusion_jax.diffusion.spacings"
# By sampler.grid of a config: all for every sampler of both systems. Functions of (noise, a
# config's `sampler`, places, end) to the levels of the steps, with that of the end or without it,
# and to what the network is told of them; None: noise.time.
GRIDS: Mapping[str, Callable[..., tuple[Sigmas, Times | None]] | str] = {
    name: f"{_SPACINGS}:{name}"
    for name in ("ldm", "even", "leading", "trailing", "linspace", "karras", "exponential")
}
BY_TIMES = ("ldm", "even", "leading", "trailing", "linspace")
