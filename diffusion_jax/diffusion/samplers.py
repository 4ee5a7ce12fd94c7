"""Samplers by name: the table SAMPLERS, and how a config's `sampler` group becomes a program.

The methods are in onestep.py, which describes their signature, multistep.py and stochastic.py.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from diffusion_jax.config import named
from diffusion_jax.diffusion import grids, multistep, onestep, stochastic
from diffusion_jax.diffusion.grids import Grid, Places
from diffusion_jax.diffusion.noise import Noise, Scalar, Sigmas
from diffusion_jax.diffusion.onestep import Draws, Sampler
from diffusion_jax.diffusion.precond import Denoiser, Images


class Method(NamedTuple):
    """An entry of SAMPLERS: a sampler, and its default grid."""

    sampler: Sampler | str
    """The function, or "MODULE:FUNCTION". Its keyword-only parameters can be given in configs."""
    grid: str = "even"
    """The default grid on discrete schedules, a key of GRIDS."""
    end: str = "zero"
    """The default end on continuous schedules, one of ENDS."""
    places: Places = Places()
    """How the steps lie on discrete schedules."""


_UNROUNDED, _CLOSED = Places(whole=False), Places(closed=True)
SAMPLERS: dict[str, Method] = {
    "heun": Method(onestep.heun, places=_UNROUNDED),
    "euler": Method(onestep.euler, places=_UNROUNDED),
    "euler_ancestral": Method(onestep.euler_ancestral, places=_UNROUNDED),
    "ddim": Method(onestep.ddim, grid="ldm"),
    "ddpm": Method(onestep.ddpm, grid="ldm", end="sigma_min"),
    "plms": Method(multistep.plms, grid="ldm"),
    "plms_v": Method(multistep.plms_v, grid="ldm"),
    "dpmpp_2m": Method(multistep.dpmpp_2m, places=_CLOSED),
    "unipc": Method(multistep.unipc, places=_CLOSED),
    "deis": Method(multistep.deis, places=_CLOSED),
    "dpmpp_2m_sde": Method(stochastic.dpmpp_2m_sde, places=_CLOSED),
    "dpmpp_3m_sde": Method(stochastic.dpmpp_3m_sde, places=_CLOSED),
    "restart": Method(stochastic.restart, places=_UNROUNDED),
}
"""Values of sampler.name, for both systems."""


class Start(NamedTuple):
    """What a Task's `begin` returns: a sampler's arguments, and what happens around the sampler."""

    denoise: Denoiser
    x: Images
    sigmas: Sigmas
    noise: Draws
    finish: Callable[[Images], Images]
    """Makes images of what the sampler returns."""
    around: Callable[[Sampler], Sampler] = lambda sampler: sampler
    """Wraps the sampler, to draw over a given picture."""


Begin = Callable[..., Start]  # Takes the arguments of a Task's `sample`.


def whole(begin: Begin, s: Any) -> Callable[..., Images]:
    """Make a Task's `sample` from its `begin` and the sampler of a config's `sampler` group."""

    def sample(*arguments: Any) -> Images:
        start = begin(*arguments)
        return start.finish(start.around(make(s))(*start[:4]))

    return sample


def make(s: Any) -> Sampler:
    """Return the sampler of a config's `sampler` group. Raises ValueError for unknown names."""
    return bound("sampler.name", s.name, s)


def bound(field: str, text: str, group: Any = None) -> Callable[..., Any]:
    """Return the sampler that a field names, such as "heun(churn=40)". See named.bound."""
    functions = {name: method.sampler for name, method in SAMPLERS.items()}
    return named.bound(field, text, functions, group)


SamplerName = Annotated[str, bound]


def method_of(s: Any) -> Method:
    """Return the entry of SAMPLERS that a config's `sampler` group names."""
    (call,) = named.calls("sampler.name", s.name)
    return SAMPLERS[call.name]


def sampling_grid(noise: Noise, s: Any) -> Grid:
    """Return the grid of a config's `sampler` group for a model with this noise.

    The group's `grid` and `end` take precedence over the noise's, and these over the sampler's.
    """
    method = method_of(s)
    name, end = s.grid or noise.grid or method.grid, s.end or noise.end or method.end
    # A grid that the config names may use numpy, so compute it even while a program is traced.
    with jax.ensure_compile_time_eval() if s.grid else contextlib.nullcontext():
        return grids.make_grid(noise, s, name, end, method.places)


def check_grid(noise: Noise, s: Any) -> None:
    """Raise ValueError if a config's `sampler` group names a grid that the noise does not have."""
    grids.check(noise, s.grid or noise.grid or method_of(s).grid)


def initial_noise(keys: Key[Array, "B"], shape: tuple[int, ...], sigma: Scalar) -> Images:
    """Draw the start of a sampler, sigma * eps; each image [H, W, C] has its own key."""
    return sigma * _normal(keys, 0, shape)


def gaussian_noise(keys: Key[Array, "B"], shape: tuple[int, ...]) -> Draws:
    """Return a sampler's draws; those of an image [H, W, C] depend on its own key alone."""
    return lambda i: _normal(keys, i + 1, shape)  # Draw 0 is the initial noise.


def in_own_coordinates(x: Images, sigma: Scalar) -> Images:
    """Return alpha * x, which a variance-preserving model sees at this level; x at level 0."""
    return x / jnp.sqrt(1 + sigma**2)


def _normal(keys: Key[Array, "B"], draw: int | Int[Array, ""], shape: tuple[int, ...]) -> Images:
    # Drawn flat: XLA's CPU backend compiles a 4-D draw of the same numbers several times slower.
    flat = lambda key: jax.random.normal(jax.random.fold_in(key, draw), (math.prod(shape),))
    return jax.vmap(flat)(keys).reshape(-1, *shape)
