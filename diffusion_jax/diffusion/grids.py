"""Grids: the decreasing noise levels that samplers step through, whatever a model was trained on.

A grid of n steps has n + 1 levels: the start of each step, and the end, which is 0 or the smallest
level. Grids by time take the model's levels at n of its times; grids by level lie between two noise
levels. leading, trailing and linspace are named as in Lin et al. 2024, Table 2, and in diffusers,
and round the times of discrete schedules as diffusers does.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from diffusion_jax.config import named
from diffusion_jax.diffusion.noise import Noise, Scalar, Sigmas
from diffusion_jax.diffusion.precond import Sigma

Times = Float[np.ndarray, "n"] | Float[Array, "n"]
Spacing = Callable[..., tuple[Sigmas, Times | None]]
"""(noise, a config's `sampler` group, Places, end) to the levels of the steps, with or without that
of the end, and to the times that the network sees; None stands for noise.time."""
ENDS = ("zero", "sigma_min")
EndName = Annotated[str, ENDS]


class Grid(NamedTuple):
    """The levels of n steps, and the time that the network sees at each level."""

    sigmas: Float[Array, "n+1"]
    time: Callable[[Sigma], Sigma]
    """sigma to c_noise, for networks that predict eps, x0, v or flow."""


class Places(NamedTuple):
    """How a sampler places its steps on a discrete schedule."""

    closed: bool = False
    """leading and linspace have n + 1 times, the last one for the end, as diffusers' multistep
    solvers do."""
    whole: bool = True
    """Fractional times are rounded."""


def make_grid(noise: Noise, s: Any, name: str, end: str, places: Places) -> Grid:
    """Return the grid `name` of GRIDS with an end of ENDS.

    Args:
        noise: The model's noise.
        s: A config's `sampler` group; steps, sigma_min, sigma_max, rho and offset are read.
        name: A key of GRIDS.
        end: One of ENDS.
        places: How the sampler places its steps.

    Raises:
        ValueError: If the grid goes by times and the noise has none.
    """
    check(noise, name)
    sigmas, times = named.bound("sampler.grid", name, GRIDS)(noise, s, places, end)
    if len(sigmas) == s.steps:
        sigmas = jnp.append(sigmas, 0.0 if noise.level is None else noise.level(jnp.zeros(1))[0])
    sigmas = sigmas.at[-1].set(0.0) if end == "zero" else sigmas
    return Grid(sigmas, noise.time if times is None else _interpolated(sigmas[:-1], times))


def check(noise: Noise, name: str) -> None:
    """Raise ValueError for a grid by times if the noise has no times."""
    if name in BY_TIMES and noise.level is None:
        raise ValueError(
            f"sampler.grid is {name!r}, which spaces times, and this diffusion.noise has none: "
            f"choose from {', '.join(grid for grid in GRIDS if grid not in BY_TIMES)}"
        )


def ldm(noise: Noise, s: Any, *rest: Any) -> tuple[Sigmas, Times | None]:
    """LDM's leading times of a discrete schedule, in exactly n steps; otherwise `leading`."""
    if not noise.steps:
        return leading(noise, s, *rest)
    return _level(noise)(jnp.asarray(leading_times(s.steps, noise.steps))), None


def even(noise: Noise, s: Any, *_: Any) -> tuple[Sigmas, None]:
    """n + 1 evenly spaced times from the last one to 0, as in DPM-Solver; 0 is the end."""
    times = even_times(s.steps, noise.steps) if noise.steps else jnp.linspace(1, 0, s.steps + 1)
    return _level(noise)(jnp.asarray(times)), None


def leading(noise: Noise, s: Any, places: Places, *_: Any) -> tuple[Sigmas, Times | None]:
    """Evenly spaced times from 0 up, each s.offset later on a discrete schedule."""
    points = s.steps + _has_end(noise, places)
    if not noise.steps:
        return _at_times(noise, s, np.arange(points)[::-1] / points)
    times = noise.steps // points * np.arange(points)[::-1] + s.offset
    return _at_times(noise, s, np.minimum(times, noise.steps - 1))


def trailing(noise: Noise, s: Any, *_: Any) -> tuple[Sigmas, Times | None]:
    """Evenly spaced times from the last one down, such that the end is at time 0."""
    left = 1 - np.arange(s.steps) / s.steps
    return _at_times(noise, s, np.round(noise.steps * left) - 1 if noise.steps else left)


def linspace(noise: Noise, s: Any, places: Places, *_: Any) -> tuple[Sigmas, Times | None]:
    """Evenly spaced times from the last one to 0; the last step starts at time 0."""
    last = noise.steps - 1 if noise.steps else 1
    times = np.linspace(0, last, s.steps + _has_end(noise, places))[::-1]
    return _at_times(noise, s, np.round(times) if noise.steps and places.whole else times)


def karras(noise: Noise, s: Any, places: Places, end: str) -> tuple[Sigmas, Times | None]:
    """EDM's levels from sigma_max to sigma_min (see `karras_sigmas`)."""
    low, high = noise.bounds(s.sigma_min, s.sigma_max)
    sigmas = karras_sigmas(s.steps + (end != "zero"), low, high, s.rho)[:-1]
    return sigmas, _times_of(noise, sigmas[: s.steps], np.round if places.whole else None)


def exponential(noise: Noise, s: Any, places: Places, end: str) -> tuple[Sigmas, Times | None]:
    """Levels with evenly spaced logarithms from sigma_max to sigma_min."""
    low, high = map(jnp.log, noise.bounds(s.sigma_min, s.sigma_max))
    sigmas = jnp.exp(jnp.linspace(high, low, s.steps + (end != "zero")))
    return sigmas, _times_of(noise, sigmas[: s.steps], np.floor if places.whole else None)


GRIDS: dict[str, Spacing | str] = {
    "ldm": ldm,
    "even": even,
    "leading": leading,
    "trailing": trailing,
    "linspace": linspace,
    "karras": karras,
    "exponential": exponential,
}
"""Values of sampler.grid, for every sampler of both systems; also "MODULE:FUNCTION"."""
GridName = Annotated[str, GRIDS]
BY_TIMES = ("ldm", "even", "leading", "trailing", "linspace")


def karras_sigmas(
    n: int, sigma_min: Scalar = 0.002, sigma_max: Scalar = 80.0, rho: Scalar = 7.0
) -> Float[Array, "{n}+1"]:
    """Return EDM's noise levels for n steps (equation 5): n levels and the final 0."""
    top, bottom = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return jnp.append((top + jnp.linspace(0, 1, n) * (bottom - top)) ** rho, 0.0)


def leading_times(n: int, steps: int = 1000) -> Float[np.ndarray, "{n}+1"]:
    """Return the times of n DDIM or PLMS steps on a discrete schedule, and the final 0.

    If n divides `steps` and is at most half of it, the times are LDM's: 1, 1 + steps / n, ... from
    below, so that runs with few steps start below the last time. Otherwise they are evenly spaced
    in the same way and may be fractional; above steps / 2 they run from 1 to steps - 1.

    Computed in numpy, like `even_times`: JAX would compile a program for each n.

    Raises:
        ValueError: Unless 1 <= n <= steps.
    """
    if not 1 <= n <= steps:
        raise ValueError(f"{n} sampling steps: choose 1 to {steps} for a table of {steps} times")
    gap = steps / n if 2 * n <= steps else (steps - 2) / (n - 1)
    return np.append(1 + gap * np.arange(n - 1, -1, -1), 0.0).astype(np.float32)


def even_times(n: int, steps: int = 1000) -> Float[np.ndarray, "{n}+1"]:
    """Return n + 1 evenly spaced, generally fractional times down to 0, as in DPM-Solver."""
    return np.linspace(steps - 1, 0, n + 1, dtype=np.float32)


def _level(noise: Noise) -> Callable[[Any], Sigmas]:
    assert noise.level is not None  # `check` makes sure of it.
    return noise.level


def _has_end(noise: Noise, places: Places) -> bool:
    """Return whether the end needs a time of its own beside those of the n steps."""
    return places.closed or (not noise.steps and noise.end == "zero")


def _at_times(noise: Noise, s: Any, times: np.ndarray) -> tuple[Sigmas, Times | None]:
    """Return the levels at the first s.steps times, and the times of a discrete schedule.

    The levels of a discrete schedule are at most s.sigma_max, if that is not 0.
    """
    times = times[: s.steps].astype(np.float32)
    sigmas = _level(noise)(jnp.asarray(times))
    return (jnp.minimum(sigmas, s.sigma_max or jnp.inf), times) if noise.steps else (sigmas, None)


def _times_of(noise: Noise, sigmas: Sigmas, rounded: Callable | None) -> Times | None:
    """Return the times of levels on a discrete schedule, linear in ln sigma between its steps."""
    if not noise.steps:
        return None
    steps = np.arange(noise.steps, dtype=np.float32)
    times = np.interp(np.log(sigmas), np.log(_level(noise)(jnp.asarray(steps))), steps)
    return rounded(times) if rounded else times


def _interpolated(sigmas: Sigmas, times: Times) -> Callable[[Sigma], Sigma]:
    """Return sigma -> time through a grid's levels and times, linear in ln sigma between them."""
    log_levels, times = jnp.log(sigmas[::-1]), jnp.asarray(times, jnp.float32)[::-1]
    return lambda sigma: jnp.interp(jnp.log(sigma), log_levels, times)
