"""Samplers: x_T -> x_0, given only a denoiser D(x, sigma).

All share one signature, `sampler(denoise, x, sigmas, noise)`. `x` has variance
sigmas[0]^2; the N + 1 levels `sigmas` decrease, N being the number of steps; `noise(i)` is the
standard normal draw of step i. What they return is x at the last level, 0 or the least that a
schedule has. Guidance, thresholding and the text conditioning live inside `denoise`, which every
sampler traces once: loops are scans, and a comment shows the paper's form where it looks different.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from diffusion_jax.config import named
from diffusion_jax.diffusion import grids
from diffusion_jax.diffusion import noise as noises
from diffusion_jax.diffusion.grids import Grid, Places, make_grid
from diffusion_jax.diffusion.noise import Scalar, Sigmas
from diffusion_jax.diffusion.precond import Denoiser, Images, Sigma

Draws = Callable[[Int[Array, ""]], Images]
Sampler = Callable[[Denoiser, Images, Sigmas, Draws], Images]


class Method(NamedTuple):
    """A sampler as configs name it, and how its steps lie where a config names no grid."""

    sampler: Sampler | str
    """The function, or "MODULE:FUNCTION"; its own parameters follow `*` (see named)."""
    grid: str = "even"
    """The grid, a key of GRIDS, over a table of times."""
    end: str = "zero"
    """Its end, one of ENDS, on a continuous schedule."""
    places: Places = Places()
    """Whether leading and linspace have n + 1 times, of which the end takes the last one's place,
    as diffusers' multistep solvers have it; whether times between whole ones are rounded."""


class Start(NamedTuple):
    """What a sampler takes, what becomes of what it returns, and what draws over pictures."""

    denoise: Denoiser
    x: Images
    sigmas: Sigmas
    noise: Draws
    finish: Callable[[Images], Images]
    around: Callable[[Sampler], Sampler] = lambda sampler: sampler


Begin = Callable[..., Start]  # Of the arguments of a Task's `sample`.


def whole(begin: Begin, s: Any) -> Callable[..., Images]:
    """A Task's `sample`: the sampler of a config's `sampler`, from its start to images."""

    def sample(*arguments: Any) -> Images:
        start = begin(*arguments)
        return start.finish(start.around(make(s))(*start[:4]))

    return sample


def make(s: Any) -> Sampler:
    """The sampler of a config's `sampler`; ValueError for one that there is not."""
    return bound("sampler.name", s.name, s)


def bound(field: str, text: str, group: Any = None) -> Callable[..., Any]:
    """The sampler that a config's field names, its own parameters bound: see named.bound."""
    functions = {name: method.sampler for name, method in SAMPLERS.items()}
    return named.bound(field, text, functions, group)


def method_of(s: Any) -> Method:
    """The entry of a config's `sampler`."""
    (call,) = named.calls("sampler.name", s.name)
    return SAMPLERS[call.name]


def sampling_grid(noise: noises.Noise, s: Any) -> Grid:
    """What a config's `sampler` steps down for a model of this noise."""
    method = method_of(s)
    name, end = s.grid or noise.grid or method.grid, s.end or noise.end or method.end
    # A grid that is named may be computed by numpy, also where a program that draws is traced.
    with jax.ensure_compile_time_eval() if s.grid else contextlib.nullcontext():
        return make_grid(noise, s, name, end, method.places)


def check_grid(noise: noises.Noise, s: Any) -> None:
    """ValueError if a config's `sampler` names a grid that a model of this noise has not."""
    grids.check(noise, s.grid or noise.grid or method_of(s).grid)


def initial_noise(keys: Key[Array, "B"], shape: tuple[int, ...], sigma: Scalar) -> Images:
    """The start of a sampler: sigma * eps, each image [H, W, C] drawn from its own key."""
    return sigma * _normal(keys, 0, shape)


def gaussian_noise(keys: Key[Array, "B"], shape: tuple[int, ...]) -> Draws:
    """A sampler's draws, each image [H, W, C] from its own key, whatever its batch."""
    return lambda i: _normal(keys, i + 1, shape)  # Draw 0 is the initial noise.


def heun(
    denoise: Denoiser,
    x: Images,
    sigmas: Sigmas,
    noise: Draws,
    *,
    churn: Annotated[Scalar, "[0, 1000]"] = 0.0,
    s_min: Annotated[Scalar, "[0, inf)"] = 0.0,
    s_max: Annotated[Scalar, "(0, inf]"] = float("inf"),
    s_noise: Annotated[Scalar, "(0, inf)"] = 1.0,
) -> Images:
    """Heun's method with optional noise churn in [s_min, s_max] (EDM, Algorithm 2).

    N steps are 2 N - 1 evaluations of D. The paper's loop, with t for sigma:

        for i in range(n):
            gamma = min(churn / n, sqrt(2) - 1) if s_min <= t[i] <= s_max else 0
            t_hat = t[i] + gamma * t[i]                                   # Noise is added,
            x_hat = x + sqrt(t_hat**2 - t[i]**2) * s_noise * noise(i)
            d = (x_hat - D(x_hat, t_hat)) / t_hat                         # the slope there,
            x = x_hat + (t[i + 1] - t_hat) * d                            # Euler's step along it,
            if t[i + 1] != 0:                                             # and Heun's correction.
                d_next = (x - D(x, t[i + 1])) / t[i + 1]
                x = x_hat + (t[i + 1] - t_hat) * (d + d_next) / 2

    It holds D twice, and so would the program. The scan is over evaluations in place of steps:
    k = 2 i is Euler's, k = 2 i + 1 the correction, and the network is compiled once. A last step
    to a level above 0 is Euler's too, and so is one from a level of nothing but noise (NO_SIGNAL).
    """
    inside = (s_min <= sigmas) & (sigmas <= s_max)
    gammas = jnp.where(inside, jnp.minimum(churn / (len(sigmas) - 1), 2**0.5 - 1), 0)
    return heun_steps(denoise, x, sigmas, gammas, noise, s_noise)


def heun_steps(
    denoise: Denoiser,
    x: Images,
    sigmas: Sigmas,
    gammas: Float[Array, "..."],
    noise: Draws,
    s_noise: Scalar = 1.0,
) -> Images:
    """The loop of `heun`, with a gamma for each step."""
    n = len(sigmas) - 1

    def evaluate(carry, k):
        x, x_hat, d = carry  # x_hat and d: where the step began, and its slope there.
        i, first = k // 2, k % 2 == 0
        sigma, sigma_next, gamma = sigmas[i], sigmas[i + 1], gammas[i]
        sigma_hat = sigma * (1 + gamma)
        # sqrt(sigma_hat^2 - sigma^2), which rounding could make the root of a negative number.
        added = s_noise * sigma * jnp.sqrt(gamma * (2 + gamma))
        x = x + jnp.where(first, added, 0) * noise(i)
        level = jnp.where(first, sigma_hat, sigma_next)

        d_here = (x - denoise(x, same_level(level, x))) / level
        x_hat = jnp.where(first, x, x_hat)
        mean = jnp.where(sigma_hat > NO_SIGNAL, d, (d + d_here) / 2)
        slope = jnp.where(first, d_here, mean)
        return (x_hat + (sigma_next - sigma_hat) * slope, x_hat, d_here), None

    return jax.lax.scan(evaluate, (x, x, jnp.zeros_like(x)), jnp.arange(2 * n - 1))[0][0]


def ddim(
    denoise: Denoiser,
    x: Images,
    sigmas: Sigmas,
    noise: Draws,
    *,
    eta: Annotated[Scalar, "[0, 1]"] = 0.0,
) -> Images:
    """DDIM (Song et al. 2021), equation 12: Euler's method in sigma where eta = 0.

    eta in [0, 1] is the share of new noise; at 1 a step draws from DDPM's posterior.
    """

    def step(x, inputs):
        i, sigma, sigma_next = inputs
        x0 = denoise(x, same_level(sigma, x))
        r = sigma_next / sigma
        up = eta * sigma_next * jnp.sqrt(1 - r**2)
        # sqrt(sigma_next^2 - up^2) / sigma, without the cancellation that eta = 1 brings.
        down = r * jnp.sqrt((1 - eta**2) + (eta * r) ** 2)
        return x0 + down * (x - x0) + up * noise(i), None

    return jax.lax.scan(step, x, (jnp.arange(len(sigmas) - 1), sigmas[:-1], sigmas[1:]))[0]


def euler(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """Euler's method in sigma: `ddim` with eta = 0."""
    return ddim(denoise, x, sigmas, noise)


def euler_ancestral(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """k-diffusion's ancestral Euler: `ddim` with eta = 1, whose step down is of the same size."""
    return ddim(denoise, x, sigmas, noise, eta=1.0)


def ddpm(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """DDPM's ancestral sampler (Ho et al. 2020, Algorithm 2) on any sigmas.

    On levels that end above 0 the last step adds no noise, so that it returns, as Algorithm 2
    does, the posterior mean there; on those that end at 0 it is `ddim` with eta = 1.
    """
    last = len(sigmas) - 2
    all_but_last = lambda i: jnp.where(i < last, noise(i), 0)
    return ddim(denoise, x, sigmas, all_but_last, eta=1.0)


def in_own_coordinates(x: Images, sigma: Scalar) -> Images:
    """alpha * x, what a variance-preserving model holds at this level; x itself where it is 0."""
    return x / jnp.sqrt(1 + sigma**2)


def same_level(sigma: Float[Array, ""], x: Images) -> Sigma:
    """A level for each image of a batch."""
    return jnp.full(x.shape[:1], sigma, x.dtype)


def _normal(keys: Key[Array, "B"], draw: int | Int[Array, ""], shape: tuple[int, ...]) -> Images:
    # Drawn flat: XLA's CPU backend compiles a 4-D draw of the same numbers several times slower.
    flat = lambda key: jax.random.normal(jax.random.fold_in(key, draw), (math.prod(shape),))
    return jax.vmap(flat)(keys).reshape(-1, *shape)


NO_SIGNAL = 1e4
"""The level above which next to nothing of the image is left: where rectified flow and a zero
terminal SNR start (2^20). A step from there goes far below it, and the slope at its end is no
estimate of the slope along it: Heun's correction would multiply the noise."""
_WHOLE, _CLOSED = Places(whole=False), Places(closed=True)
_MULTISTEP = "diffusion_jax.diffusion.multistep"
_STOCHASTIC = "diffusion_jax.diffusion.stochastic"
# By sampler.name of a config: all for both systems.
SAMPLERS: Mapping[str, Method] = {
    "heun": Method(heun, places=_WHOLE),
    "euler": Method(euler, places=_WHOLE),
    "euler_ancestral": Method(euler_ancestral, places=_WHOLE),
    "ddim": Method(ddim, grid="ldm"),
    "ddpm": Method(ddpm, grid="ldm", end="sigma_min"),
    "plms": Method(f"{_MULTISTEP}:plms", grid="ldm"),
    "plms_v": Method(f"{_MULTISTEP}:plms_v", grid="ldm"),
    "dpmpp_2m": Method(f"{_MULTISTEP}:dpmpp_2m", places=_CLOSED),
    "unipc": Method(f"{_MULTISTEP}:unipc", places=_CLOSED),
    "deis": Method(f"{_MULTISTEP}:deis", places=_CLOSED),
    "dpmpp_2m_sde": Method(f"{_STOCHASTIC}:dpmpp_2m_sde", places=_CLOSED),
    "dpmpp_3m_sde": Method(f"{_STOCHASTIC}:dpmpp_3m_sde", places=_CLOSED),
    "restart": Method(f"{_STOCHASTIC}:restart", places=_WHOLE),
}
