"""The levels of each grid: what the names in grids.GRIDS stand for."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from diffusion_jax.diffusion.grids import Places, Times
from diffusion_jax.diffusion.noise import Noise, Scalar, Sigmas


def ldm(noise: Noise, s: Any, *rest: Any) -> tuple[Sigmas, Times | None]:
    """A table's leading times as LDM has them, in exactly n steps; without one `leading`."""
    if not noise.steps:
        return leading(noise, s, *rest)
    return _level(noise)(jnp.asarray(leading_times(s.steps, noise.steps))), None


def even(noise: Noise, s: Any, *_: Any) -> tuple[Sigmas, None]:
    """n + 1 even times from the last to 0, which is the end's: DPM-Solver's."""
    times = even_times(s.steps, noise.steps) if noise.steps else jnp.linspace(1, 0, s.steps + 1)
    return _level(noise)(jnp.asarray(times)), None


def leading(noise: Noise, s: Any, places: Places, *_: Any) -> tuple[Sigmas, Times | None]:
    """Even times from 0 on, each s.offset later in a table."""
    points = s.steps + _with_end(noise, places)
    if not noise.steps:
        return _at(noise, s, np.arange(points)[::-1] / points)
    times = noise.steps // points * np.arange(points)[::-1] + s.offset
    return _at(noise, s, np.minimum(times, noise.steps - 1))


def trailing(noise: Noise, s: Any, *_: Any) -> tuple[Sigmas, Times | None]:
    """Even times from the last on, such that the end is 0."""
    left = 1 - np.arange(s.steps) / s.steps
    return _at(noise, s, np.round(noise.steps * left) - 1 if noise.steps else left)


def linspace(noise: Noise, s: Any, places: Places, *_: Any) -> tuple[Sigmas, Times | None]:
    """Even times from the last to 0, which is a step's own."""
    last = noise.steps - 1 if noise.steps else 1
    times = np.linspace(0, last, s.steps + _with_end(noise, places))[::-1]
    return _at(noise, s, np.round(times) if noise.steps and places.whole else times)


def karras(noise: Noise, s: Any, places: Places, end: str) -> tuple[Sigmas, Times | None]:
    """EDM's levels from sigma_max to sigma_min (see `karras_sigmas`)."""
    low, high = noise.bounds(s.sigma_min, s.sigma_max)
    sigmas = karras_sigmas(s.steps + (end != "zero"), low, high, s.rho)[:-1]
    return sigmas, _times(noise, sigmas[: s.steps], np.round if places.whole else None)


def exponential(noise: Noise, s: Any, places: Places, end: str) -> tuple[Sigmas, Times | None]:
    """Levels whose logarithms are even from sigma_max to sigma_min."""
    low, high = map(jnp.log, noise.bounds(s.sigma_min, s.sigma_max))
    sigmas = jnp.exp(jnp.linspace(high, low, s.steps + (end != "zero")))
    return sigmas, _times(noise, sigmas[: s.steps], np.floor if places.whole else None)


def karras_sigmas(
    n: int, sigma_min: Scalar = 0.002, sigma_max: Scalar = 80.0, rho: Scalar = 7.0
) -> Float[Array, "{n}+1"]:
    """Noise levels of EDM, equation 5, for n steps: n levels and the final 0."""
    top, bottom = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return jnp.append((top + jnp.linspace(0, 1, n) * (bottom - top)) ** rho, 0.0)


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


def _level(noise: Noise) -> Callable[[Any], Sigmas]:
    assert noise.level is not None  # See check.
    return noise.level


def _with_end(noise: Noise, places: Places) -> bool:
    """Whether the time 0 is an end beside the steps' own: also where its level is 0."""
    return places.closed or (not noise.steps and noise.end == "zero")


def _at(noise: Noise, s: Any, times: np.ndarray) -> tuple[Sigmas, Times | None]:
    """The levels at the first s.steps of these times, and a table's times; its level at most
    sigma_max."""
    times = times[: s.steps].astype(np.float32)
    sigmas = _level(noise)(jnp.asarray(times))
    return (jnp.minimum(sigmas, s.sigma_max or jnp.inf), times) if noise.steps else (sigmas, None)


def _times(noise: Noise, sigmas: Sigmas, rounded: Callable | None) -> Times | None:
    """A table's times of levels, linear between steps in ln sigma; None without a table."""
    if not noise.steps:
        return None
    steps = np.arange(noise.steps, dtype=np.float32)
    times = np.interp(np.log(sigmas), np.log(_level(noise)(jnp.asarray(steps))), steps)
    return rounded(times) if rounded else times
