"""Sampling grids: the decreasing noise levels through which a sampler steps.

A grid of n steps has n + 1 levels: one at the start of each step, and the end of the last step,
which is 0 or the smallest level. Any grid works with any model, with one exception: grids by time
choose n times of the model's noise schedule, so they need a schedule with times. Grids by level
space the levels between sigma_max and sigma_min. The names leading, trailing and linspace are from
Lin et al. 2024, Table 2. These grids round the times of discrete schedules as diffusers does.
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
"""A function from (noise, a config's `sampler` group, Placement, end) to (levels, times).

`levels` holds the level at the start of each of the n steps. The end may follow; otherwise
make_grid adds it. `times` holds the time that the network sees at the start of each step. If it is
None, noise.time computes these times."""
ENDS = ("zero", "sigma_min")
EndName = Annotated[str, ENDS]


class Grid(NamedTuple):
    """The levels of n steps, and the time that the network sees at each level."""

    sigmas: Float[Array, "n+1"]
    time: Callable[[Sigma], Sigma]
    """Maps sigma to c_noise, the time given to the network. EDM networks get ln(sigma) / 4 instead.
    """


class Placement(NamedTuple):
    """How a sampler places its steps on a discrete schedule."""

    includes_end: bool = False
    """True if `leading` and `linspace` use n + 1 times, the last of which is the end. The multistep
    solvers of diffusers do this."""
    rounded: bool = True
    """True if fractional times are rounded to whole times."""


def make_grid(noise: Noise, s: Any, name: str, end: str, placement: Placement) -> Grid:
    """Compute a sampling grid.

    Args:
        noise: The noise that the model was trained on.
        s: A config's `sampler` group. Its steps, sigma_min, sigma_max, rho and offset are read.
        name: The kind of grid, a key of GRIDS.
        end: The last level: "zero" for 0, "sigma_min" for the smallest level.
        placement: How the sampler places its steps on a discrete schedule.

    Raises:
        ValueError: The grid is spaced in time, but the noise defines no times.
    """
    check(noise, name)
    sigmas, times = named.bound("sampler.grid", name, GRIDS)(noise, s, placement, end)
    if len(sigmas) == s.steps:
        sigmas = jnp.append(sigmas, 0.0 if noise.level is None else noise.level(jnp.zeros(1))[0])
    sigmas = sigmas.at[-1].set(0.0) if end == "zero" else sigmas
    return Grid(sigmas, noise.time if times is None else _interpolated(sigmas[:-1], times))


def check(noise: Noise, name: str) -> None:
    """Raise ValueError if the grid `name` is spaced in time, but the noise defines no times."""
    if name in BY_TIMES and noise.level is None:
        raise ValueError(
            f"sampler.grid is {name!r}, which is spaced in time, but this diffusion.noise defines "
            f"no times: choose from {', '.join(grid for grid in GRIDS if grid not in BY_TIMES)}"
        )


def ldm(noise: Noise, s: Any, *rest: Any) -> tuple[Sigmas, Times | None]:
    """Compute the levels at LDM's times, for exactly n steps (see `leading_times`).

    On a continuous schedule this equals `leading`.
    """
    if not noise.steps:
        return leading(noise, s, *rest)
    return _level(noise)(jnp.asarray(leading_times(s.steps, noise.steps))), None


def even(noise: Noise, s: Any, *_: Any) -> tuple[Sigmas, None]:
    """Compute the levels at n + 1 evenly spaced times, from the largest to 0 (DPM-Solver)."""
    times = even_times(s.steps, noise.steps) if noise.steps else jnp.linspace(1, 0, s.steps + 1)
    return _level(noise)(jnp.asarray(times)), None


def leading(noise: Noise, s: Any, placement: Placement, *_: Any) -> tuple[Sigmas, Times | None]:
    """Compute the levels at evenly spaced times, from one spacing below the largest time to 0.

    On a discrete schedule, s.offset is added to each time.
    """
    points = s.steps + _has_end(noise, placement)
    if not noise.steps:
        return _at_times(noise, s, np.arange(points)[::-1] / points)
    times = noise.steps // points * np.arange(points)[::-1] + s.offset
    return _at_times(noise, s, np.minimum(times, noise.steps - 1))


def trailing(noise: Noise, s: Any, *_: Any) -> tuple[Sigmas, Times | None]:
    """Compute the levels at n evenly spaced times, from the largest to one spacing above time 0."""
    left = 1 - np.arange(s.steps) / s.steps
    return _at_times(noise, s, np.round(noise.steps * left) - 1 if noise.steps else left)


def linspace(noise: Noise, s: Any, placement: Placement, *_: Any) -> tuple[Sigmas, Times | None]:
    """Compute the levels at n evenly spaced times, from the largest to 0. Steps start at them.

    If placement.includes_end is True, or if the noise is continuous and its default end is "zero",
    the steps start at the first n of n + 1 such times, and the last step ends at time 0.
    """
    last = noise.steps - 1 if noise.steps else 1
    times = np.linspace(0, last, s.steps + _has_end(noise, placement))[::-1]
    return _at_times(noise, s, np.round(times) if noise.steps and placement.rounded else times)


def karras(noise: Noise, s: Any, placement: Placement, end: str) -> tuple[Sigmas, Times | None]:
    """Compute EDM's levels from sigma_max to sigma_min (Karras et al. 2022, equation 5)."""
    low, high = noise.bounds(s.sigma_min, s.sigma_max)
    sigmas = karras_sigmas(s.steps + (end != "zero"), low, high, s.rho)[:-1]
    return sigmas, _times_of(noise, sigmas[: s.steps], np.round if placement.rounded else None)


def exponential(
    noise: Noise, s: Any, placement: Placement, end: str
) -> tuple[Sigmas, Times | None]:
    """Compute levels from sigma_max to sigma_min whose logarithms are evenly spaced."""
    low, high = map(jnp.log, noise.bounds(s.sigma_min, s.sigma_max))
    sigmas = jnp.exp(jnp.linspace(high, low, s.steps + (end != "zero")))
    return sigmas, _times_of(noise, sigmas[: s.steps], np.floor if placement.rounded else None)


GRIDS: dict[str, Spacing | str] = {
    "ldm": ldm,
    "even": even,
    "leading": leading,
    "trailing": trailing,
    "linspace": linspace,
    "karras": karras,
    "exponential": exponential,
}
"""The values that sampler.grid can have in configs. A function given as "MODULE:FUNCTION" is
imported on use."""
GridName = Annotated[str, GRIDS]
BY_TIMES = ("ldm", "even", "leading", "trailing", "linspace")


def karras_sigmas(
    n: int, sigma_min: Scalar = 0.002, sigma_max: Scalar = 80.0, rho: Scalar = 7.0
) -> Float[Array, "{n}+1"]:
    """Compute EDM's n noise levels from sigma_max to sigma_min (equation 5), and append 0."""
    top, bottom = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return jnp.append((top + jnp.linspace(0, 1, n) * (bottom - top)) ** rho, 0.0)


def leading_times(n: int, steps: int = 1000) -> Float[np.ndarray, "{n}+1"]:
    """Compute the decreasing times of n DDIM or PLMS steps on a discrete schedule, and append 0.

    For n up to steps / 2, the times are 1, 1 + steps / n, 1 + 2 steps / n, ... If n divides
    `steps`, these are LDM's times; otherwise they are fractional. Sampling with few steps thus
    starts well below the schedule's last time. For larger n, the times are evenly spaced from 1 to
    steps - 1.

    numpy computes them, as in `even_times`, because JAX would compile a program for each n.

    Raises:
        ValueError: n is not between 1 and `steps`.
    """
    if not 1 <= n <= steps:
        raise ValueError(
            f"{n} sampling steps do not fit a noise schedule of {steps} times: choose 1 to {steps}"
        )
    gap = steps / n if 2 * n <= steps else (steps - 2) / (n - 1)
    return np.append(1 + gap * np.arange(n - 1, -1, -1), 0.0).astype(np.float32)


def even_times(n: int, steps: int = 1000) -> Float[np.ndarray, "{n}+1"]:
    """Compute n + 1 evenly spaced times from steps - 1 to 0, as in DPM-Solver.

    They are generally fractional.
    """
    return np.linspace(steps - 1, 0, n + 1, dtype=np.float32)


def _level(noise: Noise) -> Callable[[Any], Sigmas]:
    assert noise.level is not None  # `check` has raised an error otherwise.
    return noise.level


def _has_end(noise: Noise, placement: Placement) -> bool:
    """Return whether the end needs a time in addition to the n times at which steps start."""
    return placement.includes_end or (not noise.steps and noise.end == "zero")


def _at_times(noise: Noise, s: Any, times: np.ndarray) -> tuple[Sigmas, Times | None]:
    """Return the levels at the first s.steps times, and these times (see Spacing).

    On a continuous schedule, the second value is None. On a discrete schedule, levels above
    s.sigma_max are lowered to it, unless it is 0.
    """
    times = times[: s.steps].astype(np.float32)
    sigmas = _level(noise)(jnp.asarray(times))
    return (jnp.minimum(sigmas, s.sigma_max or jnp.inf), times) if noise.steps else (sigmas, None)


def _times_of(noise: Noise, sigmas: Sigmas, rounded: Callable | None) -> Times | None:
    """Convert levels to times of a discrete schedule, by linear interpolation in ln sigma.

    The function `rounded` then rounds the times. Return None for a continuous schedule.
    """
    if not noise.steps:
        return None
    steps = np.arange(noise.steps, dtype=np.float32)
    times = np.interp(np.log(sigmas), np.log(_level(noise)(jnp.asarray(steps))), steps)
    return rounded(times) if rounded else times


def _interpolated(sigmas: Sigmas, times: Times) -> Callable[[Sigma], Sigma]:
    """Return a function from sigma to time: a grid's times, interpolated linearly in ln sigma."""
    log_levels, times = jnp.log(sigmas[::-1]), jnp.asarray(times, jnp.float32)[::-1]
    return lambda sigma: jnp.interp(jnp.log(sigma), log_levels, times)
