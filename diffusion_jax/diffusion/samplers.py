"""Samplers: x_T -> x_0, given only a denoiser D(x, sigma).

All share one signature, `sampler(denoise, x, sigmas, noise)`. `x` has variance
sigmas[0]^2; the N + 1 levels `sigmas` decrease, N being the number of steps; `noise(i)` is the
standard normal draw of step i. What they return is x at the last level, 0 or the least that a
schedule has. Guidance, thresholding and the text conditioning live inside `denoise`, which every
sampler traces once: loops are scans, and a comment shows the paper's form where it looks different.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from diffusion_jax.diffusion import grids
from diffusion_jax.diffusion import noise as noises
from diffusion_jax.diffusion.grids import Grid, Places, make_grid
from diffusion_jax.diffusion.noise import Scalar, Sigmas
from diffusion_jax.diffusion.precond import Denoiser, Images, Sigma

Draws = Callable[[Int[Array, ""]], Images]
Sampler = Callable[[Denoiser, Images, Sigmas, Draws], Images]


class Method(NamedTuple):
    """A sampler as configs name it, and how its steps lie where a config names no grid."""

    make: Callable[[Any], Sampler]
    """Makes the sampler of a config's `sampler`: it may read the fields steps, churn and eta."""
    grid: str = "even"
    """The grid, a key of GRIDS, over a table of times."""
    end: str = "zero"
    """Its end, one of ENDS, on a continuous schedule."""
    places: Places = Places()
    """Whether leading and linspace have n + 1 times, of which the end takes the last one's place,
    as diffusers' multistep solvers have it; whether times between whole ones are rounded."""


_MULTISTEP = Places(closed=True)
# By sampler.name of a config: all for both systems.
SAMPLERS: Mapping[str, Method] = {
    "heun": Method(lambda s: functools.partial(heun, churn=s.churn), places=Places(whole=False)),
    "euler": Method(lambda s: euler, places=Places(whole=False)),
    "euler_ancestral": Method(lambda s: euler_ancestral, places=Places(whole=False)),
    "ddim": Method(lambda s: functools.partial(ddim, eta=s.eta), grid="ldm"),
    "ddpm": Method(lambda s: ddpm, grid="ldm", end="sigma_min"),
    "plms": Method(lambda s: plms, grid="ldm"),
    "plms_v": Method(lambda s: plms_v, grid="ldm"),
    # Its authors end fewer than 15 steps of a table, whose last level is above 0, at first order.
    "dpmpp_2m": Method(
        lambda s: functools.partial(dpmpp_2m, first_order_end=s.steps < 15), places=_MULTISTEP
    ),
    "unipc": Method(lambda s: unipc, places=_MULTISTEP),
}


def sampling_grid(noise: noises.Noise, s: Any) -> Grid:
    """What a config's `sampler` steps down for a model of this noise."""
    method = SAMPLERS[s.name]
    name, end = s.grid or noise.grid or method.grid, s.end or noise.end or method.end
    # A grid that is named may be computed by numpy, also where a program that draws is traced.
    with jax.ensure_compile_time_eval() if s.grid else contextlib.nullcontext():
        return make_grid(noise, s, name, end, method.places)


def check_grid(noise: noises.Noise, s: Any) -> None:
    """ValueError if a config's `sampler` names a grid that a model of this noise has not."""
    grids.check(noise, s.grid or noise.grid or SAMPLERS[s.name].grid)


def initial_noise(keys: Key[Array, "B"], shape: tuple[int, int, int], sigma: Scalar) -> Images:
    """The start of a sampler: sigma * eps, each image [H, W, C] drawn from its own key."""
    return sigma * _normal(keys, 0, shape)


def gaussian_noise(keys: Key[Array, "B"], shape: tuple[int, int, int]) -> Draws:
    """A sampler's draws, each image [H, W, C] from its own key, whatever its batch."""
    return lambda i: _normal(keys, i + 1, shape)  # Draw 0 is the initial noise.


def heun(
    denoise: Denoiser,
    x: Images,
    sigmas: Sigmas,
    noise: Draws,
    *,
    churn: Scalar = 0.0,
    s_min: Scalar = 0.0,
    s_max: Scalar = float("inf"),
    s_noise: Scalar = 1.0,
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
    to a level above 0 is Euler's too.
    """
    n = len(sigmas) - 1
    inside = (s_min <= sigmas) & (sigmas <= s_max)
    gammas = jnp.where(inside, jnp.minimum(churn / n, 2**0.5 - 1), 0)

    def evaluate(carry, k):
        x, x_hat, d = carry  # x_hat and d: where the step began, and its slope there.
        i, first = k // 2, k % 2 == 0
        sigma, sigma_next, gamma = sigmas[i], sigmas[i + 1], gammas[i]
        sigma_hat = sigma * (1 + gamma)
        # sqrt(sigma_hat^2 - sigma^2), which rounding could make the root of a negative number.
        added = s_noise * sigma * jnp.sqrt(gamma * (2 + gamma))
        x = x + jnp.where(first, added, 0) * noise(i)
        level = jnp.where(first, sigma_hat, sigma_next)

        d_here = (x - denoise(x, _batch(level, x))) / level
        x_hat = jnp.where(first, x, x_hat)
        slope = jnp.where(first, d_here, (d + d_here) / 2)
        return (x_hat + (sigma_next - sigma_hat) * slope, x_hat, d_here), None

    return jax.lax.scan(evaluate, (x, x, jnp.zeros_like(x)), jnp.arange(2 * n - 1))[0][0]


def ddim(
    denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws, *, eta: Scalar = 0.0
) -> Images:
    """DDIM (Song et al. 2021), equation 12: Euler's method in sigma where eta = 0.

    eta in [0, 1] is the share of new noise; at 1 a step draws from DDPM's posterior.
    """

    def step(x, inputs):
        i, sigma, sigma_next = inputs
        x0 = denoise(x, _batch(sigma, x))
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


Turn = Callable[[Images, Images, Float[Array, ""]], Images]
"""(slope or what stands for it, x, its level) to the other of the two."""


def plms(
    denoise: Denoiser,
    x: Images,
    sigmas: Sigmas,
    noise: Draws,
    *,
    turns: tuple[Turn, Turn] = (lambda d, x, sigma: d, lambda d, x, sigma: d),
) -> Images:
    """PLMS (Liu et al. 2022): four-step Adams-Bashforth on eps, N + 1 evaluations of D, no noise.

    The first step is taken twice, as CompVis does: along its slope, then along the mean of the
    slopes at both ends; later ones see as many slopes as there are. What F predicts does not
    matter, since eps is (x - D) / sigma. As a loop, with t for sigma:

        for i in range(n):
            d = (x - D(x, t[i])) / t[i]
            if i == 0:
                ahead = x + (t[1] - t[0]) * d
                mean = (d + (ahead - D(ahead, t[1])) / t[1]) / 2
            else:                             # 3/2, -1/2; 23/12, ...; 55/24, ... of up to four.
                mean = sum(w * slope for w, slope in zip(adams_bashforth[i], (d, *before)))
            x = x + (t[i + 1] - t[i]) * mean
            before = (d, *before)

    The scan is over the evaluations of D, of which k = 1 is the second of the first step. `turns`
    makes of a slope what is averaged in its place, and a slope of the average (see `plms_v`).
    """
    del noise  # Deterministic.
    n = len(sigmas) - 1
    # A single step to 0, where there is no slope, is not corrected.
    corrected = sigmas[1] > 0
    second = jnp.where(corrected, sigmas[1], sigmas[0])
    levels = jnp.concatenate([sigmas[:1], second[None], sigmas[1:-1]])
    starts = jnp.concatenate([sigmas[:1], sigmas[:1], sigmas[1:-1]])
    ends = jnp.concatenate([sigmas[1:2], sigmas[1:2], sigmas[2:]])
    half = jnp.where(corrected, 0.5, 0.0)
    weights = jnp.zeros((n + 1, 4)).at[0, 0].set(1).at[1, :2].set(jnp.array([half, 1 - half]))
    for i, row in enumerate(_ADAMS_BASHFORTH):
        weights = weights.at[2 + i :].set(jnp.array(row))

    def evaluate(carry, inputs):
        x, x_before, before, before_2, before_3 = carry  # Slopes of the three steps before.
        k, level, start, end, w = inputs
        # A product: how XLA divides by a scalar depends on the size of the batch.
        slope = (x - denoise(x, _batch(level, x))) * (1 / level)
        slope = turns[0](slope, x, level)
        mean = w[0] * slope + w[1] * before + w[2] * before_2 + w[3] * before_3
        begin = jnp.where(k == 1, x_before, x)
        x_next = begin + (end - start) * turns[1](mean, begin, start)
        keep = lambda old, new: jnp.where(k == 1, old, new)
        slopes = keep(before, slope), keep(before_2, before), keep(before_3, before_2)
        return (x_next, x, *slopes), None

    zero = jnp.zeros_like(x)
    carry = (x, x, zero, zero, zero)
    inputs = (jnp.arange(n + 1), levels, starts, ends, weights)
    return jax.lax.scan(evaluate, carry, inputs)[0][0]


def plms_v(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """PLMS on v in place of eps, as diffusers' PNDM takes what a model of v predicts.

    v = alpha eps - sigma' x0 in variance-preserving coordinates, of which x gives the direction:
    the average of several times' v is turned with that of the step's beginning alone.
    """

    def to_v(d, x, sigma):
        c = jax.lax.rsqrt(1 + sigma**2)
        return d / c - sigma * c * x

    def to_slope(v, x, sigma):
        c = jax.lax.rsqrt(1 + sigma**2)
        return c * v + sigma * c**2 * x

    return plms(denoise, x, sigmas, noise, turns=(to_v, to_slope))


def dpmpp_2m(
    denoise: Denoiser,
    x: Images,
    sigmas: Sigmas,
    noise: Draws,
    *,
    first_order_end: bool = False,
) -> Images:
    """DPM-Solver++(2M) (Lu et al. 2022, Algorithm 2): two-step in -ln sigma, no noise.

    The first step and the last, to 0, are of first order. With `first_order_end` the last is so
    also where it ends above 0, which its authors' code does of fewer than 15 steps.
    """
    del noise  # Deterministic.
    last = len(sigmas) - 2

    def step(carry, inputs):
        x, x0_before, h_before = carry
        i, sigma, sigma_next = inputs
        x0 = denoise(x, _batch(sigma, x))
        second_order = (h_before > 0) & (sigma_next > 0)
        if first_order_end:
            second_order &= i < last
        h = jnp.log(sigma / jnp.where(sigma_next > 0, sigma_next, sigma))
        weight = jnp.where(second_order, h / jnp.where(second_order, 2 * h_before, 1), 0)
        d = x0 + weight * (x0 - x0_before)
        return (d + sigma_next / sigma * (x - d), x0, h), None

    carry = (x, jnp.zeros_like(x), jnp.zeros(()))
    return jax.lax.scan(step, carry, (jnp.arange(last + 1), sigmas[:-1], sigmas[1:]))[0][0]


def unipc(denoise: Denoiser, x: Images, sigmas: Sigmas, noise: Draws) -> Images:
    """UniPC (Zhao et al. 2023) of order 2 with B(h) = e^h - 1, in -ln sigma: N evaluations of D.

    A step is that of `dpmpp_2m`, the last of first order. Before the next one D at its end, which
    that needs anyway, corrects it: with h the step's length, g the one before,

        x = r x_begin + (1 - r) (m0 + rho_0 (m0 - m1) h / g + rho_1 (D - m0)),  r = e^-h,

    m0 and m1 being D at the step's beginning and at that of the one before; the weights solve
    equation 9 of the paper for exactness on parabolas (on lines, of the first step: 0 and 1 / 2).
    """
    del noise  # Deterministic.
    last = len(sigmas) - 2

    def step(carry, inputs):
        x, begin, m0, m1, h, g = carry
        i, sigma, sigma_next = inputs
        d = denoise(x, _batch(sigma, x))
        rho_0, rho_1 = _unipc_weights(h, g)
        r = jnp.exp(-h)
        corrected = r * begin + (1 - r) * (m0 + rho_0 * (m0 - m1) + rho_1 * (d - m0))
        x = jnp.where(i > 0, corrected, x)
        ahead = jnp.log(sigma / jnp.where(sigma_next > 0, sigma_next, sigma))
        weight = jnp.where((i > 0) & (i < last), ahead / (2 * h), 0)
        guess = d + weight * (d - m0)
        return (guess + sigma_next / sigma * (x - guess), x, d, m0, ahead, jnp.where(i, h, 0)), None

    zero = jnp.zeros_like(x)
    carry = (x, zero, zero, zero, jnp.ones(()), jnp.zeros(()))
    return jax.lax.scan(step, carry, (jnp.arange(last + 1), sigmas[:-1], sigmas[1:]))[0][0]


def _unipc_weights(h: Float[Array, ""], g: Float[Array, ""]) -> tuple[Array, Array]:
    """rho_0 * h / g and rho_1 of `unipc`; g = 0 stands for no step before."""
    # (e^-h - 1) / -h = 1 + phi_2, and phi_2 / -h = 1 / 2 + phi_3: as series where these cancel.
    series = lambda k: sum((-h) ** n / math.factorial(n + k) for n in range(1, 9))
    phi_1 = jnp.expm1(-h)
    phi_2 = jnp.where(h < 0.5, series(1), phi_1 / -h - 1)
    phi_3 = jnp.where(h < 0.5, series(2), (phi_1 / -h - 1) / -h - 1 / 2)
    b_1, b_2 = phi_2 / phi_1, 2 * phi_3 / phi_1
    rho_0 = (b_1 - b_2) / (1 + g / h)
    second = g > 0
    times_ratio = jnp.where(second, rho_0 * h / jnp.where(second, g, 1), 0)
    return times_ratio, jnp.where(second, b_1 - rho_0, 0.5)


# Weights of the slope here and of those before, once there are one, two and three of these.
_ADAMS_BASHFORTH = (
    (3 / 2, -1 / 2, 0.0, 0.0),
    (23 / 12, -16 / 12, 5 / 12, 0.0),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)


def _batch(sigma: Float[Array, ""], x: Images) -> Sigma:
    return jnp.full(x.shape[:1], sigma, x.dtype)


def _normal(keys: Key[Array, "B"], draw: int | Int[Array, ""], shape: tuple[int, ...]) -> Images:
    # Drawn flat: XLA's CPU backend compiles a 4-D draw of the same numbers several times slower.
    flat = lambda key: jax.random.normal(jax.random.fold_in(key, draw), (math.prod(shape),))
    return jax.vmap(flat)(keys).reshape(-1, *shape)
