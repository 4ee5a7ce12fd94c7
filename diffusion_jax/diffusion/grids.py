"""Sampling grids: the decreasing noise levels through which a sampler steps.

A grid of n = sampler.steps steps has n + 1 levels: the level at which each step starts, and the end
of the last step, which is 0 or the smallest level. Grids spaced in time (BY_TIMES) choose n times
of the model's noise schedule, so they need a noise that defines times. Grids spaced by level
("karras", "exponential") place levels between sigma_max and sigma_min, so they work with every
noise. The names leading, trailing and linspace are from Lin et al. 2024, Table 2. These three grids
round the times of discrete schedules as diffusers does.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from diffusion_jax.config import named
from diffusion_jax.config.named import Table
from diffusion_jax.diffusion.noise import Noise, Scalar, Sigmas
from diffusion_jax.diffusion.precond import Sigma

if TYPE_CHECKING:
    from diffusion_jax.diffusion.groups import Sampler

Times = Float[np.ndarray, "n"] | Float[Array, "n"]
Spaced = tuple[Sigmas, Times | None]
"""A function from (noise, a config's `sampler` group, GridOptions, end) to (levels, times).

`end` is one of ENDS. `levels` holds n + 1 levels if the spacing includes the end of the last step
("even" does). If the spacing has only the n levels at which steps start ("trailing"), it returns
these, and make_grid appends the level at time 0, or 0 if the noise defines no times. `times` holds
the n times that the network sees at the start of the steps. With None, noise.time computes these
times from the levels."""
ENDS = ("zero", "sigma_min")
"""The last level of a grid. "zero" is 0. "sigma_min" is the level at time 0 or, on a grid spaced by
level, the smaller one of noise.bounds."""
EndName = Annotated[str, ENDS]


class Grid(NamedTuple):
    """The levels of n steps, and the time that the network sees at each level."""

    sigmas: Float[Array, "n+1"]
    time: Callable[[Sigma], Sigma]
    """Maps sigma to c_noise, the time given to the network. Networks with the preconditioner `edm`
    get ln(sigma) / 4 instead."""


class GridOptions(NamedTuple):
    """The options of a grid that depend on the sampler."""

    includes_end: bool = False
    """True if the grids `leading` and `linspace` space n + 1 times, the last of which is the end of
    the grid. The multistep solvers of diffusers do this."""
    rounded: bool = True
    """True if `linspace`, `karras` and `exponential` round fractional times of a discrete schedule
    to whole times. `leading` and `trailing` always use whole times."""
    middles: bool = False
    """True if the sampler also evaluates D between the levels, as DPM-Solver-2 does. The times
    there are those of the noise instead of an interpolation. As in diffusers, `karras` then rounds
    the times of the levels."""


def make_grid(noise: Noise, s: "Sampler", name: str, end: str, options: GridOptions) -> Grid:
    """Compute a sampling grid.

    Args:
        noise: The noise that the model was trained on.
        s: A config's `sampler` group. Its steps, sigma_min, sigma_max, rho and offset are read.
        name: The kind of grid, a key of GRIDS.
        end: The last level, one of ENDS.
        options: The options of the grid that depend on the sampler.

    Raises:
        ValueError: The grid is spaced in time, but the noise defines no times.
    """
    check(noise, name)
    sigmas, times = GRIDS.bound("sampler.grid", name)(noise, s, options, end)
    if len(sigmas) == s.steps:
        sigmas = jnp.append(sigmas, noise.least)
    sigmas = sigmas.at[-1].set(0.0) if end == "zero" else sigmas
    if times is None:
        return Grid(sigmas, noise.time)
    # Interpolate linearly in ln sigma.
    log_levels, times = jnp.log(sigmas[-2::-1]), jnp.asarray(times, jnp.float32)[::-1]
    time = lambda sigma: jnp.interp(jnp.log(sigma), log_levels, times)
    if options.middles:
        at_levels = time
        time = lambda sigma: jnp.where(jnp.isin(sigma, sigmas), at_levels(sigma), noise.time(sigma))
    return Grid(sigmas, time)


def check(noise: Noise, name: str) -> None:
    """Raise ValueError if the grid `name` is spaced in time, but the noise defines no times."""
    (call,) = named.calls("sampler.grid", name, GRIDS)
    if call.name in BY_TIMES and noise.level is None:
        raise ValueError(
            f"sampler.grid is {name!r}, which is spaced in time, but the model's diffusion.noise "
            "defines no times: choose from "
            f"{', '.join(grid for grid in GRIDS if grid not in BY_TIMES)}"
        )


def ldm(noise: Noise, s: "Sampler", *rest: Any) -> Spaced:
    """Compute n + 1 levels at LDM's times on a discrete schedule.

    On a continuous schedule, this function equals `leading`.
    """
    if not noise.steps:
        return leading(noise, s, *rest)
    return _level(noise)(jnp.asarray(leading_times(s.steps, noise.steps))), None


def even(noise: Noise, s: "Sampler", *_: Any) -> Spaced:
    """Compute the levels at n + 1 evenly spaced times, from the largest time to 0 (DPM-Solver)."""
    times = even_times(s.steps, noise.steps) if noise.steps else jnp.linspace(1, 0, s.steps + 1)
    return _level(noise)(jnp.asarray(times)), None


def leading(noise: Noise, s: "Sampler", options: GridOptions, *_: Any) -> Spaced:
    """Compute the levels at n evenly spaced times, from one spacing below the largest time to 0.

    Each step starts at one of these times. On a discrete schedule, s.offset is added to each time.
    If the end of the grid counts as one of the times (`_has_end`), there are n + 1 evenly
    spaced times instead of n, and the steps start at the first n of them.
    """
    points = s.steps + _has_end(noise, options)
    if not noise.steps:
        return _at_times(noise, s, np.arange(points)[::-1] / points)
    times = noise.steps // points * np.arange(points)[::-1] + s.offset
    return _at_times(noise, s, np.minimum(times, noise.steps - 1))


def trailing(noise: Noise, s: "Sampler", *_: Any) -> Spaced:
    """Compute the levels at n evenly spaced times, from the largest time to one spacing above 0."""
    left = 1 - np.arange(s.steps) / s.steps
    return _at_times(noise, s, np.round(noise.steps * left) - 1 if noise.steps else left)


def linspace(noise: Noise, s: "Sampler", options: GridOptions, *_: Any) -> Spaced:
    """Compute the levels at n evenly spaced times, from the largest time to 0, where steps start.

    If the end of the grid counts as one of the times (`_has_end`), there are n + 1 evenly
    spaced times instead of n. The steps start at the first n of them, and the last step ends at
    time 0.
    """
    last = noise.steps - 1 if noise.steps else 1
    times = np.linspace(0, last, s.steps + _has_end(noise, options))[::-1]
    return _at_times(noise, s, np.round(times) if noise.steps and options.rounded else times)


def karras(noise: Noise, s: "Sampler", options: GridOptions, end: str) -> Spaced:
    """Compute EDM's levels from sigma_max to sigma_min (Karras et al. 2022, equation 5).

    `noise.bounds` limits sigma_max and sigma_min.

    With `end` "zero", there are n levels, and the last step goes from sigma_min to the 0 that
    `make_grid` appends. With "sigma_min", there are n + 1 levels, and the last step ends at
    sigma_min.
    """
    low, high = noise.bounds(s.sigma_min, s.sigma_max)
    sigmas = karras_sigmas(s.steps + (end != "zero"), low, high, s.rho)[:-1]
    rounded = np.round if options.rounded or options.middles else None
    return sigmas, _times_of(noise, s, sigmas[: s.steps], rounded)


def exponential(noise: Noise, s: "Sampler", options: GridOptions, end: str) -> Spaced:
    """Compute levels from sigma_max to sigma_min whose logarithms are evenly spaced.

    Their number depends on `end`, as in `karras`.
    """
    low, high = map(jnp.log, noise.bounds(s.sigma_min, s.sigma_max))
    sigmas = jnp.exp(jnp.linspace(high, low, s.steps + (end != "zero")))
    # diffusers computes the last time as 998.99... and rounds it down.
    down = lambda times: np.floor(np.maximum(times - 1e-3, 0))
    return sigmas, _times_of(noise, s, sigmas[: s.steps], down if options.rounded else None)


def lcm(noise: Noise, s: "Sampler", *_: Any) -> Spaced:
    """Compute the levels at n of the 50 times on which latent consistency models are distilled.

    The times are those of a trailing grid of 50 steps. Of these, n are chosen at even distances,
    from the largest on (Luo et al. 2023). Raises ValueError if n is more than 50.
    """
    if s.steps > _DISTILLED:
        raise ValueError(f"sampler.steps is {s.steps}, but the grid lcm has {_DISTILLED} times: choose fewer")
    left = 1 - np.floor(np.arange(s.steps) * (_DISTILLED / s.steps)) / _DISTILLED
    return _at_times(noise, s, np.round(noise.steps * left) - 1 if noise.steps else left)


GRIDS = Table(
    ldm=ldm,
    even=even,
    leading=leading,
    trailing=trailing,
    linspace=linspace,
    karras=karras,
    exponential=exponential,
    lcm=lcm,
)
"""The functions that sampler.grid can name in configs. An entry "MODULE:FUNCTION" is imported on
use."""
GridName = Annotated[str, GRIDS]
BY_TIMES = ("ldm", "even", "leading", "trailing", "linspace", "lcm")
"""The grids that are spaced in time."""
_DISTILLED = 50


def karras_sigmas(
    n: int, sigma_min: Scalar = 0.002, sigma_max: Scalar = 80.0, rho: Scalar = 7.0
) -> Float[Array, "{n}+1"]:
    """Compute EDM's n levels from sigma_max to sigma_min, and append 0.

    This is equation 5 of Karras et al. 2022.
    """
    top, bottom = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return jnp.append((top + jnp.linspace(0, 1, n) * (bottom - top)) ** rho, 0.0)


def leading_times(n: int, steps: int = 1000) -> Float[np.ndarray, "{n}+1"]:
    """Compute LDM's n times on a schedule of `steps` times, in decreasing order, and append 0.

    LDM uses them for DDIM and PLMS. For n up to steps / 2, they are 1 + i * steps / n with i from
    n - 1 to 0. If n divides `steps`, these are exactly LDM's times; otherwise they are fractional.
    Sampling with few steps thus starts well below the schedule's last time. For larger n, the times
    are evenly spaced from steps - 1 to 1.

    The times are computed by numpy, as in `even_times`, because JAX would compile a program for
    each n.

    Raises:
        ValueError: n is not between 1 and `steps`.
    """
    if not 1 <= n <= steps:
        raise ValueError(f"{n} sampling steps do not fit a noise schedule of {steps} times: choose 1 to {steps} steps")
    gap = steps / n if 2 * n <= steps else (steps - 2) / (n - 1)
    return np.append(1 + gap * np.arange(n - 1, -1, -1), 0.0).astype(np.float32)


def even_times(n: int, steps: int = 1000) -> Float[np.ndarray, "{n}+1"]:
    """Compute n + 1 evenly spaced, usually fractional times from steps - 1 to 0 (DPM-Solver)."""
    return np.linspace(steps - 1, 0, n + 1, dtype=np.float32)


def _level(noise: Noise) -> Callable[[Any], Sigmas]:
    assert noise.level is not None  # make_grid calls `check` first.
    return noise.level


def _has_end(noise: Noise, options: GridOptions) -> bool:
    """Return whether `leading` and `linspace` place n + 1 times, the last of which is the end."""
    return options.includes_end or (not noise.steps and not noise.least)


def _at_times(noise: Noise, s: "Sampler", times: np.ndarray) -> Spaced:
    """Return the levels at the first s.steps of `times`, and these times.

    On a continuous schedule, the second result is None instead. On a discrete schedule, levels
    above s.sigma_max are lowered to s.sigma_max, unless s.sigma_max is 0.
    """
    times = times[: s.steps].astype(np.float32)
    sigmas = _level(noise)(jnp.asarray(times))
    return (jnp.minimum(sigmas, s.sigma_max or jnp.inf), times) if noise.steps else (sigmas, None)


def _times_of(noise: Noise, s: "Sampler", sigmas: Sigmas, rounded: Callable | None) -> Times | None:
    """Convert levels to times of a discrete schedule, by linear interpolation in ln sigma.

    If s.sigma_max lies above all levels of the schedule but the last, it replaces the last level,
    as in diffusers at zero terminal SNR. The function `rounded`, if it is not None, then rounds the
    times. Return None for a continuous schedule.
    """
    if not noise.steps:
        return None
    steps = np.arange(noise.steps, dtype=np.float32)
    levels = np.array(_level(noise)(jnp.asarray(steps)))
    if s.sigma_max > levels[-2]:
        levels[-1] = min(levels[-1], s.sigma_max)
    times = np.interp(np.log(sigmas), np.log(levels), steps)
    return rounded(times) if rounded else times
